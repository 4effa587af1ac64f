"""The list to gather into is empty, or repeats one tensor.

**Why it breaks.** ``all_gather`` fills a list with one tensor for each rank: an empty list raises ``ValueError`` or
``RuntimeError``. ``[torch.zeros(1)] * world`` repeats one tensor: each rank's part overwrites the one before, so all
entries hold the last rank's, without any error.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
parts = [torch.zeros(1)] * dist.get_world_size()
dist.all_gather(parts, torch.ones(1))
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
dist.all_gather(parts, torch.ones(1))
dist.destroy_process_group()
```

**When it says nothing.** The list is changed in between, or cannot be traced; ``[None] * world`` for
``all_gather_object``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import canonical
from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_D = "torch.distributed."
_LISTS = {
    "all_gather": (0, "tensor_list"),
    "gather": (1, "gather_list"),
    "all_gather_object": (0, "object_list"),
}
_MAKES = frozenset({"zeros", "empty", "ones", "zeros_like", "empty_like", "ones_like", "tensor", "rand", "randn", "full",
                    "full_like", "rand_like", "randn_like", "clone", "new_zeros", "new_empty", "new_ones", "new_full"})  # fmt: skip
_FILLS = frozenset({"append", "extend", "insert"})


def check(script: Script) -> Iterator[Finding]:
    """Lists to gather into that have no room, or room for one."""
    if "gather" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for call in scopes.all(ast.Call):
        full = canonical(scopes.dotted(call.func))
        word = full.removeprefix(_D)
        if full == _D + word and word in _LISTS:
            node = _list_of(call, *_LISTS[word])
            made = _made(scopes, node, call) if node is not None else None
            if made is not None and node is not None:
                yield from _judged(script, word, node, made)


def _judged(script: Script, word: str, node: ast.expr, made: ast.expr) -> Iterator[Finding]:
    shown = ast.unparse(node)
    if _is_empty(made) and word != "gather":  # ranks that do not receive may give an empty list to gather
        new = (
            "[None] * world_size"
            if word.endswith("object")
            else "[torch.empty_like(x) for _ in range(world_size)]"
        )
        yield script.finding(
            RULE,
            node,
            f"`{shown}` is empty, but {word} needs a list with one entry for each rank: every rank fails",
            f"fill it first: `{new}`",
        )
        return
    inside = _repeated(made)
    if inside is not None and word != "all_gather_object" and _is_tensor(inside):
        text = ast.unparse(inside)
        yield script.finding(
            RULE,
            node,
            f"`{ast.unparse(made)}` is one tensor repeated: after {word} every entry is the last rank's",
            f"create a tensor for each rank: `[{text} for _ in range(world_size)]`",
        )


def _list_of(call: ast.Call, position: int, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if any(isinstance(one, ast.Starred) for one in call.args) or position >= len(call.args):
        return None
    return call.args[position]


def _made(scopes: Scopes, node: ast.expr, call: ast.Call) -> ast.expr | None:
    """The expression that created a list, if nothing has changed it before the call."""
    if not isinstance(node, ast.Name):
        return node
    made = scopes.value(node.id, scopes.scope(node))
    return None if made is None or _is_changed(scopes, node, call) else made


def _is_changed(scopes: Scopes, node: ast.Name, call: ast.Call) -> bool:
    owner = scopes.owner(node.id, scopes.scope(node))
    for load, scope in scopes.loads:
        if load.id != node.id or load is node or scopes.owner(load.id, scope) is not owner:
            continue
        parent = scopes.parents.get(load)
        if isinstance(parent, ast.Attribute) and parent.attr in _FILLS:
            return True
        if isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load):
            return True
        if (
            not isinstance(parent, (ast.Attribute, ast.Subscript))
            and load.lineno < call.lineno
            and not _only_read(parent)
        ):
            return True
    return False


def _only_read(parent: ast.AST | None) -> bool:
    return (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id in {"print", "len"}
    )


def _is_empty(made: ast.expr) -> bool:
    if isinstance(made, ast.List):
        return not made.elts
    return (
        isinstance(made, ast.Call)
        and isinstance(made.func, ast.Name)
        and made.func.id == "list"
        and not made.args
    )


def _repeated(made: ast.expr) -> ast.expr | None:
    """``x`` of ``[x] * n`` and ``n * [x]``."""
    if not (isinstance(made, ast.BinOp) and isinstance(made.op, ast.Mult)):
        return None
    for one, times in ((made.left, made.right), (made.right, made.left)):
        if isinstance(one, ast.List) and len(one.elts) == 1:
            is_once = isinstance(times, ast.Constant) and times.value == 1
            return None if is_once else one.elts[0]
    return None


def _is_tensor(node: ast.expr) -> bool:
    """Whether an expression surely makes a tensor: ``torch.zeros(1).cuda()``."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _MAKES:
            return True
        node = node.func.value
    return False


RULE: Rule[Script] = Rule(
    id="RW320",
    name="gather-list-of-one-tensor",
    severity="error",
    classes=(),
    summary="the list to gather into is empty, or repeats one tensor",
    check=check,
    needs_ranks=False,
)
