"""What the members of the collector ``family`` learn: rewards that are no tasks, for many behaviours.

Margins are wide and fall linearly, so that a learner has something to climb wherever it starts.
"""

from agentic_ring.data.rewards.family import RewardFunction, Side, Term


def _term(name: str, target: float, side: Side, margin: float, radius: float = 0.0) -> Term:
    return Term((name,), (target,), side, margin, radius, "linear")


def _speed(target: float, name: str = "horizontal_velocity") -> Term:
    """At least as fast as ``target``, in its direction; almost nothing for standing still."""
    return _term(name, target, "above" if target > 0 else "below", abs(target))


def _rewards(**products: tuple[Term, ...]) -> dict[str, RewardFunction]:
    return {name: RewardFunction(terms) for name, terms in products.items()}


_UPRIGHT = _term("torso_upright", 1.0, "above", 2.0)
_HIGH = _term("torso_height", 1.2, "above", 1.0)
_LEVEL = _term("torso_lean", 0.0, "near", 0.5, 0.1)

LEARNED = {
    "walker": _rewards(
        back_run=(_HIGH, _UPRIGHT, _speed(-4.0)),
        crouched_run=(_term("torso_height", 0.9, "near", 0.5, 0.1), _UPRIGHT, _speed(4.0)),
        leaning_walk=(_HIGH, _term("torso_lean", 0.6, "near", 1.0, 0.1), _speed(2.0)),
        forward=(_speed(6.0),),
        roll=(_speed(5.0, "angular_momentum"),),
        one_leg=(_HIGH, _UPRIGHT, _term("right_foot_height", 0.8, "above", 0.8)),
        headstand=(_term("torso_upright", -0.9, "below", 1.0),),
        crawl=(_term("torso_height", 0.5, "below", 0.4), _speed(2.0)),
    ),
    "cheetah": _rewards(
        low_run=(_term("torso_height", 0.35, "below", 0.3), _speed(6.0)),
        low_back_run=(_term("torso_height", 0.25, "below", 0.3), _speed(-6.0)),
        level_trot=(_LEVEL, _term("horizontal_velocity", 2.0, "near", 2.0, 0.3)),
        level_back_trot=(_LEVEL, _term("horizontal_velocity", -2.0, "near", 2.0, 0.3)),
        leap=(_speed(2.0, "vertical_velocity"), _speed(4.0)),
        leap_back=(_speed(2.0, "vertical_velocity"), _speed(-4.0)),
        tumble=(_speed(4.0, "angular_momentum"), _speed(1.5)),
        tumble_back=(_speed(-4.0, "angular_momentum"), _speed(-1.5)),
    ),
    "quadruped": _rewards(
        backward=(_UPRIGHT, _speed(-1.0, "forward_velocity")),
        sideways=(_UPRIGHT, _speed(1.0, "lateral_velocity")),
        spin=(_UPRIGHT, _speed(3.0, "yaw_velocity")),
        roll=(_speed(3.0, "roll_velocity"),),
        crouch=(_UPRIGHT, _term("torso_height", 0.3, "below", 0.4)),
        paw=(_UPRIGHT, _term("toe_front_left_height", 0.6, "above", 0.6)),
    ),
    "cartpole": _rewards(
        spin=(_speed(10.0, "pole_angle_velocity"),),
        lean=(_term("pole_angle_sine", 0.9, "above", 1.9),),
        hang_left=(_term("pole_angle_cosine", -1.0, "below", 2.0), _term("cart_x", -1.2, "near", 2.0, 0.1)),
        balance_right=(_term("pole_angle_cosine", 0.9, "above", 1.9), _term("cart_x", 1.2, "near", 2.0, 0.1)),
    ),
}
"""Name -> reward, for each domain whose rewards are no goals: these are reached by random actions."""
