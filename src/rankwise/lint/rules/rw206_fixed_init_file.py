"""All runs use the same init file, and that of an earlier run may still be there.

**Why it breaks.** ``file://`` and ``FileStore`` leave their file behind when a run fails. The next run reads the
addresses of dead processes: it hangs, or fails with ``connectFullMesh failed ... Connection refused``. Two runs at once
join each other.

Bad:

```python
import os

import torch.distributed as dist

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method="file:///tmp/my_job", rank=rank, world_size=world_size)
dist.destroy_process_group()
```

Good:

```python
import os

import torch.distributed as dist

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
where = f"file:///shared/jobs/{os.environ['SLURM_JOB_ID']}"
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
dist.destroy_process_group()
```

**When it says nothing.** Paths that contain a job's id, a time or a new folder, and scripts that remove the old file
before they start their processes.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT, called_names, is_parameter, once, places, text_of
from rankwise.lint.topics.option_text import option_of, parts_of_sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_STORE = "torch.distributed.FileStore"
_PATHS = frozenset(
    {"abspath", "join", "expanduser", "realpath", "dirname", "Path", "str", "resolve", "as_posix"}
)
_REMOVES = frozenset(
    {"remove", "unlink", "rmtree", "mkdtemp", "TemporaryDirectory", "mkstemp", "NamedTemporaryFile"}
)


def check(script: Script) -> Iterator[Finding]:
    """Rendezvous files whose path is a constant."""
    if (
        "init_method" not in script.piece.code
        and "file:" not in script.piece.code
        and "FileStore" not in script.piece.code
    ):
        return
    if not _REMOVES.isdisjoint(called_names(script.tree)):
        return
    for place in once(places(script, INIT, _STORE)):
        call = place.last
        node = call.arg_node(0, "file_name") if call.name == _STORE else call.arg_node(1, "init_method")
        path, is_default = _path_of(script, call, node)
        if path is None or node is None or (call.name == INIT and not path.startswith("file:")):
            continue
        what = "is the default, so all runs share one file" if is_default else "is the same file for each run"
        shown = repr(path) if isinstance(node, ast.Constant) else f"`{text_of(node)}`"
        yield script.finding(
            RULE,
            node,
            f"{shown} {what}: the next run finds what this one left behind, and hangs",
            'use "env://" under a launcher, or put the job\'s id into the path',
            severity="warning" if is_default else "error",
        )


def _path_of(script: Script, call: Call, node: ast.AST | None) -> tuple[str | None, bool]:
    value = call.arg(0, "file_name") if call.name == _STORE else call.arg(1, "init_method")
    if value is None:
        return None, False
    if isinstance(value.const, str):
        return value.const, False
    if _is_constant(call, node):
        return f"file:{text_of(node)}", False
    option = option_of(script, node)
    if (
        option is not None
        and isinstance(option.default, ast.Constant)
        and isinstance(option.default.value, str)
    ):
        return option.default.value, True
    return None, False


def _is_constant(call: Call, node: ast.AST | None) -> bool:
    """Whether a path is built from constants alone, though its value is not known: ``abspath("ghost")``."""
    parts = list(parts_of_sources(call.module.tree, node))
    names = {one.id for one in parts if isinstance(one, ast.Name)} - {
        "os",
        "Path",
        "pathlib",
        "str",
        "__file__",
    }
    if any(isinstance(one, (ast.Subscript, ast.BinOp)) for one in parts) or any(
        is_parameter(call, name) for name in names
    ):
        return False
    calls = {
        getattr(one.func, "attr", getattr(one.func, "id", "")) for one in parts if isinstance(one, ast.Call)
    }
    texts = [one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    assigned = {
        name.id
        for one in ast.walk(call.module.tree)
        if isinstance(one, ast.Assign)
        for target in one.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    is_file = call.name == _STORE or any(text.startswith("file:") for text in texts)
    return bool(texts) and is_file and calls <= _PATHS and names <= assigned


RULE: Rule[Script] = Rule(
    id="RW206",
    name="fixed-init-file",
    severity="error",
    classes=("I13",),
    summary="all runs share one fixed init file",
    check=check,
)
