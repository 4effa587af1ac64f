"""Calls of library functions that the simulated run met, with the values they got: what is asked of them."""

from __future__ import annotations

import re

from rankwise.lint.interpreter.values import ANY, Call, Items, Suspended, Value, mixed
from rankwise.lint.library.names import FABRIC, PL_TRAINER


def part_of(value: Value) -> Value:
    """A part of a value, of which no more is known."""
    part, made = mixed((value,)), value.made
    if made is None:
        inner = value.thing.values if isinstance(value.thing, Items) else ()
        return next((part.given_by(one.made) for one in inner if one.made is not None), part)
    return part.given_by(Call(name="operator.Subscript", node=made.node, module=made.module, args=(value, ANY)))


def whole_of(value: Value) -> Call | None:
    """The call that gave what a value is, or is a part of: that of ``checkpoint`` for ``checkpoint["model"]``."""
    made = value.made
    while made is not None and made.name == "operator.Subscript":
        made = made.args[0].made
    return made


def is_of_one_device(maker: Call) -> bool:
    """Whether a call makes a Fabric or a Trainer of one device: nothing is wrapped, and there are no other ranks."""
    devices, nodes = maker.arg(2 if maker.name == FABRIC else None, "devices"), maker.arg(None, "num_nodes")
    if maker.name not in {FABRIC, PL_TRAINER} or devices is None or (nodes is not None and nodes.const != 1):
        return False
    if isinstance(devices.thing, Items):  # of which devices
        return devices.thing.is_whole and len(devices.thing.values) == 1
    return devices.const in {1, "1"} or re.fullmatch(r"\d+,", str(devices.const)) is not None


def is_alone(call: Call) -> bool:
    """Whether a call is a method of a Fabric that has no other ranks."""
    maker = getattr(call.receiver.thing, "call", None)
    return maker is not None and is_of_one_device(maker)


#: Builtins that run a generator to its end, or to its first value.
CONSUMERS = frozenset(
    f"builtins.{name}" for name in ("list", "tuple", "set", "sum", "min", "max", "sorted", "any", "all", "next", "dict")
)


def consume(call: Call) -> None:
    """Whoever is given a generator is taken to run it to its end."""
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value.thing, Suspended):
            value.thing.resume(lambda _yielded: None)
