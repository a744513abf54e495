"""The plan of each domain: action repeat, tasks, episodes and updates of the runs on two cores."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DomainPlan:
    """Defaults of a domain; see ``docs/data.md``.

    Attributes:
      action_repeat: control steps for which an action is held, in collections and in the demo's decisions.
      tasks: task whose reward each TD3 member observes, in turn.
      episodes: episodes of `mix`.
      updates: TD3 critic updates for each decision of all environments together.
      members: learners of an explorer.
    """

    action_repeat: int
    tasks: tuple[str, ...]
    episodes: int
    updates: int
    members: int = 3


_FOUR_SPOTS = ("reach_top_left", "reach_top_right", "reach_bottom_left", "reach_bottom_right")

# Action repeat, tasks of TD3, episodes, updates.
PLANS = {
    # A walker that runs also stands and walks (stand >= walk >= run at every state), so two members that
    # run and one that walks serve all three tasks.
    "walker": DomainPlan(4, ("run", "run", "walk"), 400, 10),
    "cheetah": DomainPlan(4, ("run", "run", "run"), 300, 8),
    "cartpole": DomainPlan(8, ("swingup", "swingup", "swingup"), 320, 8),
    "quadruped": DomainPlan(4, ("run", "jump", "walk"), 400, 8),
    "point_mass_maze": DomainPlan(8, _FOUR_SPOTS, 400, 8, members=4),
    # Episodes of 250 steps, a quarter of the others', so more of them.
    "jaco": DomainPlan(2, _FOUR_SPOTS, 800, 8, members=4),
}
