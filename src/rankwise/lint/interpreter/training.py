"""Models, losses and loops of libraries in the simulated run: what is wrapped, what a backward pass goes through."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.calls import is_alone
from rankwise.lint.interpreter.own_values import clock_text
from rankwise.lint.interpreter.values import (
    ANY,
    NONE,
    NOTHING,
    NUMBER,
    UNKNOWN,
    Function,
    Instance,
    Items,
    Method,
    Object,
    Spread,
    Value,
    joined,
    known,
    mixed,
    object_of,
)
from rankwise.lint.library.collective_table import Act
from rankwise.lint.library.constructor_table import BUFFERED, WRAPPERS
from rankwise.lint.library.names import ACCELERATOR, DDP, ENGINE, FABRIC, FSDP, HF_TRAINER, LOADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.lint.interpreter.run import Run
    from rankwise.lint.interpreter.values import Call


def is_parallel(value: Value) -> bool:
    """Whether it is a model that ranks train together."""
    thing = value.thing
    return (isinstance(thing, Object) and (thing.kind in WRAPPERS or "__sharded__" in thing.attrs)) or (
        isinstance(thing, Instance) and "__sharded__" in thing.attrs
    )


def forward(run: Run, call: Call, thing: Object | Instance) -> Value:
    """A forward pass through a wrapped model; with buffers, or in shards, ranks make it together."""
    given = mixed((*call.args, *call.kwargs.values()))
    kind = thing.kind if isinstance(thing, Object) else FSDP
    has_grad = "no_grad" not in run.contexts and "inference_mode" not in run.contexts
    in_group = _has_own_group(thing)
    if kind == DDP and isinstance(thing, Object):
        state = _sends_buffers(thing)
        # Without buffers the first pass with gradients behind a backward pass still compares buckets with all ranks.
        if state is not False or has_grad:
            run.act(Act(family="forward", is_sure=state is True), call, name="forward", in_group=in_group)
    elif (gathers := _gathers(thing)) is not False:
        run.act(Act(family="forward", is_sure=gathers is True), call, name="forward", in_group=in_group)
    model = thing if isinstance(thing, Object) else _sharded_object(run, thing)
    via = (model, *(one for one in given.via if one is not model)) if has_grad else given.via
    return Value(max(given.spread, Spread.LOCAL), given.origin | {"data"}, via=via)


def _gathers(thing: Object | Instance) -> bool | None:
    """Whether a forward pass gathers shards of the weights: FSDP's does, DeepSpeed's in ZeRO's third stage; None if the stage is not known."""
    call = thing.call if isinstance(thing, Object) and thing.kind == ENGINE else None
    value = (call.arg(None, "config", "config_params") or ANY) if call is not None else known(3)
    for key in ("zero_optimization", "stage") if call is not None else ():
        if not isinstance(value.thing, Items):
            return None
        value = value.thing.entry(key) or (known(0) if value.thing.is_whole else ANY)
    return value.const == 3 if value.is_known else None


def synced_forward(run: Run, call: Call, thing: Object | Instance) -> None:
    """A forward pass in training mode of a model with SyncBatchNorm, wrapped or not."""
    if "__synced__" in thing.attrs and "__eval__" not in thing.attrs and run.initialized:
        run.act(Act(family="forward"), call, name="forward")


def _switch(_run: Run, call: Call, _kinds: list[str]) -> Value | None:
    """`model.eval()` and `model.train()`, of the wrapper and of what is in it."""
    for value in (call.receiver, getattr(call.receiver.thing, "attrs", {}).get("module"), _wrapped(call.receiver)):
        attrs = getattr(value.thing, "attrs", None) if value is not None else None
        if isinstance(attrs, dict):
            is_eval = call.name.endswith(".eval") or bool(call.args and call.args[0].const is False)
            attrs.pop("__eval__", None)
            if is_eval:
                attrs["__eval__"] = Value(const=True)
    return call.receiver if call.receiver.thing is not None else None


def _wrapped(value: Value) -> Value | None:
    thing = value.thing
    call = thing.call if isinstance(thing, Object) and thing.kind in WRAPPERS else None
    return call.arg(0, "module") if call is not None else None


def _has_own_group(thing: Object | Instance) -> bool:
    """Whether a model was spread over a group of its own."""
    group = (
        thing.call.arg(None, "process_group", "mesh", "device_mesh")
        if thing.call is not None and isinstance(thing, Object)
        else None
    )
    return group is not None and group.const is not None and getattr(group.thing, "kind", "") != "world"


def _sharded_object(run: Run, thing: Instance) -> Object:
    made: Object = run.memo.setdefault(("sharded", id(thing)), Object(FSDP))
    run.memo.setdefault(("keep", id(thing)), thing)
    return made


def _sends_buffers(thing: Object) -> bool | None:
    """Whether a forward pass of DDP sends buffers to all; None if the model is not known."""
    call = thing.call
    if call is None:
        return None
    sends = call.arg(None, "broadcast_buffers")
    if sends is not None and sends.const is False:
        return False
    model = call.arg(0, "module")
    return has_buffers(model) if model is not None else None


#: Models of torchvision's that have BatchNorm layers, and of transformers' that keep positions or angles as buffers.
_BUFFERED_MODELS = re.compile(
    r"torchvision\.models\..*(resnet|mobilenet|densenet|efficientnet|regnet|inception|googlenet|_bn|shufflenet|mnasnet)"
    r"|transformers\.(bert|roberta|xlmroberta|electra|albert|clip|gpt2|gptneo|llama|mistral|qwen)"
)


def has_buffers(model: Value, _depth: int = 0) -> bool | None:
    """Whether a model has buffers; None if its text is not at hand."""
    # One of many that a comprehension makes is known by who made it.
    thing = model.thing if model.thing is not None or model.made is None else model.made.result.thing
    if _depth > 6:
        return None
    if "__synced__" in getattr(thing, "attrs", ()):  # whoever converts BatchNorm layers has some
        return True
    if isinstance(thing, Instance):
        if any(_text_has_buffers(cls.node) for cls in thing.cls.ancestry):
            return True
        parts = [
            has_buffers(part, _depth + 1) for part in thing.attrs.values() if isinstance(part.thing, (Object, Instance))
        ]
        return True if True in parts else False if None not in parts else None
    if isinstance(thing, Object):
        return _object_has_buffers(thing, _depth)
    return None


def _object_has_buffers(thing: Object, depth: int) -> bool | None:
    if thing.kind in BUFFERED:
        return True
    if thing.kind in {"torch.nn.Sequential", "torch.nn.ModuleList"} and thing.call is not None:
        values: list[Value] = []
        for value in thing.call.args:
            values += value.thing.values if isinstance(value.thing, Items) else [value]
        if thing.call.has_star:
            return None
        parts = [has_buffers(part, depth + 1) for part in values]
        return True if True in parts else False if None not in parts else None
    if thing.kind.startswith(("torch.nn.", "torch.Tensor", "torch.device")):
        return False
    return True if _BUFFERED_MODELS.match(thing.kind.lower()) else None


@lru_cache(maxsize=1024)
def _text_has_buffers(cls: ast.ClassDef) -> bool:
    names = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(cls))
    return any(name == "register_buffer" or "BatchNorm" in name for name in names)


def backward(run: Run, call: Call, kinds: list[str]) -> Value | None:
    """`loss.backward()`, `accelerator.backward(loss)`, `engine.backward(loss)`."""
    if kinds and kinds[0] in {ACCELERATOR, FABRIC, ENGINE}:
        is_sure = kinds[0] != ACCELERATOR or bool(call.args and call.args[0].via)
        loss = call.args[0] if call.args else ANY
        if loss.via or kinds[0] == ENGINE or not loss.thing:
            _together(run, call, is_sure=is_sure)
        return Value(const=None)
    if call.receiver.via:
        _together(run, call, is_sure=True, in_group=all(_has_own_group(model) for model in call.receiver.via))
        return Value(const=None)
    return None


def _together(run: Run, call: Call, *, is_sure: bool, in_group: bool = False) -> None:
    if not {"no_sync", "no_backward_sync", "require_backward_grad_sync"} & set(run.contexts):
        run.act(Act(family="backward", is_sure=is_sure), call, name="backward", in_group=in_group)


def _prepare(run: Run, call: Call, kinds: list[str]) -> Value | None:
    """`accelerator.prepare(model, optimizer, loader)` and `fabric.setup(model, optimizer)`."""
    if not kinds or kinds[0] not in {ACCELERATOR, FABRIC}:
        return None
    if call.has_star and not call.args:
        return ANY
    if is_alone(call):
        return call.args[0] if len(call.args) == 1 else Value(thing=Items(list(call.args), kind="tuple"))
    parts = [_prepared(call, value) for value in call.args]
    if len(parts) == 1 and not call.has_star:
        return parts[0]
    return Value(thing=Items(parts, kind="tuple", is_whole=not call.has_star))


def _prepared(call: Call, value: Value) -> Value:
    thing = object_of(value)
    kind = thing.kind if isinstance(thing, Object) else ""
    if kind == LOADER:
        # The loader stays what it was, and gets a sampler of the framework's.
        thing.attrs["__prepared__"] = Value(const=True)
        return value
    if kind.startswith("torch.optim.") and not kind.startswith("torch.optim.lr_scheduler"):
        return value
    is_module = isinstance(thing, Instance) and any(
        "Module" in name or "Model" in name for name in thing.cls.library_bases
    )
    looks = value.path.rpartition(".")[2].lower()
    made = thing.call if isinstance(thing, Object) else None
    if made is not None and any(getattr(one.thing, "kind", "") == "parameters" for one in made.args):
        return value  # an optimizer of whatever library
    is_model = (
        is_module
        or kind.startswith(("torch.nn.", "torchvision.models", "timm.", "transformers."))
        or (thing is None and any(word in looks for word in ("model", "net", "unet", "generator", "discriminator")))
    )
    if is_model and "optim" not in looks and "Sched" not in kind:
        return Value(thing=Object(DDP, _wrapping(call, value), {"module": value}), path=value.path)
    return value if thing is not None else replace(value, origin=value.origin | {"prepared"})


def _wrapping(call: Call, model: Value) -> Call:
    """A wrapping call as DDP's constructor would see it: the model first."""
    return replace(call, args=(model,), kwargs={})


def _unwrap(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    if kinds and kinds[0] in {ACCELERATOR, FABRIC} and call.args:
        thing = call.args[0].thing
        if isinstance(thing, Object) and thing.kind in WRAPPERS:
            return thing.attrs.get("module") or _wrapped(call.args[0]) or ANY
        return call.args[0]
    return None


def _state_dict(run: Run, call: Call, kinds: list[str]) -> Value | None:
    thing = call.receiver.thing
    is_split = "__sharded__" in getattr(thing, "attrs", ())
    if is_parallel(call.receiver) and (FSDP in kinds or (isinstance(thing, Object) and is_split)):
        # FSDP2's state_dict only wraps what is there; asking for the whole is what ranks do together.
        if is_split or isinstance(thing, Instance):
            return Value(thing=Object("sharded state", call))
        run.act(Act(family="state"), call, name="state_dict")
    return None


def _save_model(run: Run, call: Call, kinds: list[str]) -> Value | None:
    """Of transformers' Trainer: with FSDP all ranks gather the model."""
    made = getattr(call.receiver.thing, "call", None) if HF_TRAINER in kinds else None
    settings = made.arg(None, "args") if made is not None else None
    how = getattr(getattr(settings, "thing", None), "call", None)
    fsdp = how.kwargs.get("fsdp", NONE) if how is not None else NONE
    if fsdp.const is not None and fsdp.truth() is not False:
        run.act(Act(family="state"), call, name="save_model")
    return None


def _full_tensor(run: Run, call: Call, _kinds: list[str]) -> Value | None:
    run.act(Act(family="state"), call, name="full_tensor")
    return Value()


def _redistribute(run: Run, call: Call, _kinds: list[str]) -> Value | None:
    """Of a DTensor: most changes of its placements take a collective."""
    if not {"placements", "device_mesh"} & call.kwargs.keys():
        return None
    run.act(Act(family="state"), call, name="redistribute")
    return call.receiver


def _scale(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    if kinds and kinds[0].endswith("GradScaler") and call.args:
        return call.args[0]
    return None


def _decorator(run: Run, call: Call, kinds: list[str]) -> Value | None:
    """`accelerator.on_main_process(f)`, `rank_zero_only(f)`: the function as it was, for rank 0 only."""
    if kinds and kinds[0] == ACCELERATOR and call.args and isinstance(call.args[0].thing, Function):
        return call.args[0]
    return None


def _log(run: Run, call: Call, kinds: list[str]) -> Value | None:
    """Lightning's self.log with sync_dist reduces over the ranks."""
    sync = call.arg(None, "sync_dist")
    if kinds and kinds[0] == "lightning.pytorch.LightningModule" and sync is not None and sync.const is True:
        run.act(Act(family="collective", result="none"), call, name="log")
        return Value(const=None)
    return None


def _seed_generator(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    """`torch.Generator().manual_seed(rank)`: what is drawn from it differs."""
    if kinds and kinds[0] == "torch.Generator":
        given = mixed(call.args)
        return Value(given.spread, given.origin, thing=call.receiver.thing)
    return None


def _queue(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    """How much is in a queue is a matter of this process."""
    if any(kind.endswith("Queue") for kind in kinds) or call.receiver.path.lower().endswith("queue"):
        return Value(Spread.LOCAL, frozenset({"queue"}))
    return None


def _on_disk(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    return Value(Spread.LOCAL, call.given.origin | {"exists"}) if kinds[:1] == ["pathlib.Path"] else None


def _detach(_run: Run, call: Call, _kinds: list[str]) -> Value | None:
    value = call.receiver
    if not value.via:
        return None
    return Value(value.spread, value.origin, path=value.path)


def _mean(_run: Run, call: Call, _kinds: list[str]) -> Value | None:
    """Of a batch: what is summed over the ranks is a sum of means then."""
    value = mixed((call.receiver,))
    return Value(value.spread, value.origin | {"mean"}, via=value.via)


def _item(_run: Run, call: Call, _kinds: list[str]) -> Value | None:
    value = call.receiver
    return Value(value.spread, value.origin | ({"item"} if value.spread else NOTHING), thing=NUMBER)


def _numel(_run: Run, call: Call, _kinds: list[str]) -> Value | None:
    return Value(call.receiver.spread, call.receiver.origin, thing=NUMBER)


def _size(_run: Run, call: Call, _kinds: list[str]) -> Value | None:
    """How long the samples of a batch are differs between ranks, how many they are does not."""
    at = call.arg(0, "dim")
    if at is None:
        return Value(thing=Method(call.receiver, "shape"))
    return Value(thing=NUMBER) if at.const == 0 else _numel(_run, call, _kinds)


def _parameters(_run: Run, call: Call, _kinds: list[str]) -> Value | None:
    """Parameters of a wrapped model are the same on all ranks, and no loss."""
    thing = call.receiver.thing
    return (
        Value(thing=Object("parameters", call), path="parameters")
        if isinstance(thing, (Object, Instance, Method))
        else None
    )


def _of_dataset(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    """`dataset.shuffle(...)`, `dataset.map(...)`: a data set as it was, in another form."""
    if not kinds or kinds[0] not in {"datasets.Dataset", "datasets.IterableDataset"}:
        return None
    given = mixed((call.receiver, *call.args, *call.kwargs.values()))
    return Value(max(call.receiver.spread, given.spread), given.origin, thing=call.receiver.thing)


def option_name(call: Call) -> str:
    """What `add_argument` calls the value of its option; empty if that is not known."""
    flags = [one.const for one in call.args if isinstance(one.const, str)]
    dest = call.arg(None, "dest")
    if dest is not None or not flags:
        return str(dest.const) if dest is not None and dest.is_known else ""
    return next((one for one in flags if one.startswith("--")), flags[0]).lstrip("-").replace("-", "_")


def _add_option(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    """An option that is not given holds its default; who reads it can ask for the call that declared it."""
    attrs = getattr(call.receiver.thing, "attrs", {})
    if kinds and kinds[0].endswith("ArgumentParser"):
        name, default = option_name(call), call.kwargs.get("default", ANY)
        attrs[f"--{name}"] = Value(default.spread, default.origin, path=f"args.{name}", made=call)
    return None


def _set_defaults(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    """`parser.set_defaults(func=train)`: of several commands one is chosen."""
    if kinds and kinds[0].endswith("ArgumentParser"):
        attrs = call.receiver.thing.attrs
        for name, given in call.kwargs.items():
            value = replace(given, const=UNKNOWN, path=f"args.{name}")
            attrs[f"--{name}"] = joined(attrs[f"--{name}"], value) if f"--{name}" in attrs else value
    return None


def _inherit(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    """`super().__init__(dataset, sampler=sampler)` of a loader of the user's own class."""
    if kinds[:1] != [LOADER]:
        return None
    call.name, call.receiver.thing.call = LOADER, call
    return call.receiver


def _same_parser(_run: Run, call: Call, kinds: list[str]) -> Value | None:
    return call.receiver if kinds and kinds[0].endswith("ArgumentParser") else None


_OF_DATASET = tuple(
    """shuffle map filter with_format set_format shard select take skip rename_column remove_columns with_transform
    select_columns flatten_indices cast_column""".split()  # noqa: SIM905
)
METHODS: dict[str, Callable[[Run, Call, list[str]], Value | None]] = {**dict.fromkeys(_OF_DATASET, _of_dataset), "add_argument": _add_option, "parse_known_args": lambda _run, call, _kinds: Value(thing=Items([call.receiver, ANY], kind="tuple")),
    **dict.fromkeys(("exists", "is_file", "is_dir"), _on_disk), "add_argument_group": _same_parser, "add_subparsers": _same_parser, "add_parser": _same_parser, "set_defaults": _set_defaults, "__init__": _inherit, "add_mutually_exclusive_group": _same_parser, "strftime": clock_text, "eval": _switch, "train": _switch,
    "backward": backward, "manual_backward": backward, "prepare": _prepare, "prepare_model": _prepare,
    "prepare_data_loader": _prepare, "setup": _prepare, "setup_module": _prepare, "setup_dataloaders": _prepare, "unwrap_model": _unwrap,
    "state_dict": _state_dict, "full_tensor": _full_tensor, "save_model": _save_model, "redistribute": _redistribute, "scale": _scale,
    "on_main_process": _decorator, "on_local_main_process": _decorator, "log": _log, "log_dict": _log,
    "manual_seed": _seed_generator, "empty": _queue, "qsize": _queue, "getsockname": lambda *_: Value(Spread.LOCAL, frozenset({"own"})), "detach": _detach, "item": _item, "numel": _numel,
    "size": _size, "nelement": _numel, "mean": _mean, "parameters": _parameters, "named_parameters": _parameters}  # fmt: skip
