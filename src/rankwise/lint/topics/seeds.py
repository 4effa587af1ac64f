"""What the random numbers of a call depend on: the seed that was set before it, if any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rankwise.lint.topics.job_view import is_hidden

if TYPE_CHECKING:
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.history import History

Library = Literal["torch", "numpy", "random"]
Seeding = Literal["unset", "equal", "differs", "unknown"]
_SEEDS: dict[str, frozenset[str]] = {
    "torch": frozenset({"torch.manual_seed", "torch.random.manual_seed"}),
    "numpy": frozenset({"numpy.random.seed"}),
    "random": frozenset({"random.seed"}),
}
_ALL = frozenset({"accelerate.utils.set_seed", "transformers.set_seed", "transformers.trainer_utils.set_seed", "lightning.pytorch.seed_everything",
                  "lightning.fabric.seed_everything", "lightning.seed_everything"})  # fmt: skip


def library_of(name: str) -> Library:
    """Whose generator a function draws from."""
    if name.startswith(("torch", "?.")):
        return "torch"
    return "random" if name.startswith("random.") else "numpy"


def last_seed(history: History, before: Call, library: Library) -> Call | None:
    """The last call before another that set the seed of a library."""
    names = _SEEDS[library] | _ALL
    found = None
    for call in history.calls[: before.index]:
        if call.name in names or (call.name.startswith("?") and "seed" in call.name):
            found = call
    return found


def find_seeding(history: History, before: Call, library: Library) -> Seeding:
    """Whether ranks draw the same at a call, as far as is known."""
    seed = last_seed(history, before, library)
    if seed is None:
        # A function out of sight may have set it.
        hidden = any(is_hidden(call) for call in history.calls[: before.index])
        return "unknown" if hidden else "unset"
    given = [*seed.args, *seed.kwargs.values()]
    specific = seed.kwargs.get("device_specific")
    if specific is not None and specific.const is True:
        return "differs"
    if any(value.spread for value in given):
        return "differs"
    return "unknown" if seed.name.startswith("?") or seed.has_star or seed.tests else "equal"
