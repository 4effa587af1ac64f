"""Words for ranks, tests and collectives in the messages of the rules about paths."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.finding import span_of
from rankwise.lint.interpreter.history import Exit, Inline, Op, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.finding import Span
    from rankwise.lint.interpreter.history import Loop
    from rankwise.lint.interpreter.values import Guard, Site
    from rankwise.lint.program import Module
    from rankwise.lint.script import Script

_LONGEST = 60


def written(node: ast.AST | None, longest: int = _LONGEST) -> str:
    """The text of a node in one line, shortened."""
    if node is None:
        return ""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def who(doers: Sequence[int], others: Sequence[int], verb: str) -> str:
    """``only rank 0 reaches``, ``every rank but 0 saves``, ``only some ranks reach``: the verb agrees with the ranks."""
    if tuple(doers) == (0,):
        ranks = "only rank 0"
    elif tuple(others) == (0,):
        ranks = "every rank but 0"
    elif tuple(doers) == (0, 2):
        ranks = "only local rank 0 of each node"
    elif tuple(others) == (0, 2):
        ranks = "every rank but local rank 0 of each node"
    elif len(doers) == 1:
        ranks = f"only rank {doers[0]}"
    elif len(others) == 1:
        ranks = f"every rank but {others[0]}"
    else:
        return f"only some ranks {verb}"
    return f"{ranks} {verb}{'' if verb == 'may' else 'es' if verb.endswith('ch') else 's'}"


def tested(item: Op | Loop | Exit, guard: Guard) -> str:
    """The test as the user wrote it; of a `match` the case, too: ``match rank: case 0``."""
    block, site = _block_of(guard), _site(item, guard)
    if isinstance(block, ast.Match):
        for case in block.cases:
            if any(node is site for part in case.body for node in ast.walk(part)):
                return f"match {written(guard.node, 40)}: case {written(case.pattern, 20)}"
    return written(guard.node)


def line_left(item: Op | Loop | Exit, guard: Guard) -> int:
    """The line of the test where it only lets some ranks leave, and the item stands behind it; 0 if it encloses the item."""
    block, site = _block_of(guard), _site(item, guard)
    if not isinstance(block, ast.If) or any(node is site for node in ast.walk(block)):
        return 0
    return block.lineno


def _site(item: Op | Loop | Exit, guard: Guard) -> ast.AST:
    """The place that leads to the item, in the function in which the test stands."""
    if not isinstance(item, Op):
        return item.node
    return item.call.stack[guard.depth].node if guard.depth < len(item.call.stack) else item.call.node


def _block_of(guard: Guard) -> ast.AST | None:
    """The statement whose test, or subject, it is."""
    around = scopes_of(guard.module.tree).parents.get(guard.node)
    return around if isinstance(around, (ast.If, ast.Match)) else None


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


def way_to(item: Op | Loop | Exit, script: Script) -> tuple[ast.AST, Module] | None:
    """The call in this text that leads to what stands in another one."""
    if isinstance(item, Op):
        sites = [(site.node, site.module) for site in reversed(item.call.stack)]
        return next((site for site in sites if site[1] is script.module), None)
    done = (one for entry in script.entries for history in entry.histories for one in walk(history.items))
    calls = [one for one in done if isinstance(one, Inline) and one.module is script.module and item in walk(one.items)]
    return (calls[-1].node, calls[-1].module) if calls else None


def reported_place(what: str, node: ast.AST, module: Module) -> tuple[str, str, Span]:
    """A place that belongs to a finding."""
    return what, module.shown, span_of(node, module.lines)


def also(
    item: Op | Loop | Exit, at: ast.AST, guard: Guard | None, instead: Op | None = None
) -> list[tuple[str, str, Span]]:
    """The other places of a divergence: the op itself, the test, what the others do."""
    places = []
    node, module = (item.call.node, item.call.module) if isinstance(item, Op) else (item.node, item.module)
    if node is not at:
        what = f"{called(item)} is here" if isinstance(item, Op) else "it is here"
        places.append(reported_place(what, node, module))
    if guard is not None and getattr(guard.node, "lineno", 0) != getattr(at, "lineno", 0):
        places.append(reported_place("the test on the rank", guard.node, guard.module))
    if instead is not None and instead.call.node is not at:
        places.append(reported_place(f"the others reach {called(instead)}", instead.call.node, instead.call.module))
    return places
