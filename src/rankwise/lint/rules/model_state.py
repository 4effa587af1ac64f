"""The state of a wrapped model differs between ranks."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import kind_of, text_of
from rankwise.lint.analyses.seeds import draws_in, find_seeding
from rankwise.lint.analyses.tensor_text import is_in, mention
from rankwise.lint.analyses.wrapping import parts_of, refers_to, trains_later, wraps
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Items, Object
from rankwise.lint.library.names import DDP, FSDP, FULLY_SHARD
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.wrapping import Wrap
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

_RANDOM = frozenset({"reset_parameters", "apply", "init_weights", "_init_weights", "initialize_weights"})
_SENDS = tuple(
    """broadcast _sync_params_and_buffers _broadcast_coalesced sync_module_states sync_params broadcast_parameters""".split()  # noqa: SIM905
)


@rule("RW410", "error", "D26", "weights are set differently on the ranks after the model was wrapped")
def state_differs_after_wrapping(script: Script) -> Iterator[Found]:
    for wrap in wraps(script):
        if not wrap.kind.endswith("DistributedDataParallel"):
            continue
        for call, message, fix in (*_loads(wrap), *_draws(wrap), *_copies(wrap), *_steps(wrap)):
            if is_in(script.tree, call.node):
                yield Found(call.node, message, fix, also=mention(script, "wrapped here", wrap.call.node))


def _loads(wrap: Wrap) -> Iterator[tuple[Call, str, str]]:
    for call in wrap.calls_after():
        if call.name.rpartition(".")[2] != "load_state_dict" or not _is_its(call, wrap):
            continue
        if _is_sent(wrap, call.index) or wrap.is_wrapped_again(call.index):
            continue
        if call.guards:
            test = text_of(call.guards[-1].node)
            yield (
                call,
                f"only ranks with `{test}` load the state, after the model was wrapped: the other ranks keep different weights forever",
                f"load it on every rank, outside of `{test}`, or before the model is wrapped",
            )


def _steps(wrap: Wrap) -> Iterator[tuple[Call, str, str]]:
    """A step of an optimizer or of a learning rate that only some ranks make."""
    made = [one for one in wrap.entry.histories[0].calls if _OPTIMIZER.fullmatch(one.name)]
    if len(made) > 1:  # another one may train another model
        return
    others = {call.name for call in wrap.entry.histories[-1].calls}
    for call in wrap.calls_after():
        kind = kind_of(call.receiver)
        if not kind.startswith("torch.optim.") or call.name != f"{kind}.step" or not call.guards or call.name in others:
            continue
        if not _is_sent(wrap, call.index):
            test, kept = text_of(call.guards[-1].node), "learning rate" if "lr_scheduler" in kind else "weights"
            message = f"only ranks with `{test}` run `{text_of(call.node)}`: the other ranks keep their {kept}, and the models grow apart"
            yield call, message, f"let every rank run it, outside of `{test}`"


def _is_its(call: Call, wrap: Wrap) -> bool:
    func = getattr(call.node, "func", None)
    return (
        call.receiver.thing is wrap.wrapper
        or (wrap.inner.thing is not None and call.receiver.thing is wrap.inner.thing)
        or (func is not None and call.receiver.thing is None and refers_to(func, wrap))
    )


def _is_sent(wrap: Wrap, index: int) -> bool:
    return any(call.index > index and any(word in call.name for word in _SENDS) for call in wrap.calls_after())


def _seed_differs(wrap: Wrap, before: Call) -> bool:
    """Whether each rank draws other first weights, as it does with its own seed or, where none are loaded, with no seed."""
    history = wrap.entry.histories[0]
    how = find_seeding(history, before, "torch")
    is_drawn = wrap.entry.is_program and any(True for _ in draws_in(wrap.inner))
    is_loaded = any("load" in call.name for call in history.calls)
    return is_drawn and (how == "differs" or (how == "unset" and not is_loaded))


def _draws(wrap: Wrap) -> Iterator[tuple[Call, str, str]]:
    """Weights drawn anew after the wrapping, under a seed of this rank's."""
    for call in wrap.calls_after():
        word = call.name.rpartition(".")[2]
        if word not in _RANDOM or not (wrap.holds(call.receiver) or _is_its(call, wrap)):
            continue
        if not _seed_differs(wrap, call) or _is_sent(wrap, call.index) or wrap.is_wrapped_again(call.index):
            continue
        yield (
            call,
            f"`{text_of(call.node)}` draws new weights after the model was wrapped, from a different seed on each rank: the weights differ",
            "initialise the model before it is wrapped, which broadcasts rank 0's weights",
        )


def _copies(wrap: Wrap) -> Iterator[tuple[Call, str, str]]:
    """A copy (for a moving average) taken before DDP has made the weights equal."""
    inner = wrap.inner.thing
    calls = wrap.entry.histories[0].calls
    for call in calls:
        if call.name != "copy.deepcopy" or call.index > wrap.call.index or inner is None:
            continue
        if not call.args or call.args[0].thing is not inner or not _seed_differs(wrap, call):
            continue
        loaded = any(
            one.name.endswith("load_state_dict") and (one.index < call.index or one.index > wrap.call.index)
            for one in calls
        )
        if loaded or _is_sent(wrap, wrap.call.index) or wrap.call.name.endswith("prepare"):
            continue
        yield (
            call,
            f"`{text_of(call.node)}` is made before DDP broadcasts rank 0's weights, and ranks draw their first weights from different seeds: the copies differ",
            "copy after the model was wrapped: `copy.deepcopy(model.module)`",
        )


@rule("RW412", "error", "D29", "the optimizer is created before the model is sharded")
def optimizer_before_sharding(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        calls = entry.histories[0].calls
        optimizers = [call for call in calls if _is_optimizer(call)]
        for shard in (call for call in calls if _replaces(call)):
            early = [one for one in optimizers if one.index < shard.index and _holds(one, shard, calls)]
            late = [
                one for one in optimizers if one.index > shard.index and (_holds(one, shard, calls) or not one.args)
            ]
            if not early or late:
                continue
            optimizer = early[-1]
            node = optimizer.node if is_in(script.tree, optimizer.node) else shard.node
            if not is_in(script.tree, node):
                continue
            name = "fully_shard" if shard.name == FULLY_SHARD else "FullyShardedDataParallel"
            yield Found(
                node,
                f"the optimizer holds the parameters from before {name}, which replaces them: its step changes nothing",
                f"create the optimizer after {name}",
                also=mention(script, name, shard.node),
            )
            break


def _is_optimizer(call: Call) -> bool:
    last = call.name.rpartition(".")[2]
    return (
        call.name.startswith(("torch.optim.", "bitsandbytes.optim.", "transformers.AdamW"))
        and last[:1].isupper()
        and "lr_scheduler" not in call.name
    )


def _replaces(call: Call) -> bool:
    if call.name == FULLY_SHARD:
        return True
    keeps = call.kwargs.get("use_orig_params")
    return call.name == FSDP and not call.has_star and (keeps is None or keeps.const is False)


def _holds(optimizer: Call, shard: Call, calls: list[Call]) -> bool:
    """Whether an optimizer was given parameters of the model that is sharded: by itself, or by calls in its function before."""
    model, given = shard.arg(0, "module"), optimizer.arg(0, "params")
    ids = {id(one) for one in parts_of(model)} if model is not None and given is not None else set()
    inside = {id(one) for one in ast.walk(optimizer.node)}
    asked = [
        one
        for one in calls
        if one.name.endswith("parameters")
        and (
            id(one.node) in inside
            or (one.function is optimizer.function and one.function is not None and one.index < optimizer.index)
        )
    ]
    held = [*(_models(given) if given is not None else ()), *(one.receiver.thing for one in asked)]
    return any(id(thing) in ids for thing in held)


def _models(value: Value) -> Iterator[object]:
    thing = value.thing
    if isinstance(thing, Items):
        for one in thing.values:
            yield from _models(one)
    elif isinstance(thing, Object) and thing.kind == "parameters" and thing.call is not None:
        yield thing.call.receiver.thing


@rule("RW416", "hint", "D21", "BatchNorm keeps statistics of each rank's own batch")
def batchnorm_not_synchronised(script: Script) -> Iterator[Found]:
    if "SyncBatchNorm" in script.unit.code or "sync_batchnorm" in script.unit.code:
        return
    for wrap in wraps(script):
        has_norm = any(
            isinstance(one, Object) and one.kind.startswith("torch.nn.BatchNorm") for one in parts_of(wrap.inner)
        )
        if (
            wrap.kind != DDP
            or not has_norm
            or not is_in(script.tree, wrap.call.node)
            or not trains_later(wrap, wrap.call)
        ):
            continue
        yield Found(
            wrap.call.node,
            "each rank normalises with the statistics of its own batch: DistributedDataParallel does not synchronise BatchNorm",
            "if batches are small, convert first: `model = nn.SyncBatchNorm.convert_sync_batchnorm(model)`",
        )


_OPTIMIZER = re.compile(r"torch\.optim\.[A-Z]\w*")
_CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_SHARDS = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@rule("RW419", "error", "", "gradients under FSDP are clipped by the norm of each rank's own shard")
def clipped_by_own_shard(script: Script) -> Iterator[Found]:
    models = {
        call.node: call
        for call in script.calls
        if call.name.endswith(".parameters")
        and isinstance(call.receiver.thing, Object)
        and call.receiver.thing.kind == FSDP
        and _is_sharded(call.receiver.thing.call)
    }
    for call in script.calls_of(*_CLIPS):
        node = call.arg_node(0, "parameters")
        given = models.get(node) if node is not None else None
        if given is None or not is_in(script.tree, call.node) or any("summon" in one for one in call.contexts):
            continue
        model = text_of(getattr(getattr(given.node, "func", None), "value", None))
        limit = text_of(call.arg_node(1, "max_norm"))
        yield Found(
            call.node,
            f"each rank holds a shard of the gradients of `{model}` and clips it by this shard's norm: too small, and not"
            " the same on all ranks",
            f"let FSDP compute the norm: `{model}.clip_grad_norm_({limit})`",
        )

    yield from _scaler(script)


def _scaler(script: Script) -> Iterator[Found]:
    if not any(_is_sharded(call) for call in script.all_calls):
        return
    for call in script.calls_of("torch.amp.GradScaler"):
        enabled = call.arg(None, "enabled")
        if enabled is None or enabled.const is not False:
            yield Found(
                call.node,
                "this scaler looks for infinities in the shards of its own rank: one rank skips a step that the others make",
                "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, or bfloat16 without a scaler",
                severity="error" if enabled is None or enabled.const is True else "warning",
            )


def _is_sharded(made: Call | None) -> bool:
    if made is None or made.name != FSDP or made.has_star:
        return False
    strategy = made.arg_node(2, "sharding_strategy")
    return strategy is None or text_of(strategy).rpartition(".")[2] in _SHARDS
