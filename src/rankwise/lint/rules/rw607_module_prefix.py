"""Weights are saved from the wrapped model and loaded into the bare one, or vice versa.

**Why it breaks.** The keys in the state of a DDP model begin with ``module.``, those of the model itself do not:
``Missing key(s) in state_dict: "weight" ... Unexpected key(s): "module.weight"``. With ``strict=False`` nothing is
loaded, without any error.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
fresh = torch.nn.Linear(4, 1)
fresh.load_state_dict(torch.load("model.pt", map_location="cpu"))
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
fresh = torch.nn.Linear(4, 1)
fresh.load_state_dict(torch.load("model.pt", map_location="cpu"))
dist.destroy_process_group()
```

**When it says nothing.** The prefix is removed, both are wrapped or both are not, or it is not certain that it is the
same file.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import line_of, node_in, once, places_of
from rankwise.lint.topics.option_text import parts_of_sources
from rankwise.lint.topics.tensor_text import last_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Entry, Script

_STRIPS = frozenset(
    {"removeprefix", "replace", "consume_prefix_in_state_dict_if_present", "lstrip", "startswith", "sub"}
)


def check(script: Script) -> Iterator[Finding]:
    """Loads of a state whose keys have a prefix that the model's keys lack, or lack one that they have."""
    for entry in script.entries:
        yield from _entry(script, entry)


def _entry(script: Script, entry: Entry) -> Iterator[Finding]:
    found = [place.calls[0] for place in once(places_of(entry))]
    saved = [
        (call, form) for call in found if call.name == "torch.save" and (form := _saved_form(call, found))
    ]
    for call in found:
        if not call.name.endswith(".load_state_dict") or _strips(call):
            continue
        form, read, at = _form(call.receiver), _read_by(call, found), node_in(script, call)
        if form is None or at is None:
            continue
        direct = _given_directly(call, found)
        if direct is not None and _form(direct.receiver) not in {None, form}:
            yield _tell(script, call, at, direct, form)
        if read is None:
            continue
        forms = {other: save for save, other in saved if _same_file(save, read)}
        if len(forms) == 1 and form not in forms:
            yield _tell(script, call, at, next(iter(forms.values())), form)


def _tell(script: Script, call: Call, at: ast.AST, save: Call, form: str) -> Finding:
    line = line_of(save)
    strict = call.arg(1, "strict")
    silent = strict is not None and strict.const is False
    names = "begin with `module.`" if form == "bare" else "lack the wrapper's `module.` prefix"
    what = "so nothing is loaded, and strict=False hides it" if silent else "so load_state_dict raises"
    return script.finding(
        RULE,
        at,
        f"the keys given on line {line} {names}: {what}",
        "save model.module.state_dict(), and load into model.module (or before wrapping)",
    )


def _form(value: Value) -> str | None:
    thing = value.thing
    if isinstance(thing, Object) and thing.kind == DDP:
        return "wrapped" if thing.call is not None and thing.call.name == DDP else None
    if (
        isinstance(thing, Object)
        and thing.kind.startswith(("torch.nn.", "torchvision.models"))
        and "Parallel" not in thing.kind
    ):
        return "bare"
    if isinstance(thing, Instance) and any(
        name.endswith(("nn.Module", "Module")) for name in thing.cls.library_bases()
    ):
        return "bare"
    return None


def _saved_form(call: Call, found: list[Call]) -> str | None:
    """Whether the state of a wrapped or a bare model is saved; None if that is not certain."""
    parts = {
        part
        for part in parts_of_sources(call.module.tree, call.arg_node(0, "obj"))
        if isinstance(part, ast.Call)
    }
    forms = {
        _form(one.receiver) for one in found if one.name.endswith(".state_dict") and one.node in parts
    } - {None}
    unknown = [
        one
        for one in found
        if one.name.startswith("?.") and one.name.endswith(".state_dict") and one.node in parts
    ]
    if _STRIPS & {getattr(part.func, "attr", "") for part in parts}:
        return None
    return next(iter(forms)) if len(forms) == 1 and not unknown else None


def _read_by(call: Call, found: list[Call]) -> Call | None:
    parts = set(parts_of_sources(call.module.tree, call.arg_node(0, "state_dict")))
    return next(
        (one for one in found if one.name == "torch.load" and one.node in parts and one.index < call.index),
        None,
    )


def _given_directly(call: Call, found: list[Call]) -> Call | None:
    """The call of state_dict that is the argument itself."""
    given = call.arg_node(0, "state_dict")
    node = last_value(call.module.tree, given, call.node) if given is not None else None
    return next((one for one in found if one.node is node and one.name.endswith(".state_dict")), None)


def _strips(call: Call) -> bool:
    parts = list(parts_of_sources(call.module.tree, call.arg_node(0, "state_dict")))
    texts = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    names = {
        getattr(part.func, "attr", getattr(part.func, "id", ""))
        for part in parts
        if isinstance(part, ast.Call)
    }
    return bool(_STRIPS & names) or "module." in texts or "consume_prefix" in call.module.text


def _same_file(save: Call, read: Call) -> bool:
    one, other = save.arg(1, "f"), read.arg(0, "f")
    if one is None or other is None:
        return False
    if isinstance(one.const, str) and isinstance(other.const, str):
        return one.const == other.const
    if one.is_known or other.is_known or save.module is not read.module:
        return False
    node, theirs = save.arg_node(1, "f"), read.arg_node(0, "f")
    return (
        node is not None
        and theirs is not None
        and not isinstance(node, ast.Constant)
        and ast.unparse(node) == ast.unparse(theirs)
    )


RULE: Rule[Script] = Rule(
    id="RW607",
    name="module-prefix",
    severity="error",
    classes=("K4",),
    summary="weights of the wrapped model are loaded into the bare one, or vice versa",
    check=check,
)
