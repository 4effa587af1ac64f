"""A checkpoint is loaded onto the wrong device or into the wrong model."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.analyses.device_index import fault_of
from rankwise.lint.analyses.job_view import is_distributed, line_of, node_in, once, places, places_of, text_of
from rankwise.lint.analyses.saved_files import is_model_file, reads, same_file
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.calls import whole_of
from rankwise.lint.interpreter.values import Instance, Items, Object
from rankwise.lint.library.names import DDP
from rankwise.lint.paths.phrases import reported_place
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.saved_files import FileUse
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script


#: Ends with a hash, as names do of files that torch.hub gives out: their tensors are on the CPU.
_PUBLISHED = re.compile(r"-[0-9a-f]{8}\.pth\b")


@rule("RW605", "warning", "K3", "all ranks load a checkpoint onto the GPU that saved it")
def load_without_map_location(script: Script) -> Iterator[Found]:
    for use in reads(script, anywhere=True):
        call, node = use.call, node_in(script, use.call)
        if (
            node is None
            or call.name != "torch.load"
            or call.arg(1, "map_location") is not None
            or call.has_star
            or use.place.ranks == {0}
            or _PUBLISHED.search(f"{use.path.const} {ast.unparse(use.node)}")
        ):
            continue
        if not _uses_gpus(use) or not (is_distributed(use.place.entry) or script.has_init) or not is_model_file(use):
            continue
        yield Found(
            node,
            f"`{ast.unparse(call.node)}` puts tensors back on the GPU that saved them: all ranks of a node fill GPU 0",
            'add map_location="cpu", and let load_state_dict copy',
            also=[reported_place("it is loaded here", call.node, call.module)] if node is not call.node else [],
        )


def _uses_gpus(use: FileUse) -> bool:
    texts = {call.module.text for call in use.place.entry.histories[0].calls}
    return any("cuda" in text or "nccl" in text for text in texts)


@rule("RW606", "error", "K3 R14", "a checkpoint is mapped to the GPU with the number of the global rank")
def map_location_from_rank(script: Script) -> Iterator[Found]:
    for place in once(places(script, "torch.load", "torch.jit.load", "torch.hub.load_state_dict_from_url")):
        call = place.last
        position = None if call.name.startswith("torch.hub") else 1
        value, node = call.arg(position, "map_location"), call.arg_node(position, "map_location")
        if value is None or node is None:
            continue
        for one in value.thing.values if isinstance(value.thing, Items) else [value]:
            fault = fault_of(place, one)
            if fault is not None:
                yield Found(
                    node,
                    f"`{text_of(node)}` uses the global rank as the number of a GPU: a second node has no such GPU",
                    'map to "cpu", or to the GPU of int(os.environ["LOCAL_RANK"])',
                    severity="error" if fault == "bare" else "warning",
                )
                break


@rule("RW607", "error", "K4", "weights of the wrapped model are loaded into the bare one, or vice versa")
def module_prefix(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        found = [place.calls[0] for place in once(places_of(entry))]
        for call in (one for one in found if one.name.endswith(".load_state_dict")):
            given, form, at = call.arg(0, "state_dict"), _form(call.receiver), node_in(script, call)
            made = whole_of(given) if given is not None else None
            if (
                made is None
                or form is None
                or at is None
                or any(_may_change(made, one) for one in found if one.index < call.index)
            ):
                continue
            saves = [made]
            if made.name == "torch.load":
                written = [one for one in found if one.name == "torch.save" and same_file(one, made)]
                saves = [one for save in written for one in _states(save)]
            forms = {_form(one.receiver): one for one in saves if one.name.endswith(".state_dict")}
            if len(forms) == 1 and not {form, None} & forms.keys():
                yield _tell(call, at, next(iter(forms.values())), form)


def _may_change(made: Call, other: Call) -> bool:
    """Whether a call gets what another one gave, and may take off the prefix of its keys."""
    is_harmless = other.name.startswith("builtins.") or other.name.endswith(".load_state_dict")
    return not is_harmless and any(value.made is made for value in other.args)


def _states(save: Call) -> Iterator[Call]:
    """Calls of `state_dict` whose results are saved, by themselves or in a table."""
    value = save.arg(0, "obj")
    parts = value.thing.values if value is not None and isinstance(value.thing, Items) else [value]
    yield from (one.made for one in parts if one is not None and one.made is not None)


def _tell(call: Call, at: ast.AST, save: Call, form: str) -> Found:
    line = line_of(save)
    strict = call.arg(1, "strict")
    silent = strict is not None and strict.const is False
    names = "begin with `module.`" if form == "bare" else "lack the wrapper's `module.` prefix"
    what = "so nothing is loaded, and strict=False hides it" if silent else "so load_state_dict raises"
    return Found(
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
    if isinstance(thing, Instance) and any(name.endswith(("nn.Module", "Module")) for name in thing.cls.library_bases):
        return "bare"
    return None
