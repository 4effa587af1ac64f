"""A collective is retried only on the rank where something failed.

**Why it breaks.** The other ranks did not fail: they have already made the call and are at the next one. The rank that
retries pairs its second attempt with whatever the others call now: the numbers are silently wrong, or the job hangs.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for attempt in range(3):
    try:
        value = torch.tensor([float(open("metric.txt").read())])
        dist.all_reduce(value)
        break
    except OSError:
        print("once more")
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
text = "0"
for attempt in range(3):
    try:
        text = open("metric.txt").read()
        break
    except OSError:
        print("once more")
value = torch.tensor([float(text)])
dist.all_reduce(value)
dist.destroy_process_group()
```

**When it says nothing.** The handler raises or leaves the loop, or only work without collectives is retried.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.history_calls import together
from rankwise.lint.topics.job_view import above

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_WORDS = ("attempt", "retry", "retries", "tries", "trial")


def check(script: Script) -> Iterator[Finding]:
    """Collectives in a `try` in a retry loop whose handler continues the loop."""
    for op in together(script):
        call = op.call
        sites = [call.node, *(site.node for site in call.stack)] if op.is_sure else []
        for node in sites:
            loop = _retry_loop(script.tree, node)
            if loop is None:
                continue
            yield script.finding(
                RULE,
                node,
                f"a rank that fails here reaches `{op.name}` again in its next iteration, while the other ranks have moved on: its retries pair with their next calls",
                "retry only local work, and call the collective once, after the loop",
                also=[("the attempts", script.piece.path, span_of(loop, script.lines))],
            )
            break


def _retry_loop(tree: ast.Module, node: ast.AST) -> ast.For | ast.While | None:
    inner, tried = node, None
    for one in above(tree, node):
        if isinstance(one, ast.Try) and inner in one.body and tried is None and one.handlers:
            tried = one
        if isinstance(one, (ast.For, ast.While)):
            return one if tried is not None and tried in one.body and _is_retry(one, tried) else None
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        inner = one
    return None


def _is_retry(loop: ast.For | ast.While, tried: ast.Try) -> bool:
    ends = any(isinstance(one, (ast.Break, ast.Return)) for one in (*tried.body, *tried.orelse))
    name = ast.unparse(loop.target if isinstance(loop, ast.For) else loop.test).lower()
    goes_round = any(not _ends(handler.body) for handler in tried.handlers)
    behind = loop.body[loop.body.index(tried) + 1 :]
    ends = ends or (bool(behind) and isinstance(behind[-1], (ast.Break, ast.Return)) and not goes_round)
    return goes_round and (ends or any(word in name for word in _WORDS))


def _ends(body: list[ast.stmt]) -> bool:
    last = body[-1]
    return isinstance(last, (ast.Raise, ast.Return, ast.Break)) or "exit" in ast.unparse(last)


RULE: Rule[Script] = Rule(
    id="RW316",
    name="retry-around-collective",
    severity="error",
    classes=("C24",),
    summary="a collective is in a loop that retries on one rank",
    check=check,
)
