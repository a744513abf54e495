"""Task families: a hidden task is a map from cues to goals of a body, which rewards alone reveal.

To add a family, write a subclass of ``Family`` and enter it in ``FAMILIES``.
"""

from dataclasses import replace

from agentic_ring.data.families.cheetah import Cheetah
from agentic_ring.data.families.family import CODE_BITS, CODES, Family, Pay, Region
from agentic_ring.data.families.point_mass import CHECKERBOARD, PointMass
from agentic_ring.data.families.reacher import Reacher
from agentic_ring.errors import UnknownNameError

__all__ = ["CODES", "CODE_BITS", "FAMILIES", "Family", "Pay", "Region", "family_named"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (PointMass(held_out=CHECKERBOARD), Reacher(held_out=CHECKERBOARD), Cheetah(held_out=(2, 7)))
}


def family_named(name: str) -> Family:
    """Returns the family with this name, such as point_mass, or point_mass-128 with 128 decisions a trial.

    Raises:
      UnknownNameError: there is no such family.
      ConfigError: its trials cannot have this number of decisions.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    body, _, decisions = name.partition("-")
    if body in FAMILIES and decisions.isdecimal() and decisions.isascii():
        family = replace(FAMILIES[body], decisions=int(decisions))
        if family.name == name:
            return family
    raise UnknownNameError("family", name, tuple(FAMILIES))
