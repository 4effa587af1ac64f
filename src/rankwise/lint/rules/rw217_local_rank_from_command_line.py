"""The local rank is taken from the command line, but torchrun does not pass it there.

**Why it breaks.** ``torchrun`` passes LOCAL_RANK by the environment only. An option ``--local_rank`` keeps its default:
with 0 all processes use GPU 0, with -1 nothing is distributed, and a required option ends the program.
``torch.distributed.launch`` passes ``--local-rank``, which the other spelling does not match.

Bad:

```python
import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
torch.cuda.set_device(args.local_rank)
dist.init_process_group("nccl")
dist.destroy_process_group()
```

Good:

```python
import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
args = parser.parse_args()
torch.cuda.set_device(args.local_rank)
dist.init_process_group("nccl")
dist.destroy_process_group()
```

**When it says nothing.** LOCAL_RANK is read from the environment too, and options that nothing uses.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT
from rankwise.lint.topics.option_text import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.option_text import Option

_FIX = 'read int(os.environ["LOCAL_RANK"])'


def check(script: Script) -> Iterator[Finding]:
    """Options and argv scans for the local rank without another source of it."""
    if "local_rank" not in script.piece.code and "local-rank" not in script.piece.code:
        return
    if not any(
        word in script.piece.code
        for word in ("init_process_group", "init_distributed", "DistributedDataParallel", "Accelerator")
    ):
        return
    if any(_by_hand(call) for call in script.calls_of(INIT)):
        return
    has_environment = "LOCAL_RANK" in _strings(script.tree) or any(
        "LOCAL_RANK" in one.module.text for one in script.all_calls
    )
    for option in options(script.tree):
        if {flag.lstrip("-").replace("-", "_") for flag in option.flags} & {"local_rank"}:
            told = _tell(script, option, has_environment=has_environment)
            if told is not None:
                yield script.finding(
                    RULE, option.node, told[0], _FIX, severity="error" if told[1] else "warning"
                )
    if not has_environment:
        yield from _scans(script)
        yield from _decorated(script)


def _by_hand(init: Call) -> bool:
    """Whether processes that are started by hand are given their rank, and where to meet."""
    method = init.arg(1, "init_method")
    return init.arg(4, "rank") is not None and method is not None and "env://" not in str(method.const)


def _strings(tree: ast.AST) -> set[str]:
    return {
        one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }


def _tell(script: Script, option: Option, *, has_environment: bool) -> tuple[str, bool] | None:
    flag = next((one for one in option.flags if "local" in one), option.flags[0])
    if option.is_required:
        return f"{flag} is required, and torchrun does not pass it: the program ends at once", True
    is_used = any(
        isinstance(node, ast.Attribute) and node.attr == option.dest for node in ast.walk(script.tree)
    )
    if has_environment or not is_used or not _is_constant(option.default):
        return None
    shown = ast.unparse(option.default) if option.default is not None else "None"
    # With None as the default the script can see that it was not given.
    tests = [one.test for one in ast.walk(script.tree) if isinstance(one, (ast.If, ast.IfExp, ast.Assert))]
    is_sure = shown != "None" or not any(option.dest in ast.unparse(test) for test in tests)
    return f"torchrun does not pass {flag}: args.{option.dest} stays {shown} in all processes", is_sure


def _is_constant(node: ast.expr | None) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return node is None or isinstance(node, ast.Constant)


def _scans(script: Script) -> Iterator[Finding]:
    """``for arg in sys.argv: if arg.startswith("--local_rank=")``."""
    if "argv" not in script.piece.code:
        return
    for node in ast.walk(script.tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if text.rstrip("= ") in {"--local_rank", "--local-rank"} and not _is_option(script, node):
            message = "torchrun does not pass --local_rank on the command line: this is never set"
            yield script.finding(RULE, node, message, _FIX)
            return


def _decorated(script: Script) -> Iterator[Finding]:
    """``@click.option("--local_rank", default=0)``."""
    for node in ast.walk(script.tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "option"
        ):
            continue
        flags = {
            one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }
        flag = next((one for one in sorted(flags) if one in {"--local_rank", "--local-rank"}), None)
        if flag is not None and not any(keyword.arg == "envvar" for keyword in node.keywords):
            message = f"torchrun does not pass {flag}: it keeps its default in all processes"
            yield script.finding(RULE, node, message, _FIX)


def _is_option(script: Script, node: ast.AST) -> bool:
    return any(node in option.node.args for option in options(script.tree))


RULE: Rule[Script] = Rule(
    id="RW217",
    name="local-rank-from-command-line",
    severity="error",
    classes=("L1",),
    summary="the local rank is taken from the command line only",
    check=check,
)
