"""Branches and loops that depend on what only one rank knows, and do not lead to the same collectives."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rankwise.lint.interpreter.history import Exit, Fork, Inline, Loop, Op
from rankwise.lint.interpreter.values import AGREED, Spread
from rankwise.lint.paths.tokens import key_of, ops_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.base.findings import Severity
    from rankwise.lint.interpreter.history import Arm, Item

LocalKind = Literal["arm", "leave", "loop", "handler", "swallow", "finally"]


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A branch on what differs between ranks, behind which they do not do the same.

    Attributes:
        kind: ``arm``: an op in one arm only; ``leave``: a way out past ops; ``loop``: as many turns as this rank likes;
            ``handler``: an op in `except`; ``swallow``: `except` goes on although ops were left out; ``finally``.
        item: The branch or the loop.
        op: The first op that only some come to.
        exit: The way out, if there is one.
        in_loop: Whether it is inside a loop with ops.
        in_program: Whether the text run as a program comes there, or only a function that it does not call.
    """

    kind: LocalKind
    item: Fork | Loop
    op: Op
    exit: Exit | None = None
    in_loop: bool = False
    in_program: bool = True


_WHO = frozenset({"rank", "local_rank", "node_rank", "world_size", "share", "item"})
_SEEN_ALONE = frozenset(
    {"data", "item", "time", "queue", "exists", "files", "input", "memory", "signal", "own", "host", "random"}
)
_CONTENTS = frozenset({"data", "item", "mean", "ratio", "random", "world_size", "agreed", "scattered"})


@dataclass(frozen=True, slots=True)
class _Around:
    """What comes after in the loop, in the function, in the program, and what the loop holds in all."""

    loop_rest: tuple[Op, ...] = ()
    loop_all: tuple[Op, ...] = ()
    function_rest: tuple[Op, ...] = ()
    outer_loops: tuple[Op, ...] = ()


def how_bad(path: LocalPath) -> Severity:
    """An error where the program reaches it for certain; of a function alone it is not seen who calls it, and with what."""
    return "error" if path.op.is_sure and path.in_program else "warning"


def local_paths(items: Sequence[Item]) -> Iterator[LocalPath]:
    """All such places of one history."""
    yield from _walk(items, _Around())


def _walk(items: Sequence[Item], around: _Around) -> Iterator[LocalPath]:
    for number, item in enumerate(items):
        if isinstance(item, (Op, Exit)):
            continue
        rest = tuple(ops_of(items[number + 1 :]))
        here = _Around((*rest, *around.loop_rest), around.loop_all, (*rest, *around.function_rest), around.outer_loops)
        if isinstance(item, Inline):
            outer = (*here.loop_all, *around.outer_loops)
            yield from _walk(item.items, _Around(outer_loops=outer))
        elif isinstance(item, Loop):
            yield from _loop(item, here)
        else:
            yield from _fork(item, here)


def _loop(loop: Loop, around: _Around) -> Iterator[LocalPath]:
    ops = tuple(ops_of(loop.items))
    differs = loop.value.spread is Spread.LOCAL or (loop.value.spread is Spread.RANK and loop.turns is None)
    if not isinstance(loop.node, ast.While) and loop.value.origin <= _CONTENTS:
        # That what is in a batch differs says nothing of how much is in it.
        differs = False
    if ops and differs:
        yield LocalPath("loop", loop, _telling(ops))
    inner = _Around((), ops, (*ops, *around.function_rest), (*around.loop_all, *around.outer_loops))
    yield from _walk(loop.items, inner)


def _fork(fork: Fork, around: _Around) -> Iterator[LocalPath]:
    if fork.guards and fork.kind != "finally":
        pass  # only some ranks come here at all
    elif fork.kind == "except":
        yield from _handlers(fork, around)
    elif fork.kind == "finally":
        ops = ops_of(fork.arms[0].items)
        if ops:
            yield LocalPath("finally", fork, ops[0], in_loop=bool(around.loop_all))
    elif fork.value.spread and not _is_of_one_arm(fork) and not _is_of_exception(fork, around):
        yield from _arms(fork, around)
    for arm in fork.arms:
        yield from _walk(arm.items, around)


def _is_of_one_arm(fork: Fork) -> bool:
    """Whether its value differs only because an enclosing test on the rank chose it: among those inside it is one."""
    return bool(fork.guards) and fork.value.spread is Spread.RANK and fork.value.origin - AGREED <= _WHO


def _is_of_exception(fork: Fork, around: _Around) -> bool:
    """Whether nothing but a handled exception speaks for a difference, and no training loop is near."""
    return "exception" in fork.value.origin and fork.value.origin.isdisjoint(_SEEN_ALONE) and not around.loop_all


def may_fail_alone(node: ast.AST) -> bool:
    """Whether there is more in a `try` than the collective itself and the making of its tensor."""
    body = node.body if isinstance(node, ast.Try) else []
    return len(body) > 1 and not all(
        isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith("torch.")
        for statement in body[:-1]
    )


def _arms(fork: Fork, around: _Around) -> Iterator[LocalPath]:
    ways = list(fork.arms)
    if len(ways) < 2:
        return
    if all(arm.exit is None for arm in ways):
        first, *others = [ops_of(arm.items) for arm in ways]
        for other in others:
            odd = _difference(first, other)
            if odd is not None:
                yield LocalPath("arm", fork, odd, in_loop=bool(around.loop_all))
                return
        return
    stays = next((arm for arm in ways if arm.exit is None), None)
    for arm in ways:
        if arm.exit is None or arm.exit.kind in {"raise", "exit"}:
            continue
        missed = _missed(arm, stays, around)
        if missed is not None and missed in ops_of(arm.items):
            yield LocalPath("arm", fork, missed, arm.exit, in_loop=bool(around.loop_all or around.outer_loops))
            return
        if missed is not None:
            yield LocalPath("leave", fork, missed, arm.exit, in_loop=bool(around.loop_all or around.outer_loops))
            return


def _missed(arm: Arm, stays: Arm | None, around: _Around) -> Op | None:
    """The first op that a rank which leaves by this arm does not come to, and the others do."""
    left = arm.exit
    own = ops_of(arm.items)
    staying = ops_of(stays.items) if stays is not None else []
    if left is not None and left.kind in {"continue", "break"}:
        odd = _difference([*staying, *around.loop_rest], own)
        if odd is None and left.kind == "break" and around.loop_all:
            odd = _telling(around.loop_all)
        return odd
    if around.loop_all and left is not None:
        return _difference([*staying, *around.function_rest], own) or _telling(around.loop_all)
    return _difference([*staying, *around.function_rest], own)


def _difference(one: Sequence[Op], other: Sequence[Op]) -> Op | None:
    """The first op that is not in both, or None if they are alike."""
    for mine, theirs in zip(one, other, strict=False):
        if key_of(mine) != key_of(theirs):
            return mine
    longer = one if len(one) > len(other) else other
    rest = longer[min(len(one), len(other)) :]
    return _telling(rest) if rest else None


def _telling(ops: Sequence[Op]) -> Op:
    """The first that certainly waits for the other ranks: a backward pass rather than the forward pass before it."""
    return next((op for op in ops if op.is_sure), ops[0])


def _handlers(fork: Fork, around: _Around) -> Iterator[LocalPath]:
    tried = ops_of(fork.arms[0].items)
    in_loop = bool(around.loop_all or around.outer_loops)
    for arm in fork.arms[1:]:
        own = ops_of(arm.items)
        if arm.label != "except":
            continue
        is_again = bool(own and tried) and key_of(own[0]) == key_of(tried[0])
        if own and (len(own) == len(tried) or is_again) and not may_fail_alone(fork.node):
            # Another collective in the place of one that failed, which it did on all.
            continue
        if own and _difference(own, tried) is not None:
            yield LocalPath("handler", fork, own[0], arm.exit, in_loop)
            continue
        kind = arm.exit.kind if arm.exit is not None else None
        if kind in {"raise", "exit"} or own:
            continue
        missed = next((op for op in tried if op.family == "backward"), next(iter(tried), None))
        if missed is None and kind is not None:
            staying = around.loop_rest if kind in {"continue", "break"} else around.function_rest
            missed = next(iter(staying), None)
        if missed is not None:
            yield LocalPath("swallow", fork, missed, arm.exit, in_loop)
