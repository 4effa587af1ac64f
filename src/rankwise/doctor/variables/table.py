"""The variables that matter for a job (``variables.txt``): their families, what each may hold and does, and misspelt names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from rankwise.doctor.probe import Reading, warn

#: Shorter names differ by a letter and are both real: NCCL_IB_TC, NCCL_IB_SL.
_LONG, _LEAST = 8, 5


@final
@dataclass(frozen=True, slots=True)
class Variable:
    """One variable, in the family that it is shown in.

    Attributes:
        kind: What it may hold: ``number``, ``file``, ``word``, ``word or number``, ``exact``, ``list`` or ``terms``; or
            whose other name it is: ``old name of``, ``replaced by``, ``slip for``. Empty if nothing is known.
        words: The words that it may hold, or that other name.
        does: What it does; empty if it is not explained.
    """

    name: str
    family: str
    kind: str = ""
    words: tuple[str, ...] = ()
    does: str = ""
    least: int = -(1 << 63)
    most: int = (1 << 63) - 1


@cache
def _read() -> tuple[dict[str, tuple[str, ...]], dict[str, Variable]]:
    """Return the prefixes of each family, and the variables by name."""
    families: dict[str, tuple[str, ...]] = {}
    variables: dict[str, Variable] = {}
    family = ""
    for line in Path(__file__).with_name("variables.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            family, _, prefixes = line.strip("[]").partition(": ")
            families[family] = tuple(prefixes.split())
        elif line.startswith("#"):
            continue
        elif " |" in line:
            name, holds, does = (cell.strip() for cell in line.split("|", 2))
            variables[name] = _read_form(name, family, holds, does)
        else:
            variables |= {name: Variable(name, family) for name in line.split()}
    return families, variables


def _read_form(name: str, family: str, holds: str, does: str) -> Variable:
    least, dots, most = holds.partition("..")
    if dots:
        return Variable(name, family, "number", (), does, int(least), int(most or (1 << 63) - 1))
    kinds = ("word or number", "old name of", "replaced by", "slip for")
    kind = next((one for one in kinds if holds.startswith(one)), holds.partition(" ")[0])
    return Variable(name, family, kind, tuple(holds.removeprefix(kind).split()), does)


def find(name: str) -> Variable | None:
    """Return what is known of a variable; None if its name is not known."""
    return _read()[1].get(name)


def is_explained(name: str) -> bool:
    """Return whether it is known what a variable does: then its value is no secret, whatever its name sounds like."""
    return (one := find(name)) is not None and bool(one.does)


def find_family(name: str) -> str:
    """Return the family of a variable; empty if it belongs to none, and is not to be shown."""
    one = find(name)
    if one is not None and one.kind != "slip for":
        return one.family
    return next((family for family, prefixes in _read()[0].items() if name.startswith(prefixes)), "")


def rank_family(family: str) -> int:
    """Return the place of a family among all of them."""
    return list(_read()[0]).index(family)


def guess(name: str) -> str:
    """Return the real name that a misspelt one is for; empty if it is none, or far from all."""
    one = find(name)
    if one is not None:
        return one.words[0] if one.kind == "slip for" else ""
    if find(near := f"NCCL_{name.strip().partition('_')[2]}") and name[:2] == "NC":
        return near  # NCLL_DEBUG, or a blank behind the name
    families, variables = _read()
    prefix = next((one for prefixes in families.values() for one in prefixes if name.startswith(one)), "")
    if not prefix:
        return ""
    known = (one.name for one in variables.values() if one.name.startswith(prefix) and one.kind != "slip for")
    return next((one for one in known if _is_typo(name[len(prefix) :], one[len(prefix) :])), "")


def report_misspellings(
    env: Iterable[str], *, prefixes: tuple[str, ...] = ("",), but: tuple[str, ...] = ()
) -> Iterator[Reading]:
    """Yield a warning for each name that nothing reads and that is probably misspelt, of those that begin with ``prefixes`` and not with ``but``."""
    names = set(env)
    for name in sorted(names):
        meant = guess(name) if name.startswith(prefixes) and not (but and name.startswith(but)) else ""
        if meant and meant not in names:
            what = f"{name} is set, which nothing reads; did you mean {meant}?"
            yield warn(what, f"{meant} silently stays at its default", f"unset {name}  # and set {meant}")


def _is_typo(typed: str, known: str) -> bool:
    """Return whether one is the other with a slip: an underscore too many, letters swapped, one lost, added or wrong."""
    if typed.replace("_", "") == known.replace("_", ""):
        return True
    least = _LONG if len(typed) == len(known) else _LEAST
    if min(len(typed), len(known)) < least or abs(len(typed) - len(known)) > 1:
        return False
    pairs = enumerate(zip(typed, known, strict=False))
    start = next((at for at, (a, b) in pairs if a != b), min(len(typed), len(known)))
    rest, meant = typed[start:], known[start:]
    if any(letter.isdigit() for letter in rest[:1] + meant[:1]):
        return False  # numbered names: _V2
    is_swapped = rest[:2] == meant[:2][::-1] and rest[2:] == meant[2:]
    return is_swapped or rest[1:] == meant[1:] or rest[1:] == meant or rest == meant[1:]
