"""The GPU that a rank uses is not its own."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.device_index import fault_of
from rankwise.lint.analyses.job_view import (
    INIT,
    LOOPBACK,
    all_once,
    backend_of,
    is_constant,
    is_left,
    is_of_one_process,
    is_spawned,
    launcher_reads,
    line_of,
    once,
    places,
    places_of,
    settings,
    spawns,
    text_of,
)
from rankwise.lint.analyses.options import option_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Items, Library
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.analyses.job_view import Place, Setting
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Entry, Script

#: These take a device by position.
_TAKES_FIRST = frozenset(
    """torch.cuda.set_device torch.accelerator.set_device_index torch.accelerator.set_device_idx torch.cuda.device
    torch.device torch.xpu.set_device torch.npu.set_device""".split()  # noqa: SIM905
)
_NAMES = ("device", "device_id", "output_device", "device_ids")


@rule("RW201", "error", "R14", "the global rank is used as the number of a GPU")
def global_rank_as_device(script: Script) -> Iterator[Found]:
    seen: set[tuple[int, str]] = set()
    on_one_node = {id(entry) for entry in script.entries if _is_one_node(entry)}
    for place in all_once(script):
        if id(place.entry) in on_one_node:
            continue
        for value, node in _devices(place.last):
            fault = fault_of(place, value)
            key = (id(place.last.function), text_of(node))
            if fault is not None and key not in seen:
                seen.add(key)
                yield _tell(place, node, is_bare=fault == "bare")
                break


def _is_one_node(entry: Entry) -> bool:
    """Whether all ranks are on this host: they meet there, or the rank is the process index of `mp.spawn`, unlike `node * gpus + number`."""
    history = entry.histories[-1]
    inits = [call for call in history.calls if call.name == INIT]
    given = [call.arg(1, "init_method") for call in inits] + [
        call.args[1]
        for call in history.calls
        if call.name == "os.environ.__setitem__" and call.args[0].const == "MASTER_ADDR"
    ]
    if any(one is not None and LOOPBACK.match(str(one.const)) for one in given):
        return True
    starts = (call.arg(None, "rank") for call in inits)
    return any(
        rank is not None and "spawned" in rank.origin and "node_rank" not in rank.origin and rank.const == history.rank
        for rank in starts
    )


def _devices(call: Call) -> Iterator[tuple[Value, ast.AST]]:
    """Values that a call takes as a device, each with where it stands."""
    position = 1 if call.name == "torch.device" and len(call.args) > 1 else 0
    if call.args and (call.name in _TAKES_FIRST or call.name.endswith((".cuda", ".to"))):
        yield call.args[position], call.arg_node(position) or call.node
    # What `partial` is given is for a function, and one of the user's may mean anything by it.
    is_open = call.name == "functools.partial" and not isinstance(call.args[0].thing, Library)
    for name in () if is_open else _NAMES:
        value = call.kwargs.get(name)
        if value is not None and (name == "device" or "rank" in value.origin or isinstance(value.thing, Items)):
            node = call.arg_node(None, name) or call.node
            for one in value.thing.values if isinstance(value.thing, Items) else [value]:
                yield one, node


def _tell(place: Place, node: ast.AST, *, is_bare: bool) -> Found:
    text = text_of(node)
    if is_bare:
        message = f"`{text}` uses the global rank as the number of a GPU: a second node has no such GPU"
    else:
        message = (
            f"`{text}` maps the global rank to a node's GPUs: wrong if nodes differ or start fewer ranks than GPUs"
        )
    fix = 'use the local rank: int(os.environ["LOCAL_RANK"])'
    if any(call.name.startswith("accelerate.") for call in place.entry.histories[0].calls):
        fix = "use accelerator.device, or accelerator.local_process_index"
    at = node if isinstance(node, ast.expr) else place.last.node
    return Found(at, message, fix, severity="error" if is_bare else "warning")


_SETS = frozenset({"torch.cuda.set_device", "torch.accelerator.set_device_index", "torch.accelerator.set_device_idx", "torch.cuda.device",
                   "torch.set_default_device", "deepspeed.initialize", "deepspeed.init_distributed", "accelerate.Accelerator",
                   "accelerate.PartialState", "lightning.fabric.Fabric", "rankwise.init",
                   "transformers.TrainingArguments"})  # fmt: skip
_GUESSES = frozenset(
    "torch.distributed." + name
    for name in ("barrier", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
)


@rule("RW202", "error", "R13 C22", "ranks use the GPU before each has set its own")
def device_not_set(script: Script) -> Iterator[Found]:
    if is_of_one_process(script):
        return
    for entry in script.entries:
        init = next((call for call in entry.histories[-1].calls if call.name == INIT), None)
        if (
            init is not None
            and not is_left(script, entry)
            and not _has_device(init)
            and not _may_see_its_own(script, init)
        ):
            yield from _entry(script, entry, init)


def _may_see_its_own(script: Script, init: Call) -> bool:
    """Whether each process may see one GPU only; those that are spawned see what the process before them has set."""
    if "CUDA_VISIBLE_DEVICES" not in script.unit.code or not is_spawned(init):
        return "CUDA_VISIBLE_DEVICES" in script.unit.code
    return any(one.key == "CUDA_VISIBLE_DEVICES" and is_spawned(one.place.last) for one in settings(script))


def _has_device(init: Call) -> bool:
    device = init.arg(None, "device_id")
    return init.has_star or (device is not None and device.const is not None)


def _entry(script: Script, entry: Entry, init: Call) -> Iterator[Found]:
    history = entry.histories[-1]
    is_nccl = (backend_of(init) or "").endswith("nccl")
    # Gloo works, slowly, on one GPU; and who starts each rank by hand may start one on each host.
    is_by_hand = init.arg(4, "rank") is not None and not is_spawned(init) and not launcher_reads(script)
    is_sure = is_nccl and not is_by_hand
    severity: Severity = "error" if is_sure else "warning"
    setters = [call for call in history.calls if _sets_device(call)]
    fixed = next((place for place in places_of(entry, tuple(_SETS), script.module) if _is_fixed(place)), None)
    if fixed is not None and all(call.node is fixed.last.node for call in setters):
        message = f"`{text_of(fixed.last.node)}` gives each rank of a node the same GPU"
        yield Found(fixed.last.node, message, _FIX, severity=severity)
        return
    set_at = min((call.index for call in setters), default=None)
    for place in once(places_of(entry, module=script.module)):
        node, text = _names_one_gpu(place, ignore_current=set_at is not None)
        if node is not None and place.is_made_by_all:
            message = f"`{text}` is GPU 0 on each rank of a node: no rank has set its own GPU"
            yield Found(node, message, _FIX, severity=severity)
            return  # the rest of the script follows from it
    if is_nccl:
        yield from _guesses(script, entry, init, set_at)


def _guesses(script: Script, entry: Entry, init: Call, set_at: int | None) -> Iterator[Found]:
    for place in once(places_of(entry, tuple(_GUESSES), script.module)):
        call = place.last
        if not init.index < call.index or (set_at is not None and set_at < call.index):
            continue
        if any(name in call.kwargs for name in ("device_ids", "device", "group")):
            continue
        what = call.name.rpartition(".")[2]
        message = f"{what} runs on NCCL before this rank has set its GPU, so NCCL guesses one; a wrong guess can hang"
        yield Found(call.node, message, _FIX, severity="warning", failure_class="C22")
        return


def _is_fixed(place: Place) -> bool:
    """Whether all ranks set the device of one number, whatever they are asked for."""
    values = [call.args[0] for call in place.calls if call.args]
    return (
        place.is_made_by_all
        and not place.last.tests
        and len(values) == len(place.calls)
        and all(is_constant(value) or _is_given_to_all(value, place.last) for value in values)
    )


def _is_given_to_all(value: Value, call: Call) -> bool:
    """Whether it comes from the one command line of processes that were spawned."""
    return option_of(value) is not None and not value.spread and is_spawned(call)


def _sets_device(call: Call) -> bool:
    name = call.name.rpartition(".")[2]
    if call.name == "transformers.HfArgumentParser":
        return "TrainingArguments" in ast.unparse(call.node)  # when they are made, they choose the device
    # A mesh gives each rank its GPU.
    return (
        call.name in _SETS
        or name == "init_device_mesh"
        or (call.name.startswith("?") and "device" in name and ("set" in name or "init" in name))
    )


def _names_one_gpu(place: Place, *, ignore_current: bool) -> tuple[ast.AST | None, str]:
    """The part of a call that names the same GPU on all ranks."""
    call = place.last
    node, given = _device_of(call)
    if given is None:
        is_plain = (
            call.name.endswith(".cuda")
            and not call.args
            and not call.kwargs
            and isinstance(call.node, ast.Call)
            and not call.node.args
        )
        return (call.node, text_of(call.node)) if is_plain and not ignore_current else (None, "")
    if given in ({"cuda:0", 0} if ignore_current else {"cuda", "cuda:0", 0}):
        return node, text_of(node)
    return None, ""


def _device_of(call: Call) -> tuple[ast.AST | None, object]:
    """Where a call takes a device, and which constant it is; the branch with CUDA counts."""
    position = 0 if call.name == "torch.device" or call.name.endswith((".to", ".cuda")) else None
    value, node = call.arg(position, "device"), call.arg_node(position, "device")
    if value is None or node is None:
        return None, None
    if call.name == "torch.device" and len(call.args) > 1:
        index = call.args[1].const
        return node, "cuda:0" if index == 0 and value.const == "cuda" and not call.args[1].spread else "other"
    if isinstance(node, ast.IfExp) and isinstance(node.body, ast.Constant):
        return node, node.body.value
    is_odd = type(value.const) is int and call.name != "torch.device" and not call.name.endswith(".cuda")
    return node, "other" if value.spread or type(value.const) not in {str, int} or is_odd else value.const


_FIX = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first (in mp.spawn: its first argument)'
#: These do not start CUDA, or do so only to look.
_HARMLESS = frozenset(
    """is_available manual_seed manual_seed_all is_initialized device_count is_bf16_supported Stream amp autocast
    GradScaler empty_cache""".split()  # noqa: SIM905
)


@rule("RW203", "error", "L11", "CUDA_VISIBLE_DEVICES is set too late or hides the GPU that is used")
def late_visible_devices(script: Script) -> Iterator[Found]:
    for setting in settings(script):
        if setting.key != "CUDA_VISIBLE_DEVICES":
            continue
        calls = setting.place.entry.histories[-1].calls
        at = setting.place.last.index
        # A child that is started afterwards reads its own copy.
        of_ranks = is_spawned(setting.place.last)
        touched = next((call for call in calls[:at] if _starts_cuda(call) and is_spawned(call) == of_ranks), None)
        if touched is not None:
            yield Found(
                setting.node,
                f"CUDA_VISIBLE_DEVICES is set after `{text_of(touched.node)}` (line {line_of(touched)}) has started CUDA: it has no effect",
                "set it before anything uses CUDA, preferably in the shell that starts the script",
            )
        elif "," not in str(setting.value.const):
            yield from _index_gone(script, setting)


def _starts_cuda(call: Call) -> bool:
    last = call.name.rpartition(".")[2]
    if call.name.startswith("torch.cuda."):
        return last not in _HARMLESS and not last[:1].isupper() and "amp" not in call.name.split(".")
    if call.name.endswith(".cuda") and call.name != "torch.cuda":
        return True
    device = call.arg(0 if last == "to" else None, "device")
    return (
        device is not None
        and isinstance(device.const, str)
        and device.const.startswith("cuda")
        and call.name != "torch.device"
    )


def _index_gone(script: Script, setting: Setting) -> Iterator[Found]:
    is_own = bool({"rank", "local_rank"} & setting.value.origin)
    is_one = str(setting.value.const).isdigit() and not setting.value.spread and not spawns(script)
    if not (is_own or (is_one and setting.place.is_made_by_all)) or setting.place.num_ranks == 1:
        return
    for place in places(script, "torch.cuda.set_device"):
        call = place.last
        index = call.args[0] if call.args else None
        if (
            place.entry is setting.place.entry
            and index is not None
            and isinstance(index.const, int)
            and index.const
            and index.spread
        ):
            yield Found(
                setting.node,
                f"each process sees one GPU, which is number 0 there, but line {line_of(call)} asks for `{text_of(call.arg_node(0))}`",
                "leave CUDA_VISIBLE_DEVICES alone and use the local rank, or use index 0",
                severity="error" if is_own else "warning",  # with one rank on each node all is well
            )
            return
