"""What a saved place in the data must be, to continue there: of the same kind of data, order and seed, and sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.base.errors import DataError

if TYPE_CHECKING:
    from rankwise.data.schedule import Schedule

VERSION = 1
#: Told in a state, so that one of the other kind of data set is known for what it is.
KIND, STREAM_KIND = "indexed", "stream"
_OTHER_SIZE = (
    "end the epoch with the data set that it began with: between epochs it may grow or shrink. To start again with these weights, load "
    "them alone, checkpoint.load(folder, {'model': model, 'optimizer': optimizer}), and save in another folder"
)


def is_between_epochs(state: dict[str, Any], *, drop_last: bool) -> bool:
    """Whether nothing of a sound state's epoch was delivered, or all that a schedule would deliver."""
    left = state["num_samples"] - state["consumed"]
    is_over = left < state["global_batch"] if drop_last else left == 0
    return state["consumed"] == 0 or bool(is_over)


def check_state(state: Any, schedule: Schedule, *, seed: int, order: str) -> None:
    """Refuse what is no state of a data set with an index that fits a sampler.

    Args:
        state: What was given.
        schedule: The sampler's.
        seed: The sampler's.
        order: The name of its order.

    Raises:
        DataError: It belongs to other data or another order, or is damaged.
    """
    rank, size = schedule.rank, schedule.num_samples
    check_kind(state, KIND, rank)
    epoch, consumed, saved_size = state.get("epoch"), state.get("consumed"), state.get("num_samples")
    counts = (epoch, consumed, saved_size, state.get("global_batch"))
    if any(type(one) is not int or one < 0 for one in counts) or not consumed <= saved_size:
        raise DataError(
            f"the state says epoch {epoch!r} and {consumed!r} of {saved_size!r} samples consumed",
            rank=rank,
            hint="the state is damaged: load an older one",
        )
    if saved_size != size and not is_between_epochs(state, drop_last=schedule.drop_last):
        raise DataError(
            f"the state was saved with num_samples {saved_size}, in the middle of epoch {epoch}, and this sampler has {size}",
            rank=rank,
            hint=_OTHER_SIZE,
        )
    for name, own, hint in (
        ("seed", seed, "give the sampler the seed of the state"),
        (
            "order",
            order,
            "give the sampler the shuffle, weights, lengths of the state, and with lengths its global batch",
        ),
    ):
        if state.get(name) != own:
            raise DataError(
                f"the state was saved with {name} {state.get(name)!r}, and this sampler has {own!r}",
                rank=rank,
                hint=hint,
            )


def check_kind(state: Any, kind: str, rank: int) -> None:
    """Refuse what is no state of this kind of data set.

    Args:
        state: What was given.
        kind: ``KIND`` or ``STREAM_KIND``.
        rank: Ours, for the error.

    Raises:
        DataError: It is another thing, or of another version or kind.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION:
        value = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise DataError(
            f"this is not a state of a sampler or loader that can be read here: version {value!r}, but {VERSION} is expected",
            rank=rank,
            hint="load what state_dict() has returned, with the rankwise that saved it",
        )
    if state.get("kind") != kind:
        words = {KIND: "a data set that has an index", STREAM_KIND: "a data set that can only be iterated"}
        raise DataError(
            f"the state was saved for {words.get(str(state.get('kind')), 'something unknown')}, but this is {words[kind]}",
            rank=rank,
            hint="load it into a loader of the same data set, or start an epoch with set_epoch",
        )
