"""A function is named but not called.

**Why it breaks.** ``dist.barrier`` without parentheses only looks the function up. Nothing waits, no step is made, no
group is destroyed; Python reports no error.

Bad:

```python
import torch.distributed as dist

def stop():
    dist.barrier
    dist.destroy_process_group()
```

Good:

```python
import torch.distributed as dist

def stop():
    dist.barrier()
    dist.destroy_process_group()
```

**When it says nothing.** In a ``try`` that tests whether a name exists, where an exception is expected, and for
attributes that may be properties.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span, span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, is_function, scopes_of
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_FUNCTIONS = frozenset(
    {
        "torch.distributed.barrier",
        "torch.distributed.destroy_process_group",
        "torch.distributed.init_process_group",
        "torch.cuda.synchronize",
        "torch.cuda.empty_cache",
        "torch.cuda.reset_peak_memory_stats",
        "torch.accelerator.synchronize",
        "gc.collect",
    }
)
_CONTEXTS = frozenset({"torch.no_grad", "torch.enable_grad", "torch.inference_mode", "torch.random.fork_rng"})
_METHODS = frozenset(
    [
        "backward",
        "zero_grad",
        "step",
        "train",
        "eval",
        "set_epoch",
        "wait_for_everyone",
        "destroy_process_group",
        "barrier",
        "synchronize",
    ]
)
_STEPS = re.compile(r"opt|sched|scaler|sgd|adam")
_NEEDS_ARGUMENTS = frozenset({"set_epoch", "init_process_group"})


def check(script: Script) -> Iterator[Finding]:
    """Statements that are nothing but the name of a function."""
    scopes = scopes_of(script.tree)
    for statement in scopes.all(ast.Expr):
        node = statement.value
        if isinstance(node, ast.Name) and script.piece.cells:
            continue  # the last line of a notebook's cell shows what it names
        if (
            isinstance(node, (ast.Name, ast.Attribute))
            and _is_meant_call(scopes, node)
            and not is_caught(script.tree, statement)
        ):
            yield _finding(script, node)
    yield from _entered(script, scopes)


def _entered(script: Script, scopes: Scopes) -> Iterator[Finding]:
    """Context managers of torch that a ``with`` gets without a call."""
    for statement in scopes.all(ast.With):
        for item in statement.items:
            node = item.context_expr
            if isinstance(node, (ast.Name, ast.Attribute)) and (
                scopes.dotted(node) in _CONTEXTS or _is_no_sync(script, node)
            ):
                text = ast.unparse(node)
                what = "the method" if _is_no_sync(script, node) else "the class"
                yield script.finding(
                    RULE,
                    node,
                    f"`with {text}:` without parentheses enters {what} itself: TypeError or AttributeError",
                    f"write `with {text}():`",
                )


def _is_no_sync(script: Script, node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "no_sync"
        and _is_plain(node)
        and "def no_sync" not in script.piece.code
    )


def _finding(script: Script, node: ast.Name | ast.Attribute) -> Finding:
    text = ast.unparse(node)
    name = text.rpartition(".")[2]
    span = span_of(node, script.lines)
    behind = Span(span.end_line, span.end_col, span.end_line, span.end_col)
    takes_none = isinstance(node, ast.Attribute) and name not in _NEEDS_ARGUMENTS
    return script.finding(
        RULE,
        node,
        f"`{text}` without parentheses is not called: the line does nothing",
        f"write `{text}({'' if name not in _NEEDS_ARGUMENTS else '...'})`",
        edits=[Edit(span=behind, text="()")] if takes_none else (),
    )


def _is_meant_call(scopes: Scopes, node: ast.Name | ast.Attribute) -> bool:
    if isinstance(node, ast.Name):
        return _is_plain_function(scopes.only(node.id, scopes.scope(node)))
    full = scopes.dotted(node)
    if full or node.attr not in _METHODS or not _is_plain(node.value):
        return full in _FUNCTIONS
    # Many things have a step that is a number.
    return (
        node.attr != "step"
        or bool(_STEPS.search(ast.unparse(node.value).lower()))
        or _is_made_by_torch_optim(scopes, node.value)
    )


def _is_made_by_torch_optim(scopes: Scopes, node: ast.expr) -> bool:
    made = scopes.value(node.id, scopes.scope(node)) if isinstance(node, ast.Name) else None
    return isinstance(made, ast.Call) and scopes.dotted(made.func).startswith("torch.optim.")


def _is_plain_function(node: ast.AST | None) -> bool:
    # What a decorator has made of a function may not be one.
    return is_function(node) and not node.decorator_list


def _is_plain(node: ast.expr) -> bool:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name)


RULE: Rule[Script] = Rule(
    id="RW809",
    name="call-without-parentheses",
    severity="error",
    classes=(),
    summary="a function is named on a line of its own but not called",
    check=check,
    needs_ranks=False,
    fixable=True,
)
