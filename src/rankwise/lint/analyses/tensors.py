"""Tensors as the simulated run knows them: where they lie, and what they were computed from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.interpreter.values import ANY, Items, Library, Method, is_number
from rankwise.lint.library.constructor_table import DRAWN, FACTORIES, OF_VALUES, RETURNS_SELF

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rankwise.lint.interpreter.values import Call, Value

_DEEPEST = 8


def is_on_cpu(value: Value, depth: int = 0) -> bool:
    """Whether a tensor, or each one of a list, was made on the CPU and not moved since."""
    thing, made = value.thing, value.made
    parts: Sequence[Value] = ()
    if isinstance(thing, (Items, Method)):  # `x.data`, `x.T`
        parts = thing.values if isinstance(thing, Items) else [thing.receiver]
    elif made is None or depth > _DEEPEST or not made.name.startswith(("torch.", "?.", "operator.", "either")):
        return False
    elif made.name == "operator.Subscript":
        parts = made.args[:1]
    elif (place := place_given(made)) is not None:
        return is_cpu(place)
    elif made.name in FACTORIES | DRAWN or made.name.endswith(".cpu"):
        return not made.has_star
    elif not made.name.endswith(".cuda"):
        # What else torch computes lies where all tensors that went into it do.
        given = (*([made.receiver] if made.name != "either" else []), *made.args)
        parts = [one for one in given if one is not ANY and not is_number(one)]
    return bool(parts) and all(is_on_cpu(one, depth + 1) for one in parts)


def is_mean(value: Value, depth: int = 0) -> bool:
    """Whether it is a mean itself: of a batch, or a sum that was divided by a count; not what was computed of one."""
    made, word = value.made, value.made.name.rpartition(".")[2] if value.made is not None else ""
    if isinstance(value.thing, (Items, Method)):  # `[loss.item()]`; `outputs.loss` of a model of transformers
        parts = value.thing.values if isinstance(value.thing, Items) else []
        of = value.thing.receiver.made if isinstance(value.thing, Method) and value.thing.name == "loss" else None
        return (of is not None and is_model_call(of)) or (
            len(parts) == 1 and depth < _DEEPEST and is_mean(parts[0], depth + 1)
        )
    if made is None or depth > _DEEPEST:
        return False
    if word in RETURNS_SELF | {"detach", "clone", "item", "float", "either"} or made.name in OF_VALUES:
        return any(is_mean(one, depth + 1) for one in (made.receiver, *made.args))
    maker = getattr(made.receiver.thing, "call", None) if word == "__call__" else made
    is_loss = (
        maker is not None
        and maker.name.startswith("torch.nn.")
        and maker.name.endswith(("loss", "Loss", "cross_entropy"))
    )
    how = maker.arg(None, "reduction") if maker is not None and is_loss else None
    return (
        word == "mean"
        or (word == "Div" and "ratio" in value.origin)
        or (is_loss and (how is None or how.const == "mean"))
    )


#: Behind these no gradient goes on.
_CUTS = frozenset({"detach", "detach_", "data", "shape", "tolist", "numpy", "argmax", "isfinite", "isnan"})
OFF = frozenset({"no_grad", "inference_mode"})
#: So many values of a computation are looked at.
_MOST = 300


def sources_of(value: Value, *, cuts: bool = True, until: Callable[[Value], bool] | None = None) -> Iterator[Value]:
    """A value, and all that it was computed from, nearest first; only as far as a gradient goes to a model, unless ``cuts`` is off, and to what ``until`` is true of."""
    waiting, seen = [value], set[int]()
    for one in waiting:  # which grows meanwhile, and a list that is in itself would never end
        if len(seen) > _MOST or len(waiting) > 10 * _MOST:
            return
        thing, made = one.thing, one.made
        name = thing.name if isinstance(thing, Method) else made.name.rpartition(".")[2] if made is not None else ""
        if cuts and (is_number(one) or name in _CUTS or (made is not None and OFF & set(made.contexts))):
            continue
        yield one
        if until is not None and until(one):
            continue
        waiting += thing.values if isinstance(thing, Items) else [thing.receiver] if isinstance(thing, Method) else []
        if made is not None and id(made) not in seen and not (cuts and is_model_call(made)):
            seen.add(id(made))
            waiting += [*([made.receiver] if made.name != "either" else []), *made.args, *made.kwargs.values()]


def learns(value: Value | None) -> bool:
    """Whether a gradient goes from a value back to a model."""
    found = (one.made for one in (sources_of(value) if value is not None else ()))
    return value is not None and (bool(value.via) or any(made is not None and is_model_call(made) for made in found))


def is_model_call(call: Call) -> bool:
    """Whether it is a forward pass of a model or a layer, with gradients on."""
    return (
        call.name.endswith(".__call__")
        and not call.name.endswith("Loss.__call__")
        and call.name.startswith(("torch.nn.", "torch.distributed.fsdp", "deepspeed", "torchvision.", "timm."))
    )


def backward_passes(calls: Iterable[Call]) -> Iterator[tuple[Call, Value]]:
    """The backward passes among some calls, each with the value that it begins at."""
    for call in calls:
        if call.name.endswith("backward"):
            yield call, call.args[0] if call.args and call.receiver.thing is not None else call.receiver


def place_given(call: Call) -> Value | None:
    """The device that a call is told; None if it is told none: ``torch.float32`` is no device."""
    word = call.name.rpartition(".")[2]
    place = call.arg(0 if word in {"to", "cuda"} or call.name == "torch.device" else None, "device")
    return None if place is None or isinstance(place.thing, Library) else place


def is_cpu(place: Value) -> bool:
    """Whether a device is the CPU: ``"cpu"``, ``torch.device("cpu")``."""
    if place.made is not None and place.made.name == "torch.device" and place.made.args:
        place = place.made.args[0]
    return bool(place.const == "cpu")
