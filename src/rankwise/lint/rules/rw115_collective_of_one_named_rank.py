"""Only one rank, given by its number, reaches a collective.

**Why it breaks.** Under ``if dist.get_rank() == 5:`` rank 5 waits for all others, which never call it: the job hangs
until the timeout. After ``assert dist.get_rank() != 0`` rank 0 has failed with an AssertionError, and the others wait
for it.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
if dist.get_rank() == 5:
    dist.all_reduce(total)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 5:
    print(total.item())
dist.destroy_process_group()
```

**When it says nothing.** The other ranks have a branch of their own (``else``); the collective uses a group of its own;
messages to one peer. Ranks such as 0, 1 and 2 are covered by RW101.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import canonical
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import FILLED
from rankwise.lint.topics.rank_tests import asks_rank
from rankwise.lint.topics.scopes import Scopes, is_function, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_D = "torch.distributed."
_TOGETHER = (frozenset(FILLED) - {"recv", "irecv"}) | {"barrier", "monitored_barrier"}
_IMAGINED = frozenset({0, 1, 2, 4, 7})
# How many arguments a collective takes before its group.
_BEFORE_GROUP = {"barrier": 0, "monitored_barrier": 0, "reduce": 3, "gather": 3, "scatter": 3, "gather_object": 3,
                 "scatter_object_list": 3, "reduce_scatter": 3, "reduce_scatter_tensor": 3, "all_to_all_single": 4}  # fmt: skip


def check(script: Script) -> Iterator[Finding]:
    """Collectives below a comparison of the rank with such a number, and below an assertion."""
    if "distributed" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for test in scopes.all(ast.If):
        number = _number(scopes, test.test, ast.Eq)
        if number is None or number in _IMAGINED or number < 0 or test.orelse:
            continue
        call = next((one for part in test.body for one in _collectives(scopes, part)), None)
        # If this rank leaves, the others have another collective after it.
        is_left = isinstance(test.body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))
        if call is not None and not is_left and not _is_met_elsewhere(scopes, test, call):
            text = ast.unparse(call.func)
            yield script.finding(
                RULE,
                call,
                f"only rank {number} reaches {text}() (`{ast.unparse(test.test)}`): it waits for the others, or pairs with their next collective",
                f"call {text}() on every rank, and keep only the use of its result under the test",
            )
    for claim in scopes.all(ast.Assert):
        yield from _behind_claim(script, scopes, claim)


def _behind_claim(script: Script, scopes: Scopes, claim: ast.Assert) -> Iterator[Finding]:
    number = _number(scopes, claim.test, ast.NotEq)
    around = scopes.parents.get(claim)
    body = getattr(around, "body", [])
    if (
        number is None
        or number < 0
        or claim not in body
        or not (is_function(around) or isinstance(around, ast.Module))
    ):
        return
    call = next((one for part in body[body.index(claim) + 1 :] for one in _collectives(scopes, part)), None)
    if call is None:
        return
    text = ast.unparse(call.func)
    yield script.finding(
        RULE,
        claim,
        f"rank {number} fails here with an AssertionError and never reaches {text}() on line {call.lineno}: the others wait for it",
        "test something true on every rank, or end all ranks together",
        severity="error" if number == 0 and isinstance(around, ast.Module) else "warning",
    )


def _is_met_elsewhere(scopes: Scopes, test: ast.If, call: ast.Call) -> bool:
    """Whether other ranks make the same collective under a test of their own ("rank 3 first")."""
    return any(
        one is not test
        and asks_rank(one.test)
        and any(
            ast.unparse(other.func) == ast.unparse(call.func)
            for part in (*one.body, *one.orelse)
            for other in _collectives(scopes, part)
            if other is not call
        )
        for one in scopes.all(ast.If)
    )


def _number(scopes: Scopes, test: ast.expr, kind: type[ast.cmpop]) -> int | None:
    """``5`` of ``dist.get_rank() == 5``."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], kind)):
        return None
    for one, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        if _is_rank(scopes, one) and isinstance(other, ast.Constant) and type(other.value) is int:
            return other.value
    return None


def _is_rank(scopes: Scopes, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        value = scopes.value(node.id, scopes.scope(node))
        return value is not None and not isinstance(value, ast.Name) and _is_rank(scopes, value)
    if not isinstance(node, ast.Call):
        return False
    if ast.unparse(node) in {"int(os.environ['RANK'])", "int(os.getenv('RANK'))"}:
        return True
    return canonical(scopes.dotted(node.func)) == _D + "get_rank" and not node.args and not node.keywords


def _collectives(scopes: Scopes, statement: ast.stmt) -> Iterator[ast.Call]:
    """Collectives of all ranks that a statement makes itself."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for one in ast.walk(statement):
        if isinstance(one, ast.Call):
            package, _, word = canonical(scopes.dotted(one.func)).rpartition(".")
            if package + "." == _D and word in _TOGETHER and not _has_group(one, word):
                yield one


def _has_group(call: ast.Call, word: str) -> bool:
    return len(call.args) > _BEFORE_GROUP.get(word, 2) or any(
        one.arg in {None, "group"} for one in call.keywords
    )


RULE: Rule[Script] = Rule(
    id="RW115",
    name="collective-of-one-named-rank",
    severity="error",
    classes=("C1",),
    summary="only one rank, given by its number, reaches a collective",
    check=check,
    needs_ranks=False,
)
