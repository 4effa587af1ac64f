"""All divergences and local branches of a script, each once: what the rules about paths share out among them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import function_of, is_hidden
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.tensor_text import is_in
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.interpreter.functions import has_yield
from rankwise.lint.interpreter.history import Op
from rankwise.lint.interpreter.values import Function
from rankwise.lint.paths.divergences import divergences, place_of
from rankwise.lint.paths.local import local_paths
from rankwise.lint.paths.phrases import anchor, way_to
from rankwise.lint.paths.reasons import is_resumed
from rankwise.lint.paths.tokens import ops_of
from rankwise.lint.simulated_run import study

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.lint.interpreter.history import Exit, Loop
    from rankwise.lint.interpreter.values import Guard
    from rankwise.lint.paths.divergences import Divergence
    from rankwise.lint.paths.local import LocalPath
    from rankwise.lint.program import Module, Project
    from rankwise.lint.script import Entry, Script


def all_divergences(script: Script) -> list[Divergence]:
    """Where ranks part by who they are, each place once."""
    found = script.memo.get("divergences")
    if found is None:
        seen: dict[tuple[int, ...], Divergence] = {}
        for entry in script.entries:
            handed = _handed_over(entry)
            for one in divergences(entry.histories):
                if handed.isdisjoint(_functions_around(one.item)):
                    seen.setdefault(place_of(one.item), replace(one, in_program=entry.is_program))
        found = script.memo["divergences"] = _first_of_each_test(seen.values())
    return list(found)


def _handed_over(entry: Entry) -> set[ast.AST]:
    """Functions that some rank hands to what is not at hand, as to `study.optimize(objective)`: it may call them there."""
    made = (call for history in entry.histories for call in history.calls)
    calls = (call for call in made if call.name.startswith("?") or is_hidden(call))
    given = (value.thing for call in calls for value in (*call.args, *call.kwargs.values()))
    return {thing.node for thing in given if isinstance(thing, Function)}


def _functions_around(item: Op | Loop | Exit) -> set[ast.AST]:
    """The functions that are open where something is done."""
    if not isinstance(item, Op):
        return {function_of(item.module.tree, item.node)}
    sites = [(site.module, site.node) for site in item.call.stack]
    return {function_of(module.tree, node) for module, node in (*sites, (item.call.module, item.call.node))}


@dataclass(frozen=True, slots=True)
class Missed:
    """An op that only some ranks come to, with nothing in its place on the others.

    Attributes:
        doers: Ranks that reach it.
        others: Ranks that do not.
        op: The op.
        guard: The test on the rank that parts them.
        at: What a finding marks in this text.
        is_sure: Whether it is a collective for certain, and what the others do instead is seen: where a function alone
            is looked at, and each arm of the test has a `yield` of its own, it is not.
    """

    doers: tuple[int, ...]
    others: tuple[int, ...]
    op: Op
    guard: Guard
    at: ast.AST
    is_sure: bool


def missed_ops(script: Script, *families: str) -> Iterator[Missed]:
    """Ops of these families that some ranks never come to, where a finding has a place in this text."""
    for one in all_divergences(script):
        op, guard = one.item, one.guard
        if isinstance(op, Op) and op.family in families and one.instead is None and guard is not None:
            at = place_in(script, one)
            if at is not None:
                # What another module asks first, may be whether all ranks are there.
                asks_itself = any(not is_in(guard.module.tree, test) for test, _, _ in op.call.tests)
                is_seen = not asks_itself and (one.in_program or not _yields_by_test(guard))
                yield Missed(one.doers, one.others, op, guard, at[0], op.is_sure and is_seen)


def place_in(script: Script, one: Divergence) -> tuple[ast.AST, Module] | None:
    """Where a finding stands: where ranks part; if they do in another text, which by itself does not show it, the call that leads there."""
    at = anchor(one.item, one.guard, script)
    if (
        at is None
        and one.guard is not None
        and one.in_program
        and _spot(one.item) not in _parted_in(one.guard.module, script.project)
    ):
        return way_to(one.item, script)
    return at


def _spot(item: Op | Loop | Exit) -> tuple[int, int]:
    node = item.call.node if isinstance(item, Op) else item.node
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


@lru_cache(maxsize=32)
def _parted_in(module: Module, project: Project) -> frozenset[tuple[int, int]]:
    """What only some ranks come to by a text alone, as the check of that file tells."""
    unit = CodeUnit(path=str(module.path), language="python", code=module.text)
    return frozenset(_spot(one.item) for one in all_divergences(study(unit, project)))


def _yields_by_test(guard: Guard) -> bool:
    """Whether the ranks go back to the caller at different places."""
    around = scopes_of(guard.module.tree).parents.get(guard.node)
    return isinstance(around, ast.If) and around.test is guard.node and has_yield(around)


def _first_of_each_test(found: Iterable[Divergence]) -> list[Divergence]:
    """A block under one test is one mistake, however many collectives of a kind stand in it."""
    seen, result = set(), []
    for one in found:
        family = one.item.family if isinstance(one.item, Op) else type(one.item).__name__
        key = (id(one.guard.node), one.guard.outcome, family) if one.guard is not None else (id(one), True, family)
        if key not in seen:
            seen.add(key)
            result.append(one)
    return result


def _is_membership(path: LocalPath) -> bool:
    """Whether it asks for membership in a group: what members do is their own matter, but the making of groups."""
    return "member" in path.item.value.origin and path.op.family != "group"


def all_local_paths(script: Script) -> list[LocalPath]:
    """Branches on what only one rank knows, behind which ranks do not do the same; each place once."""
    found = script.memo.get("local paths")
    if found is None:
        seen: dict[tuple[str, int], LocalPath] = {}
        for entry in script.entries:
            for history in entry.histories:
                for one in local_paths(history.items):
                    is_told = _is_membership(one) or is_resumed(one.item.value)
                    if one.item.module is script.module and not is_told:
                        key = (one.kind, id(one.item.node))
                        seen.setdefault(key, replace(one, in_program=entry.is_program))
        found = script.memo["local paths"] = list(seen.values())
    return list(found)


def all_ops(script: Script) -> list[Op]:
    """Everything that ranks do together, each place once."""
    seen: dict[int, Op] = {}
    for entry in script.entries:
        for history in entry.histories:
            for op in ops_of(history.items):
                seen.setdefault(id(op.call.node), op)
    return list(seen.values())
