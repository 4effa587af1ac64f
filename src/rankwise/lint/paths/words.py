"""Words for ranks, tests and collectives in the messages of the rules about paths."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.model.history import Exit, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.finding import Span
    from rankwise.lint.model.calls import Guard, Site
    from rankwise.lint.model.history import Loop
    from rankwise.lint.program import Module
    from rankwise.lint.script import Script

_LONGEST = 60


def written(node: ast.AST | None, longest: int = _LONGEST) -> str:
    """The text of a node in one line, shortened."""
    if node is None:
        return ""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def who(doers: Sequence[int], others: Sequence[int]) -> str:
    """``rank 0 only``, ``all ranks but 0``, ``local rank 0 of each node only``, ``some ranks only``."""
    if tuple(doers) == (0,):
        return "only rank 0"
    if tuple(others) == (0,):
        return "every rank but 0"
    if tuple(doers) == (0, 2):
        return "only local rank 0 of each node"
    if tuple(others) == (0, 2):
        return "every rank but local rank 0 of each node"
    if len(doers) == 1:
        return f"only rank {doers[0]}"
    if len(others) == 1:
        return f"every rank but {others[0]}"
    return "only some ranks"


def called(op: Op) -> str:
    """An op as the user wrote it, ``dist.all_reduce()``."""
    func = getattr(op.call.node, "func", None)
    if op.name == "forward" or func is None:
        return f"{written(func or op.call.node, 40)}()"
    return f"{written(func, 40)}()"


def anchor(item: Op | Loop | Exit, guard: Guard | None, script: Script) -> tuple[ast.AST, Module] | None:
    """Where a finding stands: the statement below the test that leads to the op; None if it is in another file."""
    sites: list[tuple[ast.AST, Module]] = []
    if isinstance(item, Op):
        chain: list[Site | None] = list(item.call.stack)
        start = guard.depth if guard is not None else 0
        sites.extend((site.node, site.module) for site in chain[start:] if site is not None)
        sites.append((item.call.node, item.call.module))
    else:
        sites.append((item.node, item.module))
    if guard is not None and guard.module is not script.module:
        sites = sites[-1:]
    return next(((node, module) for node, module in sites if module is script.module), None)


def place(what: str, node: ast.AST, module: Module) -> tuple[str, str, Span]:
    """A place that belongs to a finding."""
    return what, module.shown, span_of(node, module.lines)


def also(
    item: Op | Loop | Exit, at: ast.AST, guard: Guard | None, instead: Op | None = None
) -> list[tuple[str, str, Span]]:
    """The other places of a parting: the op itself, the test, what the others do."""
    places = []
    if isinstance(item, Op) and item.call.node is not at:
        places.append(place(f"{called(item)} is here", item.call.node, item.call.module))
    if guard is not None and getattr(guard.node, "lineno", 0) != getattr(at, "lineno", 0):
        places.append(place("the test on the rank", guard.node, guard.module))
    if instead is not None and instead.call.node is not at:
        places.append(place(f"the others come to {called(instead)}", instead.call.node, instead.call.module))
    return places
