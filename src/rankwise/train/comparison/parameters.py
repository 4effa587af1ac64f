"""Compares the parameters of two runs by what their journals tell of them: digests at the start, norms on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

from rankwise.checkpoint.folder import list_checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from rankwise.train.journal import Journal

#: What wrappers put before a parameter's name.
_WRAPPERS = ("module.", "_orig_mod.")


class Named(NamedTuple):
    """A value of both runs with its name."""

    name: str
    a: float
    b: float
    difference: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The parameters of both runs at a step at which both began or went on, by the digests of their bits.

    Attributes:
        step: After this step.
        num_common: Parameters that both have.
        differing: Those of them that are not the same to the bit.
        only_a: Names that only the first run has.
        only_b: Names that only the second run has.
    """

    step: int
    num_common: int
    differing: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def are_equal(self) -> bool:
        """Whether the models are the same to the bit."""
        return not (self.differing or self.only_a or self.only_b)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The parameters' L2 norms at the steps at which both runs have told them.

    Attributes:
        num_steps: Common steps.
        divergence_step: The first at which a norm differs by more than the tolerance; None if there is none.
        diverged: The norms that differ there, the largest difference first.
        last_step: The last common step.
        largest: The norm that differs most at the last common step; None if the runs have no name in common.
        only_a: Names that only the first run has.
        only_b: Names that only the second run has.
    """

    num_steps: int
    divergence_step: int | None
    diverged: tuple[Named, ...]
    last_step: int
    largest: Named | None
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def relative_difference(a: float, b: float) -> float:
    """Return the distance of two numbers over the greater one: 0 if they are the same, also NaN; infinite if only one is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    greater = max(abs(a), abs(b))
    # The distance of two large numbers may be too large for a float.
    return abs(a - b) / greater if greater < 1e300 else 2 * abs(a / 2 - b / 2) / greater


def strip_wrappers(name: str) -> str:
    """Return a parameter's name as the bare model has it: a compiled or wrapped model calls it otherwise."""
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper) or f".{wrapper}" in name:
            name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def strip_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names that the bare model has, unless two of them would become one."""
    stripped = {strip_wrappers(name): value for name, value in values.items()}
    # A model may have a real part of such a name.
    return stripped if len(stripped) == len(values) else dict(values)


def compare_weights(a: Journal, b: Journal) -> Iterable[Weights]:
    """Give the comparison of the digests at each step at which both runs began or went on."""
    all_a = {one.started.step: strip_all(one.started.digests) for one in a.starts if one.started.digests}
    all_b = {one.started.step: strip_all(one.started.digests) for one in b.starts if one.started.digests}
    for step in sorted(all_a.keys() & all_b.keys()):
        in_a, in_b = all_a[step], all_b[step]
        common = [name for name in in_a if name in in_b]
        yield Weights(
            step=step,
            num_common=len(common),
            differing=tuple(name for name in common if in_a[name] != in_b[name]),
            only_a=tuple(name for name in in_a if name not in in_b),
            only_b=tuple(name for name in in_b if name not in in_a),
        )


def compare_norms(
    a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]], tolerance: float
) -> Norms | None:
    """Return the comparison of the norms, by step and name; None if the runs have no step with norms in common."""
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return None
    at_steps = {step: _meet_names(strip_all(a[step]), strip_all(b[step])) for step in steps}
    divergence = next((step for step in steps if any(one.difference > tolerance for one in at_steps[step])), None)
    last = steps[-1]
    names_a, names_b = strip_all(a[last]), strip_all(b[last])
    return Norms(
        num_steps=len(steps),
        divergence_step=divergence,
        diverged=() if divergence is None else tuple(one for one in at_steps[divergence] if one.difference > tolerance),
        last_step=last,
        largest=next(iter(at_steps[last]), None),
        only_a=tuple(name for name in names_a if name not in names_b),
        only_b=tuple(name for name in names_b if name not in names_a),
    )


def find_largest_norms(a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]) -> dict[int, Named]:
    """Return at each common step the norm that differs most."""
    found = {step: _meet_names(strip_all(a[step]), strip_all(b[step])) for step in sorted(a.keys() & b.keys())}
    return {step: names[0] for step, names in found.items() if names}


def _meet_names(a: Mapping[str, float], b: Mapping[str, float]) -> list[Named]:
    found = [Named(name, value, b[name], relative_difference(value, b[name])) for name, value in a.items() if name in b]
    return sorted(found, key=lambda one: one.difference, reverse=True)


def choose_checkpoints(a: Journal, b: Journal, divergence: int | None) -> list[tuple[int, Path, Path]]:
    """Return the checkpoints of a step that tell most: the last common ones before the runs part, and the first after it.

    Args:
        a: One run; its checkpoints are in its folder.
        b: The other.
        divergence: The step at which they diverge; None: only the last common ones are chosen.

    Returns:
        Step and both checkpoints, by step; empty if no step has a whole one in both folders.

    Raises:
        CheckpointError: A folder can't be read.
    """
    of_a, of_b = (_list_whole(one) for one in (a, b))
    steps = sorted(of_a.keys() & of_b.keys())
    before = [step for step in steps if divergence is None or step < divergence][-1:]
    after = [step for step in steps if divergence is not None and step >= divergence][:1]
    return [(step, of_a[step], of_b[step]) for step in (*before, *after)]


def _list_whole(run: Journal) -> dict[int, Path]:
    # The latest of a step comes first, and is what was saved after a resume. Later ones than the journal's were taken
    # back.
    found = [one for one in list_checkpoints(run.folder) if one.problem is None and one.step <= run.last_step]
    return {one.step: one.path for one in reversed(found)}
