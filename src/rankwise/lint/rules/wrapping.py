"""A model is trained beside the wrapper around it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import passes, sampler_of
from rankwise.lint.analyses.job_view import INIT, above, is_hidden, node_in, places_of
from rankwise.lint.analyses.seeds import draws_in, find_seeding
from rankwise.lint.analyses.shares import is_each_ranks_own
from rankwise.lint.analyses.tensor_text import is_in, key_of, mention, nodes_in
from rankwise.lint.analyses.tensors import OFF, backward_passes, sources_of
from rankwise.lint.analyses.wrapping import wraps
from rankwise.lint.finding import Found, span_of
from rankwise.lint.interpreter.notes import WrapperRead
from rankwise.lint.interpreter.values import AGREED, Instance, Method, Object, Spread, arms_of
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.constructor_table import WRAPPERS
from rankwise.lint.library.names import ACCELERATOR, DDP, HF_TRAINER
from rankwise.lint.paths.phrases import reported_place
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.lint.analyses.wrapping import Wrap
    from rankwise.lint.interpreter.history import History
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Entry, Script

#: What such a name's call is, is a forward pass of a model.
_MODELS = ("torch.nn.", "torchvision.models.", "timm.", "transformers.")


@rule("RW401", "error", "D7", "a program with several processes trains a model that is never wrapped")
def model_never_wrapped(script: Script) -> Iterator[Found]:
    if script.unit.is_fragment:
        return
    yield from _unprepared(script)
    for entry in filter(lambda one: one.is_program, script.entries):
        calls = entry.histories[0].calls
        init = next((call for call in calls if call.name == INIT), None)
        if init is None or init.module is not script.module or _is_alone(init):
            continue
        back = _backward(calls, init)
        if back is None or not is_in(script.tree, back.node) or _is_handed_on(entry):
            continue
        if _is_shared(calls, back):
            yield from _begun_apart(script, entry.histories[0], back)
            continue
        run = [call for call in calls[: back.index] if _is_of_model(call)][-1]
        # What is kept of what all have gathered, all learn alike.
        keeps = [one for one in calls if one.name.startswith("?.") and one.loops[:1] == back.loops[:1] != ()]
        is_alike = not run.given.spread and any(one.given.origin >= AGREED for one in keeps)
        if is_alike or is_each_ranks_own(entry, run.receiver.thing.call):
            continue
        yield Found(
            back.node,
            "each rank trains its own model: a process group is created, but the model is never wrapped and its gradients are never reduced",
            "wrap the model before the optimizer is created: `model = DistributedDataParallel(model)`, or divide and all_reduce each `p.grad` before the step",
            severity="error" if _is_meant_as_one(script, entry, run, back) else "warning",
            also=[("the process group", script.unit.path, span_of(init.node, script.unit.lines))],
        )


def _is_meant_as_one(script: Script, entry: Entry, run: Call, back: Call) -> bool:
    """Whether the ranks share the samples of an epoch, or rank 0 alone saves what it has learnt from data of its own."""
    if any(back in one.inside and sampler_of(one.loader) is not None for one in passes(script)):
        return True
    saves = [place for place in places_of(entry, ("torch.save",)) if place.ranks == {0}]
    return run.given.spread is not Spread.EQUAL and bool(saves)


#: What may give a model other weights than it has drawn.
_SETS = (".load_state_dict", ".copy_", ".fill_", ".from_pretrained", ".vector_to_parameters", ".constant_", ".set_")


def _begun_apart(script: Script, history: History, back: Call) -> Iterator[Found]:
    """Gradients are reduced by hand, but of models that began with weights of their own on each rank."""
    ends = list(_sent(history.calls))
    sent = [one for one in ends if not _is_gradient(one) and _may_be_gradient(one)]
    sets = [call for call in history.calls if call.name.endswith(_SETS) and not _is_gradient(call.receiver)]
    if sent or sets or not any(map(_is_gradient, ends)):
        return
    for call in history.calls[back.index :: -1]:
        made = getattr(call.receiver.thing, "call", None) if _is_of_model(call) else None
        draws = draws_in(call.receiver) if made is not None and made.index < back.index else ()
        is_own = any(find_seeding(history, one, "torch") in {"unset", "differs"} for one in draws)
        at = node_in(script, made) if made is not None and is_own else None
        if at is not None:
            yield Found(
                at,
                "each rank draws the first weights of this model for itself: gradients are averaged, but the models stay apart",
                "send rank 0's weights to all before the first step: `for p in model.parameters(): dist.broadcast(p.data, 0)`; or wrap it",
            )
            return


def _sent(calls: Iterable[Call]) -> Iterator[Value]:
    """What ranks give to collectives, and all that it was computed from, as far as gradients."""
    acts = (call for call in calls if call.name in ACTS and ACTS[call.name].family)
    given = (value for call in acts for value in (*call.args, *call.kwargs.values()))
    return (one for value in given for one in sources_of(value, cuts=False, until=_is_gradient))


def _unprepared(script: Script) -> Iterator[Found]:
    """`accelerator.backward(loss)` of a model that was left out of `accelerator.prepare`."""
    for entry in script.entries:
        calls = entry.histories[0].calls
        prepares = [call for call in calls if call.name.startswith(f"{ACCELERATOR}.prepare")]
        if not prepares or any(call.has_star or call.guards for call in prepares):
            continue
        given = {
            id(value.thing)
            for call in prepares
            for value in (*call.args, *call.kwargs.values())
            if value.thing is not None
        }
        open_ended = any(value.thing is None for call in prepares for value in call.args)
        back = next((call for call in calls if call.name == f"{ACCELERATOR}.backward" and call.loops), None)
        if back is None or open_ended or not is_in(script.tree, back.node):
            continue
        loss = back.arg(0, "loss")
        models = [call for call in calls if back.loops[-1] in call.loops and _is_of_model(call)]
        if not models or (loss is not None and loss.via) or any(id(call.receiver.thing) in given for call in models):
            continue
        if not any(_learns(call.receiver.thing, calls) for call in models):
            continue
        yield Found(
            back.node,
            f"the model of this loss was never given to accelerator.prepare (line {getattr(prepares[0].node, 'lineno', 0)}): each process trains its own",
            "pass the model to accelerator.prepare, too, and continue with what it returns",
        )


def _learns(model: object, calls: list[Call]) -> bool:
    """Whether an optimizer was given this model's parameters."""
    asked = {id(call.node) for call in calls if call.name.endswith(".parameters") and call.receiver.thing is model}
    return any(
        call.name.startswith("torch.optim.") and any(id(part) in asked for part in ast.walk(call.node))
        for call in calls
    )


def _is_alone(init: Call) -> bool:
    size = init.arg(None, "world_size")
    return size is not None and size.const == 1


def _is_shared(calls: list[Call], back: Call) -> bool:
    """Whether something is communicated while training that is, or may be, a gradient, a parameter, or a part of the model's work."""
    loop = [call for call in calls if call.index > back.index or call.loops[:1] == back.loops[:1] != ()]
    met = [call for call in loop if call.name in ACTS and ACTS[call.name].family in {"collective", "point"}]
    given = [
        value
        for call in met
        for name, value in (*zip(ACTS[call.name].signature or _FIRST, call.args, strict=False), *call.kwargs.items())
        if name not in _HOW
    ]
    # What is copied into a buffer is communicated with it.
    copied = [call.args[-1] for call in loop if met and call.args and call.name.endswith((".copy_", ".__setitem__"))]
    losses = [loss for _, loss in backward_passes(loop)]
    return (
        any(ACTS[call.name].family == "point" for call in met)
        or any(call.name.startswith("torch.distributed.rpc.") for call in calls)
        or any(one.made is not None and one.made.name in ACTS for loss in losses for one in sources_of(loss))
        or any(map(_may_be_gradient, (one for value in given for one in sources_of(value, cuts=False))))
        or any(map(_is_gradient, (one for value in copied for one in sources_of(value, cuts=False))))
    )


#: Parameters of collectives that are no tensors, and the one of what has no signature.
_HOW = frozenset({"op", "group", "src", "dst", "async_op", "group_src", "group_dst"})
_FIRST = ("tensor",)


def _may_be_gradient(value: Value) -> bool:
    of = value.thing.receiver if isinstance(value.thing, Method) and value.thing.name == "data" else value
    is_open = of.thing is None and of.made is None and not of.is_known
    is_state = value.made is not None and value.made.name.endswith("state_dict")
    return (
        (is_open and (bool(of.path) or of is not value))
        or is_state
        or _is_gradient(value)
        or getattr(value.thing, "kind", "") in {"parameter", "parameters"}
    )


def _is_gradient(value: Value) -> bool:
    return isinstance(value.thing, Method) and value.thing.name == "grad"


def _is_handed_on(entry: Entry) -> bool:
    """Whether a model or its optimizer is given to what may keep the ranks in step, on any of them, or a hook is set."""
    calls = [call for history in entry.histories for call in history.calls]
    things = {
        id(call.result.thing)
        for call in calls
        if call.name.startswith((*_MODELS, "torch.optim.")) and call.result.thing is not None
    }
    things |= {id(call.receiver.thing) for call in calls if call.name == "torch.nn.Module.__call__"}
    return any(
        call.name in WRAPPERS
        or call.name.endswith("hook")
        or (
            (is_hidden(call) or call.name.startswith(_SHARING))
            and any(id(value.thing) in things for value in (*call.args, *call.kwargs.values()))
        )
        for call in calls
    )


#: What of known libraries may keep ranks in step.
_SHARING = ("torch.distributed.", "accelerate.", HF_TRAINER)


def _is_of_model(call: Call) -> bool:
    """Whether it is a forward pass, with gradients, of a model that is known."""
    is_pass = call.name.startswith(_MODELS) and call.name.endswith(".__call__") and not OFF & set(call.contexts)
    return is_pass and isinstance(call.receiver.thing, (Object, Instance)) and "Loss" not in call.name


def _backward(calls: list[Call], init: Call) -> Call | None:
    """A backward pass through a model that is known, with an optimizer that steps afterwards."""
    known = list(filter(_is_of_model, calls))
    if not known:
        return None
    for call in calls:
        if call.name.endswith(".backward") and call.index > max(init.index, known[0].index) and not call.receiver.via:
            stepped = any(one.name.endswith(".step") and one.index > call.index for one in calls)
            return call if stepped else None
    return None


@rule("RW402", "error", "D7", "training bypasses the DistributedDataParallel around the model")
def forward_past_the_wrapper(script: Script) -> Iterator[Found]:
    for wrap in wraps(script):
        if _has_other_ends(wrap):
            continue  # wrapped in some settings only: elsewhere the bare model is right
        after = list(wrap.calls_after())
        if any(_is_forward(call, wrap) for call in after) or any(map(_is_gradient, _sent(after))):
            continue
        if _is_kept_in_step(wrap, after):
            continue
        past = {id(call): call for call in after if _is_past(call, wrap)}
        losses = [list(sources_of(loss)) for _, loss in backward_passes(after) if not loss.via]
        calls = [one.made for loss in losses if not any(_may_run(one.made, wrap) for one in loss) for one in loss]
        inner = next((past[id(made)] for made in calls if id(made) in past), None)
        if inner is None or not _settings(wrap.call) <= _settings(inner):
            continue
        # Where the model itself is called, if that is in this file; else what called it from here.
        called = {id(call.node) for call in past.values()}
        sites = [site.node for site in inner.stack]
        sites = [*(one for one in sites if id(one) in called or _names_module(one)), inner.node, *reversed(sites)]
        node = next((one for one in sites if is_in(script.tree, one)), None)
        if node is None:
            continue
        name = next(iter(sorted(wrap.names)), "the wrapped model")
        yield Found(
            node,
            f"the loss bypasses `{name}`, so its gradients are never averaged: every rank trains its own model",
            f"call `{name}(...)` itself; move what the loss needs into the model's `forward`",
            also=mention(script, "wrapped here", wrap.call.node),
        )


#: Hooks that may share a gradient.
_HOOKS = (".register_hook", ".register_post_accumulate_grad_hook")


def _is_kept_in_step(wrap: Wrap, after: list[Call]) -> bool:
    """Whether something else may share the gradients, or make the models alike: a hook, a collective of parameters, an unread function, an optimizer."""
    backs = [call.index for call, _ in backward_passes(after)]
    steps = [call for call in after if call.name.endswith(".step") and backs and call.index > backs[0]]
    ends = [(one, next((step.index for step in steps if step.index > one), one)) for one in backs]
    return (
        any(call.name.endswith(_HOOKS) for call in wrap.entry.histories[0].calls)
        or any(_is_parameters(one) for call in after if call.name in ACTS for one in _given_to(call))
        or any(
            is_hidden(call) and any(start < call.index < end for start, end in ends) and _takes_model(call, wrap)
            for call in after
        )
        or any(_is_own_optimizer(step.receiver.thing) for step in steps)
    )


def _given_to(call: Call) -> tuple[Value, ...]:
    return (*call.args, *call.kwargs.values())


def _takes_model(call: Call, wrap: Wrap) -> bool:
    """Whether a call is given the model, parameters or an optimizer."""
    inner = wrap.inner
    return any(
        wrap.holds(one)
        or (inner.thing is None and inner.path != "" and one.path == inner.path)
        or _is_parameters(one)
        or getattr(one.thing, "kind", "").startswith("torch.optim.")
        for one in _given_to(call)
    )


def _is_parameters(value: Value) -> bool:
    """Whether it is a parameter or several, or their data."""
    while isinstance(value.thing, Method) and value.thing.name == "data":
        value = value.thing.receiver
    if value.made is not None and value.made.name == "operator.Subscript":  # one of them in a loop
        value = value.made.args[0]
    is_kind = getattr(value.thing, "kind", "") in {"parameter", "parameters"}
    return is_kind or (value.made is not None and value.made.name.endswith("parameters"))


def _is_own_optimizer(thing: object) -> bool:
    """Whether an optimizer is none of torch's that each rank steps alone."""
    if isinstance(thing, Instance):
        return any("optim" in one.lower() for one in thing.cls.library_bases)
    kind = getattr(thing, "kind", "")
    return "optim" in kind.lower() and not kind.startswith("torch.optim.")


def _settings(call: Call) -> set[tuple[ast.AST, bool]]:
    """The tests under which a call is made: a model may be wrapped in some settings only, and trained bare elsewhere."""
    return {(test, arm) for test, _, arm in call.tests}


def _has_other_ends(wrap: Wrap) -> bool:
    """Whether the function that wraps returns something else in other settings."""
    function = getattr(wrap.call.function, "node", None)
    returns = (
        [one for one in nodes_in(function) if isinstance(one, ast.Return) and one.value] if function is not None else []
    )
    return len(returns) > 1


def _is_forward(call: Call, wrap: Wrap) -> bool:
    return not OFF & set(call.contexts) and call.name.endswith(".__call__") and call.receiver.thing is wrap.wrapper


def _may_run(call: Call | None, wrap: Wrap) -> bool:
    """Whether the wrapped model is passed to an unknown function, which may call it."""
    return (
        call is not None
        and not OFF & set(call.contexts)
        and not call.name.startswith(("torch.", "builtins.", "user.", "accelerate", "copy"))
        and any(value.thing is wrap.wrapper for value in (*call.args, *call.kwargs.values()))
    )


def _is_past(call: Call, wrap: Wrap) -> bool:
    if OFF & set(call.contexts):
        return False
    if call.receiver.thing is not None and call.receiver.thing is wrap.inner.thing:
        return True
    if call.name.endswith(".__call__"):
        return call.receiver.thing is not None and id(call.receiver.thing) in wrap.parts()
    if wrap.inner.thing is None and wrap.inner.path and call.name == f"?{wrap.inner.path}":
        return isinstance(call.node, ast.Call) and key_of(call.node.func) not in wrap.names
    return (
        wrap.inner.thing is None
        and ("module" in call.receiver.origin or call.name == "?module")
        and _names_module(call.node)
    )


def _names_module(node: ast.AST) -> bool:
    """`ddp.module(x)` or `ddp.module.loss(x)`."""
    if not isinstance(node, ast.Call):
        return False
    words = key_of(node.func).split(".")
    return len(words) > 1 and "module" in words[-2:]


# What DDP has besides a module's own methods.
_OF_DDP = frozenset({"device", "device_ids", "device_type", "dim", "module", "gather", "scatter", "logger", "reducer", "join", "join_hook",
                     "join_device", "join_process_group", "no_sync", "static_graph", "output_device", "process_group", "mixed_precision",
                     "broadcast_buffers", "bucket_bytes_cap", "find_unused_parameters", "gradient_as_bucket_view", "training",
                     "parameters_to_ignore", "modules_buffers", "to_kwargs", "register_comm_hook", "will_sync_module_buffers",
                     "require_backward_grad_sync", "require_forward_param_sync", "named_module_buffers", "batched_grad_copy",
                     "forward", "forward_sync_buffers", "type", "float", "T_destination", "dump_patches", "call_super_init"})  # fmt: skip
_OF_MODULE = frozenset({"add_module", "apply", "bfloat16", "buffers", "children", "compile", "cpu", "cuda", "double", "eval", "extra_repr",
                        "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "half", "ipu", "load_state_dict", "modules",
                        "mtia", "named_buffers", "named_children", "named_modules", "named_parameters", "parameters",
                        "register_backward_hook", "register_buffer", "register_forward_hook", "register_forward_pre_hook",
                        "register_full_backward_hook", "register_full_backward_pre_hook", "register_load_state_dict_post_hook",
                        "register_load_state_dict_pre_hook", "register_module", "register_parameter", "requires_grad_",
                        "register_state_dict_post_hook", "register_state_dict_pre_hook", "set_extra_state", "set_submodule",
                        "share_memory", "state_dict", "to", "to_empty", "train", "xpu", "zero_grad"})  # fmt: skip


@rule("RW418", "error", "", "an attribute of the inner model is read from the DistributedDataParallel around it")
def attribute_of_the_model_inside(script: Script) -> Iterator[Found]:
    reported: set[int] = set()
    for read in script.notes:
        if isinstance(read, WrapperRead) and _is_certain(read) and _only_inside(read.wrapper, read.node.attr):
            name, at = ast.unparse(read.node.value), node_in(script, read)
            if at is None or id(at) in reported:
                continue
            reported.add(id(at))
            yield Found(
                at,
                f"`{name}` is a DistributedDataParallel, which has no `{read.node.attr}`, only the model inside has: AttributeError",
                f"write `{name}.module.{read.node.attr}`",
                also=[reported_place("it is read here", read.node, read.module)] if at is not read.node else [],
            )


def _is_certain(read: WrapperRead) -> bool:
    """Whether the read comes wherever the model was wrapped, and nothing asks whether there is such an attribute."""
    made = read.wrapper.call
    return (
        isinstance(read.node.ctx, ast.Load)
        and made is not None
        and made.name == DDP
        and arms_of(made.tests) <= arms_of(read.tests)
        and not any(
            isinstance(one, ast.Try) or (isinstance(one, (ast.If, ast.IfExp, ast.BoolOp)) and _asks_kind(one))
            for one in above(read.module.tree, read.node)
        )
    )


def _asks_kind(node: ast.If | ast.IfExp | ast.BoolOp) -> bool:
    text = ast.unparse(node if isinstance(node, ast.BoolOp) else node.test)
    return "isinstance" in text or "hasattr" in text or "type(" in text


def _only_inside(wrapper: Object, attr: str) -> bool:
    if attr in _OF_DDP or attr in _OF_MODULE or attr.startswith("_"):
        return False
    inner = wrapper.call.arg(0, "module") if wrapper.call is not None else None
    thing = inner.thing if inner is not None else None
    return isinstance(thing, Instance) and (attr in thing.attrs or thing.cls.find(attr) is not None)
