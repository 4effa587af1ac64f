"""The variables that matter for a job, as they may be shown: by family, with what each does, secrets masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rankwise.doctor.variables.known import FAMILIES, KNOWN, find_family
from rankwise.doctor.variables.masking import mask_value
from rankwise.doctor.variables.spelling import guess

if TYPE_CHECKING:
    from collections.abc import Mapping


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One variable.

    Attributes:
        family: The group that it is shown in.
        name: Its name.
        value: Its value; secrets are masked.
        does: What it does; empty if it is not known.
        meant: The name that is probably meant; empty if it is not misspelt.
    """

    family: str
    name: str
    value: str
    does: str = ""
    meant: str = ""


def list_variables(env: Mapping[str, str]) -> list[Listed]:
    """Return the variables of the known families, by family; all others are left out, whatever they hold."""
    order = ["who this process is", "set by launchers", *FAMILIES]
    found = [
        Listed(
            family=family, name=name, value=mask_value(name, value, is_known=name in KNOWN), does=KNOWN.get(name, ""),
            meant=meant if (meant := guess(name)) not in env else "",
        )
        for name, value in env.items()
        if (family := find_family(name))
    ]  # fmt: skip
    return sorted(found, key=lambda one: (order.index(one.family), one.name))
