"""Functions whose results the simulated run computes: who the rank is, the environment, ranks that are started, handlers of signals; and all others of that kind."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.history import Arm, Fork
from rankwise.lint.interpreter.own_values import OWN
from rankwise.lint.interpreter.plain_python import PLAIN
from rankwise.lint.interpreter.training import has_buffers
from rankwise.lint.interpreter.values import (
    ANY,
    NOTHING,
    UNKNOWN,
    Bound,
    Choice,
    Function,
    Items,
    Object,
    Spread,
    Value,
    mixed,
)
from rankwise.lint.library.constructor_table import MADE_KINDS
from rankwise.lint.library.hints import ENVIRON, TORCHRUN
from rankwise.lint.library.names import STRATEGY

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.lint.interpreter.run import Run
    from rankwise.lint.interpreter.values import Call


#: Begins the context of each process that is started; behind it stands a number of its own.
PROCESS = "process "


def _get_rank(run: Run, call: Call) -> Value:
    group = call.arg(0, "group")
    if group is not None and isinstance(group.thing, Object) and group.thing.kind != "world":
        return Value(Spread.RANK, frozenset({"group_rank"}))
    return run.role("rank")


def _get_world_size(run: Run, call: Call) -> Value:
    group = call.arg(0, "group")
    if (
        group is not None
        and group.const is not None
        and not (isinstance(group.thing, Object) and group.thing.kind == "world")
    ):
        return ANY
    return run.role("world_size")


def _init(run: Run, call: Call) -> Value:
    run.initialized = True
    call.result = Value(const=None)
    return call.result


def _destroy(run: Run, _call: Call) -> Value:
    run.num_ops += 1  # what calls this does something each time
    return Value(const=None)


def _makes_and_inits(run: Run, call: Call) -> Value:
    run.initialized = True
    return Value(thing=Object(MADE_KINDS.get(call.name, call.name), call))


def _is_initialized(run: Run, call: Call) -> Value:
    """True before it is known otherwise, unless what asks would make the group: rules look at what was asked too early."""
    if run.initialized:
        return Value(const=True)
    return Value(const=not _makes_group_itself(call), origin=frozenset({"before_init"}))


def _makes_group_itself(call: Call) -> bool:
    """Whether the function, or the statement at the top of the module, that asks makes a group too."""
    line = getattr(call.node, "lineno", 0)
    top = [one for one in call.module.tree.body if one.lineno <= line <= (one.end_lineno or one.lineno)]
    asking = [call.function.node] if call.function is not None else top
    for node in (part for one in asking for part in ast.walk(one)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in {"init_process_group", "init_distributed"} or ("init" in name and "dist" in name):
                return True
    return False


def _env(run: Run, call: Call) -> Value:
    key = call.args[0].const if call.args else UNKNOWN
    default = call.arg(1, "default")
    if not isinstance(key, str):
        return mixed((*call.args[:1],))
    if key in run.environ:
        return run.environ[key]
    role = ENVIRON.get(key)
    if role is None:
        return Value(origin=frozenset({"env"}), path=f"environ.{key}")
    value = run.role(role, as_text=True)
    if key not in TORCHRUN and default is not None:
        return Value(value.spread, value.origin, path=f"environ.{key}")
    return value


def _set_default(run: Run, call: Call) -> Value:
    key = call.args[0].const if call.args else UNKNOWN
    value = call.args[1] if len(call.args) > 1 else ANY
    if isinstance(key, str) and key not in TORCHRUN:
        run.environ.setdefault(key, value)
    return Value(path=f"environ.{key}") if isinstance(key, str) else ANY


def _spawn(run: Run, call: Call) -> Value:
    """The ranks of the run are those that it starts."""
    fn, given = call.arg(0, "fn"), call.arg(1, "args")
    rest = given.thing.values if given is not None and isinstance(given.thing, Items) else []
    _start_ranks(run, call, fn, [None, *rest], "spawned")
    return Value(const=None)


def _process(run: Run, call: Call) -> None:
    """One of the processes that a loop over numbers starts: the one that gets this rank's number, and so this rank."""
    loop: ast.AST | None = run.loops[-1] if run.loops else None
    loop = getattr(loop, "generators", [loop])[0]
    number = getattr(getattr(loop, "target", None), "id", None)
    given, node = call.arg(None, "args"), call.arg_node(None, "args")
    if (
        number is not None
        and given is not None
        and isinstance(given.thing, Items)
        and isinstance(node, (ast.Tuple, ast.List))
        and getattr(getattr(getattr(loop, "iter", None), "func", None), "id", "") == "range"
        and any(getattr(one, "id", None) == number for one in node.elts)
    ):
        given_each = [
            None if getattr(one, "id", None) == number else value
            for one, value in zip(node.elts, given.thing.values, strict=False)
        ]
        _start_ranks(run, call, call.arg(None, "target"), given_each, "spawned")


def _start_ranks(run: Run, call: Call, fn: Value | None, given: list[Value | None], *contexts: str) -> None:
    """Go on as the rank that was started, in its function; None among the arguments is its number."""
    if fn is None or not isinstance(fn.thing, (Function, Bound, Choice)):
        return
    before = run.guards, run.loops
    run.guards, run.loops = (), ()
    rank = run.role("rank")
    own = Value(rank.spread, rank.origin | {"local_rank", "spawned"}, rank.const, rank.thing)
    with run.within("contexts", f"{PROCESS}{call.index}", *contexts):
        arguments = tuple(own if one is None else _handed_on(one) for one in given)
        run.call(run, fn, arguments, {}, call.node, scope=run.scopes.get(call.module, run.memo["top"]))
    run.guards, run.loops = before


def _handed_on(value: Value, depth: int = 0) -> Value:
    """An argument of the ranks' function: the parent has made one for all of them."""
    attrs = getattr(value.thing, "attrs", None)
    if isinstance(attrs, dict) and depth < 2:
        attrs.update({name: _handed_on(one, depth + 1) for name, one in attrs.items()})
    return replace(value, spread=Spread.EQUAL, origin=NOTHING) if value.spread is Spread.LOCAL else value


def _launch(run: Run, call: Call) -> Value:
    fn, given = call.arg(0, "function", "fn"), call.arg(1, "args")
    _start_ranks(run, call, fn, [*given.thing.values] if given is not None and isinstance(given.thing, Items) else [])
    return Value(const=None)


def _sync_batchnorm(_run: Run, call: Call) -> Value:
    """From here on a forward pass in training mode compares batch statistics with all ranks."""
    value = call.args[0] if call.args else ANY
    attrs = getattr(value.thing, "attrs", None)
    if isinstance(attrs, dict) and has_buffers(value) is not False:
        attrs["__synced__"] = Value(const=True)
    return value


def _field(run: Run, call: Call) -> Value:
    """The default of a dataclass's field."""
    factory = call.arg(None, "default_factory")
    if factory is None:
        return call.arg(None, "default") or ANY
    return run.call(run, factory, (), {}, call.node, scope=run.memo["top"])


def _signal(run: Run, call: Call) -> Value:
    """A handler runs on the rank that gets the signal, at a moment of its own."""
    handler = call.arg(1, "handler")
    if handler is not None and isinstance(handler.thing, (Function, Bound, Choice)):
        before, run.moment = run.moment, Value(Spread.LOCAL, frozenset({"signal"}))
        with run.gathering() as items, run.within("contexts", "signal"):
            run.call(run, handler, (ANY, ANY), {}, call.node, scope=run.memo["top"])
        run.moment = before
        if items and not run.dry:
            value = Value(Spread.LOCAL, frozenset({"signal"}))
            arms = (Arm("try"), Arm("except", items))
            run.items.append(Fork(call.node, call.module, value, arms, "except", run.guards))
    return Value(const=None)


SPECIAL: dict[str, Callable[[Run, Call], Value | None]] = {
    **PLAIN,
    **OWN,
    "torch.distributed.get_rank": _get_rank,
    "torch.distributed.get_world_size": _get_world_size,
    "torch.distributed.get_node_local_rank": lambda run, _call: run.role("local_rank"),
    "torch.distributed.init_process_group": _init,
    "torch.distributed.init_distributed": _init,
    "deepspeed.init_distributed": _init,
    "torch.distributed.destroy_process_group": _destroy,
    "torch.distributed.is_initialized": _is_initialized,
    "torch.distributed.is_available": lambda _run, _call: Value(const=True),
    "torch.distributed.is_torchelastic_launched": lambda _run, _call: Value(const=True),
    "accelerate.Accelerator": _makes_and_inits,
    "accelerate.PartialState": _makes_and_inits,
    "lightning.fabric.Fabric": _makes_and_inits,
    "rankwise.init": _makes_and_inits,
    STRATEGY: _makes_and_inits,
    "os.environ.__getitem__": _env,
    "os.environ.get": _env,
    "os.getenv": _env,
    "os.environ.pop": _env,
    "os.environ.setdefault": _set_default,
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": _sync_batchnorm,
    "torch.multiprocessing.spawn": _spawn,
    "torch.multiprocessing.start_processes": _spawn,
    "torch.multiprocessing.Process": _process,
    "multiprocessing.Process": _process,
    "accelerate.notebook_launcher": _launch,
    "accelerate.debug_launcher": _launch,
    "signal.signal": _signal,
    "dataclasses.field": _field,
}
#: Calls that make the default group.
STARTS = frozenset(
    {"deepspeed.initialize", *(name for name, doing in SPECIAL.items() if doing in {_init, _makes_and_inits})}
)
