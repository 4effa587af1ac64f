"""A history as a flat list of what must be the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.history import Arm, Exit, Fork, Inline, Loop, Op, walk
from rankwise.lint.interpreter.values import AGREED, Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.interpreter.history import Item
    from rankwise.lint.interpreter.values import Guard

#: Ops that ranks may make in their own number and order: to one peer, or inside `join`.
_FREE = frozenset({"point"})
#: Origin of what was agreed, perhaps inside a test on the rank.
_TOLD = AGREED | {"rank", "local_rank", "node_rank", "world_size"}


@dataclass(frozen=True, slots=True)
class Token:
    """One thing that ranks must do alike: an op, a loop of so many turns, a way out.

    Attributes:
        key: What must be equal.
        item: What it stands for.
        guards: Tests on the rank that enclose it.
    """

    key: tuple[object, ...]
    item: Op | Loop | Exit
    guards: tuple[Guard, ...]


def counts(op: Op) -> bool:
    """Whether all ranks must reach an op alike."""
    return op.family not in _FREE and not op.in_group and not op.is_joined


def ops_of(items: Sequence[Item]) -> list[Op]:
    """All ops in there that all ranks must come to, in order."""
    return [item for item in walk(items) if isinstance(item, Op) and counts(item)]


def key_of(op: Op) -> tuple[object, ...]:
    """What an op must have in common with those it meets."""
    return ("op", op.family, op.name if op.family in {"collective", "save", "state"} else "")


def flatten(items: Sequence[Item], *, in_busy_loop: bool = False, is_busy_after: bool = False) -> list[Token]:
    """Tokens of a list of items.

    Args:
        items: Of one function, loop or branch.
        in_busy_loop: Whether the loop they are in has ops, so that leaving it early matters.
        is_busy_after: Whether ops follow in the same function.
    """
    tokens: list[Token] = []
    for number, item in enumerate(items):
        if isinstance(item, Op):
            if counts(item):
                tokens.append(Token(key_of(item), item, item.call.guards))
        elif isinstance(item, Inline):
            tokens.extend(_of_function(item))
        elif isinstance(item, Loop):
            tokens.extend(_loop(item))
        elif isinstance(item, Fork):
            after = is_busy_after or any(op.is_sure for op in ops_of(items[number + 1 :]))
            tokens.extend(_fork(item, in_busy_loop=in_busy_loop, is_busy_after=after))
    return tokens


_MOST_WAYS = 32
_Way = tuple[tuple["Token", ...], bool]


def _of_function(call: Inline) -> list[Token]:
    """What a call comes to; if all ways through the function come to the same, that is made once."""
    ways = _ways(call.items)
    if ways and len({tuple(token.key for token in way) for way, _ in ways}) == 1:
        return list(ways[0][0])
    return flatten(call.items)


def _ways(items: Sequence[Item]) -> list[_Way]:
    """All ways through a function that do not end the program, with what is made on them; none if they are too many."""
    ways: list[_Way] = [((), False)]
    for item in items:
        done = [way for way in ways if way[1]]
        going = [way for way, has_left in ways if not has_left]
        if not going:
            break
        ways = [*done, *(((*way, *more), has_left) for way in going for more, has_left in _steps(item))]
        if len(ways) > _MOST_WAYS:
            return []
    return ways


def _steps(item: Item) -> list[_Way]:
    if isinstance(item, Op):
        return [((Token(key_of(item), item, item.call.guards),) if counts(item) else (), False)]
    if isinstance(item, Exit):
        return [] if item.kind in {"raise", "exit"} else [((), True)]
    if isinstance(item, Inline):
        return [(tuple(_of_function(item)), False)]
    if isinstance(item, Loop):
        return [(tuple(_loop(item)), False)]
    arms = _arms(item) if item.kind in {"if", "match"} else item.arms[:1]
    return [way for arm in arms for way in _ways(arm.items)]


def _arms(fork: Fork) -> list[Arm]:
    """All arms but what a process does alone, with nobody: ``if one_gpu: train(0, 1) else: mp.spawn(train)``."""
    made = [[op.call for op in ops_of(arm.items)] for arm in fork.arms]
    started = {id(call.node) for calls in made for call in calls if "spawned" in call.contexts}
    alone = [not any("spawned" in one.contexts for one in calls) for calls in made]
    same = [not started.isdisjoint(id(one.node) for one in calls) for calls in made]
    return [arm for arm, *is_left in zip(fork.arms, alone, same, strict=True) if not all(is_left)]


def _loop(loop: Loop) -> list[Token]:
    is_busy = any(op.is_sure for op in ops_of(loop.items))
    inner = flatten(loop.items, in_busy_loop=is_busy, is_busy_after=is_busy)
    if not inner:
        return []
    return [Token(("loop", loop.turns), loop, loop.guards), *inner, Token(("end",), loop, loop.guards)]


def _common(one: list[Token], other: list[Token]) -> int:
    """How much two arms begin alike: that much is made in any case."""
    number = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine.key != theirs.key or mine.key[0] != "op":
            break
        number += 1
    return number


def _fork(fork: Fork, *, in_busy_loop: bool, is_busy_after: bool) -> list[Token]:
    tokens: list[Token] = []
    kept = _arms(fork)
    arms = [flatten(arm.items, in_busy_loop=in_busy_loop, is_busy_after=is_busy_after) for arm in kept]
    if fork.kind == "if" and len(arms) == 2 and [token.key for token in arms[0]] == [token.key for token in arms[1]]:
        # Whichever it is, the same comes of it.
        arms[1] = []
    elif fork.kind == "if" and len(arms) == 2:
        arms[1] = arms[1][_common(*arms) :]
    for arm, inner in zip(kept, arms, strict=True):
        tokens.extend(inner)
        left = arm.exit
        if left is None or fork.kind != "if":
            continue
        if fork.value.spread < Spread.LOCAL and AGREED <= fork.value.origin <= _TOLD:
            # The ranks have told each other: they leave together, or none does.
            continue
        matters = in_busy_loop if left.kind in {"break", "continue"} else is_busy_after and left.kind == "return"
        if matters:
            tokens.append(Token(("leave", left.kind), left, left.guards))
    return tokens
