"""All ranks create or remove the same folder, and only the first one can.

**Why it breaks.** Between ``os.path.exists`` and ``os.makedirs`` another rank creates the folder: ``FileExistsError``
on all ranks but one, sometimes, mostly on a fast or shared disk. ``shutil.rmtree`` by all ranks removes what another
rank has just created, or fails half way.

Bad:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo")
if not os.path.exists("runs"):
    os.makedirs("runs")
dist.destroy_process_group()
```

Good:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo")
os.makedirs("runs", exist_ok=True)
dist.destroy_process_group()
```

**When it says nothing.** ``exist_ok=True``; one rank does it; the path depends on the rank; the error is caught; ranks
take turns; the process that starts the ranks does it.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span, span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import here
from rankwise.lint.topics.in_ranks import differs_deeply, is_in_ranks
from rankwise.lint.topics.job_view import is_distributed, once, places, text_of
from rankwise.lint.topics.turns import is_caught, takes_turns, was_done_before

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script

_MAKES = frozenset({"os.makedirs", "os.mkdir"})
_OWN = frozenset({"time", "own", "random", "host"})


def check(script: Script) -> Iterator[Finding]:
    """Folders that each rank creates or removes."""
    for place in once(places(script, anywhere=True)):
        call = place.last
        what = _what(call)
        if what is None or not place.is_made_by_all or call.guards or not is_distributed(place.entry):
            continue
        if (
            not is_in_ranks(script, place.entry, call)
            or differs_deeply(what)
            or what.origin & _OWN
            or not (place.entry.is_program or what.is_known)  # whoever calls it may give each rank its own
        ):
            continue
        if any(one.name.startswith("tempfile.") for one in place.entry.histories[0].calls):
            continue
        if takes_turns(place) or was_done_before(place) or is_caught(call.module.tree, call.node):
            continue
        node = here(script, call)
        if node is not None:
            yield _finding(script, call, node)


def _what(call: Call) -> Value | None:
    """The folder that a call creates or removes, if it fails when another rank was faster."""
    if call.name in _MAKES:
        exist = call.arg(2, "exist_ok") if call.name == "os.makedirs" else None
        return call.arg(0, "name", "path") if exist is None or exist.const is False else None
    if call.name.endswith(".mkdir") and (call.name.startswith(("?.", "pathlib."))):
        exist = call.arg(2, "exist_ok")
        return call.receiver if exist is None or exist.const is False else None
    if call.name == "shutil.rmtree":
        ignores = call.arg(1, "ignore_errors")
        return call.arg(0, "path") if ignores is None or ignores.const is False else None
    return None


def _finding(script: Script, call: Call, node: ast.AST) -> Finding:
    shown = text_of(call.node)
    if call.name == "shutil.rmtree":
        message = f"all ranks run `{shown}`: one removes what another has just created, or fails half way (FileNotFoundError)"
        return script.finding(
            RULE, node, message, "let rank 0 remove and create the folder, and call dist.barrier() after it"
        )
    message = f"all ranks run `{shown}`, and only the first one can: FileExistsError on the others"
    if call.name == "os.mkdir":
        return script.finding(RULE, node, message, f"os.makedirs({text_of(call.arg_node(0))}, exist_ok=True)")
    return script.finding(RULE, node, message, "pass exist_ok=True", edits=_edits(script, call))


def _edits(script: Script, call: Call) -> list[Edit]:
    node = call.node
    if (
        call.module is not script.module
        or not isinstance(node, ast.Call)
        or any(isinstance(one, ast.Starred) for one in node.args)
    ):
        return []
    if len(node.args) > (1 if call.name == "os.makedirs" else 2) or any(
        one.arg in {None, "exist_ok"} for one in node.keywords
    ):
        return []
    parts = [*node.args, *(one.value for one in node.keywords)]
    if not parts:
        span = span_of(node, script.lines)
        return [
            Edit(
                span=Span(span.end_line, span.end_col - 1, span.end_line, span.end_col - 1),
                text="exist_ok=True",
            )
        ]
    last = max(
        (span_of(part, script.lines) for part in parts), key=lambda span: (span.end_line, span.end_col)
    )
    if script.lines[last.end_line - 1][last.end_col - 1 : last.end_col] not in {")", ","}:
        return []
    return [Edit(span=Span(last.end_line, last.end_col, last.end_line, last.end_col), text=", exist_ok=True")]


RULE: Rule[Script] = Rule(
    id="RW516",
    name="folder-made-by-all-ranks",
    severity="error",
    classes=("X12",),
    summary="all ranks create or remove the same folder, and only the first one can",
    check=check,
    fixable=True,
)
