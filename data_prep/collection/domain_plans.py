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
      in_context_tasks: tasks among which a chain of ``experiments/in_context.py`` draws.
      members: learners of an explorer.
      top_fraction: share of the trajectories that count as the best of a task there.
    """

    action_repeat: int
    tasks: tuple[str, ...]
    episodes: int
    updates: int
    in_context_tasks: tuple[str, ...]
    members: int = 3
    top_fraction: float = 0.1


_FOUR_SPOTS = ("reach_top_left", "reach_top_right", "reach_bottom_left", "reach_bottom_right")

# Action repeat, tasks of TD3, episodes, updates, in-context tasks.
PLANS = {
    # A walker that runs also stands and walks (stand >= walk >= run at every state), so two members that
    # run and one that walks serve all three tasks.
    "walker": DomainPlan(4, ("run", "run", "walk"), 400, 8, ("stand", "walk", "run", "run_backward")),
    "cheetah": DomainPlan(4, ("run", "run", "run"), 300, 8, ("run", "run_backward")),
    "cartpole": DomainPlan(8, ("swingup", "swingup", "swingup"), 320, 8, ("swingup", "swingup_sparse")),
    "quadruped": DomainPlan(4, ("run", "jump", "walk"), 400, 8, ("stand", "walk", "run", "jump")),
    # Our explorers have not found the way to the two spots on the right.
    "point_mass_maze": DomainPlan(8, _FOUR_SPOTS, 400, 8, _FOUR_SPOTS[::2], members=4, top_fraction=0.05),
    # Episodes of 250 steps, a quarter of the others', so more of them.
    "jaco": DomainPlan(2, _FOUR_SPOTS, 800, 8, _FOUR_SPOTS, members=4),
}
