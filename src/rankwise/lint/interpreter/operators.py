"""Operators of the simulated run: what is known is computed, the rest is mixed."""

from __future__ import annotations

import ast
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankwise.lint.interpreter.branches import asks_who
from rankwise.lint.interpreter.looping import plain_list
from rankwise.lint.interpreter.values import ANY, NUMBER, Call, Items, Library, Method, Role, Value, is_number, mixed

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.lint.interpreter.run import Run
    from rankwise.lint.program import Module

BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_BIGGEST = 1_000_000


def compute(doing: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
    """Apply a binary operator where both sides are known, and small."""
    value = mixed((left, right))
    if not left.is_known or not right.is_known or _is_big(left.const) or _is_big(right.const):
        return value
    try:
        const = doing(left.const, right.const)
    except Exception:  # noqa: BLE001 - whatever the user's constants raise, the result is not known
        return value
    return Value(spread=value.spread, origin=value.origin, const=const, via=value.via)


def of_all(run: Run, module: Module, node: ast.AST, values: tuple[Value, ...], value: Value) -> Value:
    """The result of an operator on some values, which remembers them; that of numbers is a number."""
    if not value.is_known and value.thing is None and all(map(is_number, values)):
        value = replace(value, thing=NUMBER)
    if all(one.made is None and not isinstance(one.thing, (Items, Method)) for one in values) and not isinstance(
        value.thing, Items
    ):
        return value
    name = f"operator.{type(getattr(node, 'op', node)).__name__}"
    return value.given_by(Call(name=name, node=node, module=module, args=values, contexts=run.contexts))


def _is_big(const: Any) -> bool:
    return (isinstance(const, int) and abs(const) > _BIGGEST) or (isinstance(const, (str, bytes)) and len(const) > 999)


def compare(op: ast.cmpop, left: Value, right: Value) -> Value:
    """The result of one comparison."""
    if isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)) and right.is_known and right.const is None:
        is_not = isinstance(op, (ast.IsNot, ast.NotEq))
        if left.thing is not None:
            return Value(const=is_not is not (left.const is None))
        if not left.is_known:
            # Whether there is one at all is a matter of configuration.
            # ... but not of a batch that the collate function may have left out.
            is_config = (
                not left.spread or (left.origin <= {"data"} and left.path != "(batch)") or "scattered" in left.origin
            )
            return ANY if is_config else mixed((left,))
    if isinstance(right.thing, Library) and right.thing.name == "os.environ" and isinstance(op, (ast.In, ast.NotIn)):
        return _in_environ(left, is_in=isinstance(op, ast.In))
    if isinstance(op, (ast.In, ast.NotIn)):
        return _membership(op, left, right)
    value = compute(_COMPARE[type(op)], left, right)
    return Value(const=value.const) if value.is_known and _holds_for_any(op, left, right) else value


#: Numbers that ranks of some job have: what holds for each of them tells no rank from another.
_ANY_RANKS = (0, 1, 2, 10**9)


def _holds_for_any(op: ast.cmpop, left: Value, right: Value) -> bool:
    """Whether a test has one result for whatever rank: `rank != -1`, `rank >= 0`."""
    if not isinstance(left.thing, Role) or right.spread or type(right.const) is not int:
        return False
    return len({_COMPARE[type(op)](rank, right.const) for rank in _ANY_RANKS}) == 1


#: What one process sees, and another may not.
_SEEN_ALONE = frozenset(
    {"files", "exists", "exception", "queue", "input", "time", "signal", "memory", "host", "env", "own"}
)


def _membership(op: ast.cmpop, left: Value, right: Value) -> Value:
    """`rank in members`: decided where the list is known, else a test for membership of a group."""
    plain = plain_list(right)
    value = mixed((left, right))
    if plain is not None and left.is_known:
        found = left.const in plain
        return Value(value.spread, value.origin, found if isinstance(op, ast.In) else not found)
    if isinstance(left.const, str) and right.origin.isdisjoint(_SEEN_ALONE) and not right.is_known:
        # `"labels" in batch`: which columns there are is the same everywhere.
        return ANY
    return Value(value.spread, value.origin | {"member"}) if asks_who(left) else value


def _in_environ(name: Value, *, is_in: bool) -> Value:
    if name.const in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"}:
        return Value(const=is_in)
    return ANY
