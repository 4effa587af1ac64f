"""Each rank names the run's folder by its own clock or its own random id, so there are as many folders as ranks.

**Why it breaks.** ``datetime.now()`` and ``uuid4()`` give each process a different name. The shards of a checkpoint end
up in different folders, and a rank that reads what rank 0 has written looks in an empty folder: ``FileNotFoundError``
for the best checkpoint, at the end of the training.

Bad:

```python
import os
from datetime import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
folder = os.path.join("runs", datetime.now().strftime("%Y%m%d-%H%M%S"))
os.makedirs(folder, exist_ok=True)
torch.save(torch.ones(1), os.path.join(folder, f"part{dist.get_rank()}.pt"))
dist.destroy_process_group()
```

Good:

```python
import os
from datetime import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
name = [datetime.now().strftime("%Y%m%d-%H%M%S")]
dist.broadcast_object_list(name, src=0)
folder = os.path.join("runs", name[0])
os.makedirs(folder, exist_ok=True)
torch.save(torch.ones(1), os.path.join(folder, f"part{dist.get_rank()}.pt"))
dist.destroy_process_group()
```

**When it says nothing.** The name is broadcast; only rank 0 uses the folder; the process that starts the ranks creates
the name; temporary folders; names that contain only the date.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import here
from rankwise.lint.topics.in_ranks import is_in_ranks
from rankwise.lint.topics.job_view import is_distributed, once, places_of, spawns, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Entry, Script
    from rankwise.lint.topics.job_view import Place

#: What makes or uses a path, and where it takes it; None: it is the receiver.
_MAKES: dict[str, int | None] = {"os.makedirs": 0, "os.mkdir": 0}
_USES: dict[str, int | None] = {
    "torch.save": 1,
    "torch.load": 0,
    "builtins.open": 0,
    "os.listdir": 0,
    "torch.distributed.checkpoint.save": None,
}
_METHODS = {
    "save_pretrained": 0,
    "save_state": 0,
    "load_state": 0,
    "from_pretrained": 0,
    "write_text": None,
    "save_checkpoint": 0,
}
_OWN = frozenset({"time", "own"})
_TEMPORARY = ("tempfile.", "os.getpid", "os.urandom")
_DRAWS = re.compile(r"default_factory.*(uuid\d|\.now\(\)|time\.time|strftime|token_hex)")
_FINE_CLOCK = re.compile(r"%[-_]?[HIMSfTXcsp]|isoformat|time\(\)|timestamp|now\(\)|uuid|token_hex|time_ns")


def check(script: Script) -> Iterator[Finding]:
    """Paths whose name differs between ranks."""
    if not _FINE_CLOCK.search(script.piece.code):
        return
    for entry in script.entries:
        if not is_distributed(entry) or any(
            call.name.startswith(_TEMPORARY) for call in entry.histories[0].calls
        ):
            continue
        names = _own_names(script) if not spawns(script) else set()
        found = [place for place in once(places_of(entry)) if _is_own(script, entry, place, names)]
        used = [
            place
            for place in found
            if place.is_made_by_all and not _makes(place.last) and not place.last.guards
        ]
        if not used:
            continue
        first = min(found, key=lambda place: place.last.index)
        node = here(script, first.last)
        if node is not None:
            shown = text_of(_path_node(used[0].last)) or text_of(used[0].last.node)
            message = f"each rank has a different path in `{shown}`: its name comes from this process's own clock or random id"
            yield script.finding(RULE, node, message, _FIX)


def _makes(call: Call) -> bool:
    return call.name in _MAKES or call.name.endswith(".mkdir")


def _path_of(call: Call) -> Value | None:
    last = call.name.rpartition(".")[2]
    if call.name.endswith(".mkdir"):
        return call.receiver
    for table, key in ((_MAKES, call.name), (_USES, call.name), (_METHODS, last)):
        if key in table:
            position = table[key]
            if call.name.startswith("torch.distributed.checkpoint"):
                return call.arg(1, "checkpoint_id")
            return (
                call.receiver
                if position is None
                else call.arg(position, "name", "path", "f", "file", "save_directory")
            )
    return None


def _path_node(call: Call) -> ast.AST | None:
    for table, key in ((_MAKES, call.name), (_USES, call.name)):
        position = table.get(key)
        if position is not None:
            return call.arg_node(position, "name", "path", "f", "file")
    return None


def _own_names(script: Script) -> set[str]:
    """Attributes that get a name of this process's own by default: options, fields, and properties made of them."""
    names = set()
    for call in script.all_calls:
        default = call.kwargs.get("default")
        if (
            call.name.endswith(".add_argument")
            and default is not None
            and default.origin & _OWN
            and call.args
        ):
            option = call.args[-1].const
            names |= {option.lstrip("-").replace("-", "_")} if isinstance(option, str) else set()
    for node in ast.walk(script.tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and _DRAWS.search(text_of_all(field.value))
                ):
                    names.add(field.target.id)
            names |= {
                one.name
                for one in node.body
                if isinstance(one, ast.FunctionDef)
                and any(f"self.{name}" in ast.unparse(one) for name in names)
            }
    return names


def text_of_all(node: ast.AST | None) -> str:
    """An expression's text, whole; empty for none."""
    return ast.unparse(node) if node is not None else ""


def _is_named(call: Call, names: set[str]) -> bool:
    node = _path_node(call)
    if (
        node is None
        and isinstance(call.node, ast.Call)
        and isinstance(call.node.func, ast.Attribute)
        and _path_of(call) is call.receiver
    ):
        node = call.node.func.value
    return node is not None and any(
        isinstance(part, ast.Attribute) and part.attr in names for part in ast.walk(node)
    )


def _is_own(script: Script, entry: Entry, place: Place, names: set[str]) -> bool:
    call = place.last
    path = _path_of(call)
    if path is not None and names and _is_named(call, names) and is_in_ranks(script, entry, call):
        return True
    if (
        path is None
        or not path.origin & _OWN
        or path.origin & {"host", "exists", "data"}
        or not is_in_ranks(script, entry, call)
    ):
        return False
    makers = [
        one
        for one in entry.histories[-1].calls
        if one.result.origin & _OWN & path.origin
        and one.name.startswith(("time.", "datetime.", "uuid.", "secrets."))
    ]
    return bool(makers) and all(is_in_ranks(script, entry, one) for one in makers)


_FIX = "create the name on rank 0 and send it: name = [...]; dist.broadcast_object_list(name, src=0)"

RULE: Rule[Script] = Rule(
    id="RW517",
    name="folder-name-differs",
    severity="error",
    classes=("X13",),
    summary="each rank chooses a different name for the run's folder",
    check=check,
)
