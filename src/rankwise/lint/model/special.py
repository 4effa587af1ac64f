"""Functions whose results the run on paper computes: ranks, the environment, numbers, clocks, files."""

from __future__ import annotations

import ast
import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankwise.lint.library.hints import ENVIRON, TORCHRUN
from rankwise.lint.model.attributes import Super
from rankwise.lint.model.history import Arm, Fork
from rankwise.lint.model.training import has_buffers
from rankwise.lint.model.values import (
    ANY,
    UNKNOWN,
    Bound,
    Function,
    Instance,
    Items,
    Library,
    Object,
    Spread,
    Value,
    known,
    mixed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.run import Run

_LARGE = 10_000


def _given(call: Call) -> Value:
    return mixed((*call.args, *call.kwargs.values()))


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


def _local_rank(run: Run, _call: Call) -> Value:
    return run.role("local_rank")


def _init(run: Run, call: Call) -> Value:
    run.initialized = True
    call.result = Value(const=None)
    return call.result


def _makes_and_inits(run: Run, call: Call) -> Value:
    run.initialized = True
    return Value(thing=Object(call.name, call))


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


def _pop_env(run: Run, call: Call) -> Value:
    return _env(run, call)


def _set_default(run: Run, call: Call) -> Value:
    key = call.args[0].const if call.args else UNKNOWN
    value = call.args[1] if len(call.args) > 1 else ANY
    if isinstance(key, str) and key not in TORCHRUN:
        run.environ.setdefault(key, value)
    return Value(path=f"environ.{key}") if isinstance(key, str) else ANY


def _number(kind: Callable[[Any], Any]) -> Callable[[Run, Call], Value]:
    def convert(_run: Run, call: Call) -> Value:
        value = call.args[0] if call.args else known(kind())  # type: ignore[call-arg]
        if value.is_known and isinstance(value.const, (int, float, str, bool)):
            try:
                return Value(value.spread, value.origin, kind(value.const))
            except (ValueError, OverflowError):
                pass
        truth = value.truth() if kind is bool else None
        return Value(
            value.spread, value.origin, UNKNOWN if truth is None else truth, path=value.path, via=value.via
        )

    return convert


def _len(_run: Run, call: Call) -> Value:
    value = call.args[0] if call.args else ANY
    if isinstance(value.thing, Items) and value.thing.is_whole:
        return Value(const=len(value.thing.values), spread=value.spread, origin=value.origin)
    if value.is_known and isinstance(value.const, (str, tuple, list, range)):
        return Value(value.spread, value.origin, len(value.const))
    # How much a batch or a list holds is the same everywhere, unless it is a share of this rank's.
    if "share" in value.origin or "files" in value.origin:
        return Value(value.spread, value.origin)
    return Value(origin=value.origin & {"data"})


def _range(_run: Run, call: Call) -> Value:
    value, length = mixed(call.args), UNKNOWN
    if all(isinstance(one.const, int) for one in call.args) and call.args:
        try:
            length = len(range(*(one.const for one in call.args)))
        except (ValueError, TypeError, OverflowError):
            length = UNKNOWN
    if value.spread and length is UNKNOWN:
        value = Value(value.spread, value.origin | {"share"})
    attrs = {
        "length": Value(value.spread, value.origin, length),
        "bounds": Value(thing=Items(list(call.args))),
    }
    return Value(value.spread, value.origin, thing=Object("range", call, attrs))


def _fold(doing: Callable[..., Any]) -> Callable[[Run, Call], Value]:
    def fold(_run: Run, call: Call) -> Value:
        value = _given(call)
        consts = [one.const for one in call.args]
        if len(consts) > 1 and all(isinstance(one, (int, float)) and abs(one) < _LARGE for one in consts):
            return Value(value.spread, value.origin, doing(*consts))
        return value

    return fold


def _join_paths(_run: Run, call: Call) -> Value:
    value, parts = _given(call), [one.const for one in call.args]
    if parts and not call.has_star and all(isinstance(one, str) for one in parts):
        return Value(value.spread, value.origin, posixpath.join(*parts))
    return value


def _local(origin: str, spread: Spread = Spread.LOCAL) -> Callable[[Run, Call], Value]:
    def differ(_run: Run, call: Call) -> Value:
        return Value(spread, _given(call).origin | {origin})

    return differ


def _on_method_object(origin: str) -> Callable[[Run, Call], Value]:
    return _local(origin)


def _isinstance(_run: Run, call: Call) -> Value:
    if len(call.args) == 2:
        thing, kind = call.args[0].thing, call.args[1].thing
        if isinstance(thing, Object) and isinstance(kind, Library):
            return Value(const=True) if thing.kind == kind.name else ANY
    return ANY


def _getattr(run: Run, call: Call) -> Value:
    from rankwise.lint.model.attributes import attribute  # noqa: PLC0415 - shared by name only

    if len(call.args) >= 2 and isinstance(call.args[1].const, str):
        owner, name = call.args[0], call.args[1].const
        if name in getattr(owner.thing, "attrs", {}) or len(call.args) == 2 or owner.path:
            return attribute(run, owner, name, call.node)
    return (
        Value(path=f"getattr.{call.args[1].const}") if len(call.args) > 1 and call.args[1].is_known else ANY
    )


def _hasattr(run: Run, call: Call) -> Value:
    if len(call.args) == 2 and call.args[1].const == "module":
        value = call.args[0]
        return (
            Value(const=True)
            if isinstance(value.thing, Object) and value.thing.kind.endswith("Parallel")
            else ANY
        )
    return ANY


def _super(run: Run, call: Call) -> Value:
    function = run.functions[-1] if run.functions else None
    if function is None or function.owner is None:
        return ANY
    receiver = call.args[1] if len(call.args) > 1 else run.selves[-1] if run.selves else ANY
    return Value(thing=Super(receiver, function.owner))


def _spawn(run: Run, call: Call) -> Value:
    """The ranks of the run are those that it starts."""
    fn, given = call.arg(0, "fn"), call.arg(1, "args")
    rest = given.thing.values if given is not None and isinstance(given.thing, Items) else []
    before = (run.guards, run.initialized)
    run.guards = ()
    if fn is not None and isinstance(fn.thing, Function):
        rank = run.role("rank")
        with run.within("contexts", "spawned"):
            run.call(
                run,
                fn,
                (Value(rank.spread, rank.origin | {"local_rank", "spawned"}, rank.const), *rest),
                {},
                call.node,
                scope=run.memo["top"],
            )
    run.guards = before[0]
    return Value(const=None)


def _launch(run: Run, call: Call) -> Value:
    fn, given = call.arg(0, "function", "fn"), call.arg(1, "args")
    rest = tuple(given.thing.values) if given is not None and isinstance(given.thing, Items) else ()
    if fn is not None and isinstance(fn.thing, Function):
        run.call(run, fn, rest, {}, call.node, scope=run.memo["top"])
    return Value(const=None)


def _copied(_run: Run, call: Call) -> Value:
    """A copy is an object of its own, alike in all that is known."""
    value = call.args[0] if call.args else ANY
    thing = value.thing
    if isinstance(thing, Object):
        return replace(value, thing=Object(thing.kind, thing.call, dict(thing.attrs)))
    if isinstance(thing, Instance):
        return replace(value, thing=Instance(thing.cls, dict(thing.attrs), thing.call))
    return value


def _sync_batchnorm(_run: Run, call: Call) -> Value:
    """From here on a forward pass in training mode compares batch statistics with all ranks."""
    value = call.args[0] if call.args else ANY
    attrs = getattr(value.thing, "attrs", None)
    if isinstance(attrs, dict) and has_buffers(value) is not False:
        attrs["__synced__"] = Value(const=True)
    return value


def _partial(_run: Run, call: Call) -> Value:
    return Value(thing=Object("functools.partial", call))


def _tensor(_run: Run, call: Call) -> Value:
    """A tensor made of a number differs as the number does; its place does not matter."""
    first = call.args[0] if call.args else ANY
    inner = mixed((first,))
    return Value(inner.spread, inner.origin, thing=Object("torch.Tensor", call))


def _made_tensor(_run: Run, call: Call) -> Value:
    return Value(thing=Object("torch.Tensor", call))


def _seed(library: str) -> Callable[[Run, Call], Value | None]:
    def seed(run: Run, call: Call) -> Value | None:
        given = _given(call)
        run.seeds[library] = given
        call.result = given
        return given if library == "torch" else None

    return seed


def _random(library: str) -> Callable[[Run, Call], Value]:
    """A random number differs between ranks if its seed does; Python's and NumPy's do unless somebody sets them."""

    def draw(run: Run, call: Call) -> Value:
        generator = call.arg(None, "generator")
        seed = generator if generator is not None else run.seeds.get(library)
        thing = Object("torch.Tensor", call) if library == "torch" else None
        if seed is None:
            # torch differs as well, but data made up on the spot stand for data read from a file.
            is_own = library != "torch" and run.is_program and "all" not in run.seeds
            return Value(Spread.LOCAL if is_own else Spread.EQUAL, frozenset({"random"}), thing=thing)
        return Value(
            Spread.LOCAL if seed.spread else Spread.EQUAL,
            frozenset({"data"}) if seed.spread else frozenset(),
            thing=thing,
        )

    return draw


def _generator(_run: Run, call: Call) -> Value:
    return Value(thing=Object("torch.Generator", call))


def _signal(run: Run, call: Call) -> Value:
    """A handler runs on the rank that gets the signal, at a moment of its own."""
    handler = call.arg(1, "handler")
    if handler is not None and isinstance(handler.thing, (Function, Bound)):
        before, run.moment = run.moment, Value(Spread.LOCAL, frozenset({"signal"}))
        with run.gathering() as items, run.within("contexts", "signal"):
            run.call(run, handler, (ANY, ANY), {}, call.node, scope=run.memo["top"])
        run.moment = before
        if items and not run.dry:
            value = Value(Spread.LOCAL, frozenset({"signal"}))
            arms = (Arm("try"), Arm("except", items))
            run.items.append(Fork(call.node, call.module, value, arms, "except", run.guards))
    return Value(const=None)


def _seeded(_run: Run, call: Call) -> Value:
    return Value(origin=_given(call).origin)


def _same_file(_run: Run, call: Call) -> Value:
    return Value(Spread.LOCAL, _given(call).origin | {"files"})


def _set(_run: Run, call: Call) -> Value:
    """The order of a set of text differs between processes (PYTHONHASHSEED)."""
    value = call.args[0] if call.args else ANY
    return Value(value.spread, value.origin, thing=Items(
        [mixed((value, *([] if not isinstance(value.thing, Items) else value.thing.keys or value.thing.values)))], kind="set", is_whole=False))  # fmt: skip


def _sorted(_run: Run, call: Call) -> Value:
    value = call.args[0] if call.args else ANY
    thing = value.thing
    if isinstance(thing, Items):
        parts = list(thing.keys if thing.keys is not None else thing.values)
        return Value(value.spread, value.origin, thing=Items(parts, kind="list", is_whole=thing.is_whole))
    return Value(value.spread, value.origin, thing=thing, path=value.path, via=value.via)


def _load_dataset(_run: Run, call: Call) -> Value:
    """A data set of Hugging Face, or a stream."""
    streams = call.arg(None, "streaming")
    kind = "datasets.IterableDataset" if streams is not None and streams.const is True else "datasets.Dataset"
    given = _given(call)
    return Value(given.spread, given.origin, thing=Object(kind, call))


def _dict(_run: Run, call: Call) -> Value | None:
    """`dict(batch_size=8, shuffle=True)`, `dict(DEFAULTS, lr=0.1)`."""
    if call.has_star or len(call.args) > 1 or not (call.args or call.kwargs):
        return None
    parts: dict[str, Value] = {}
    if call.args:
        table = call.args[0].thing
        if not isinstance(table, Items) or not table.is_whole or table.keys is None:
            return None
        if not all(isinstance(key.const, str) for key in table.keys):
            return None
        parts = {key.const: value for key, value in zip(table.keys, table.values, strict=True)}
    parts |= call.kwargs
    return Value(thing=Items(list(parts.values()), keys=[known(name) for name in parts], kind="dict"))


def _slice(_run: Run, call: Call) -> Value:
    """`rows[slice(rank * n, (rank + 1) * n)]`: this rank's own part of the data."""
    given = _given(call)
    return Value(Spread.LOCAL, given.origin | {"data"}) if given.spread else given


SPECIAL: dict[str, Callable[[Run, Call], Value | None]] = {
    "builtins.dict": _dict,
    "datasets.load_dataset": _load_dataset,
    "datasets.load.load_dataset": _load_dataset,
    "torch.distributed.get_rank": _get_rank,
    "torch.distributed.get_world_size": _get_world_size,
    "torch.distributed.get_node_local_rank": _local_rank,
    "torch.distributed.init_process_group": _init,
    "torch.distributed.init_distributed": _init,
    "deepspeed.init_distributed": _init,
    "torch.distributed.is_initialized": _is_initialized,
    "torch.distributed.is_available": lambda _run, _call: Value(const=True),
    "torch.distributed.is_torchelastic_launched": lambda _run, _call: Value(const=True),
    "accelerate.Accelerator": _makes_and_inits,
    "accelerate.PartialState": _makes_and_inits,
    "lightning.fabric.Fabric": _makes_and_inits,
    "rankwise.init": _makes_and_inits,
    "os.environ.__getitem__": _env,
    "os.environ.get": _env,
    "os.getenv": _env,
    "os.environ.pop": _pop_env,
    "os.environ.setdefault": _set_default,
    "builtins.int": _number(int),
    "builtins.float": _number(float),
    "builtins.str": _number(str),
    "builtins.bool": _number(bool),
    "builtins.len": _len,
    "builtins.slice": _slice,
    "builtins.range": _range,
    "builtins.min": _fold(min),
    "builtins.max": _fold(max),
    "os.path.join": _join_paths,
    "builtins.isinstance": _isinstance,
    "builtins.getattr": _getattr,
    "builtins.hasattr": _hasattr,
    "builtins.super": _super,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.sorted": _sorted,
    "builtins.input": _local("input"),
    "copy.deepcopy": _copied,
    "copy.copy": _copied,
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": _sync_batchnorm,
    "functools.partial": _partial,
    "torch.multiprocessing.spawn": _spawn,
    "accelerate.notebook_launcher": _launch,
    "accelerate.launchers.notebook_launcher": _launch,
    "accelerate.debug_launcher": _launch,
    "torch.tensor": _tensor,
    "torch.as_tensor": _tensor,
    "torch.FloatTensor": _tensor,
    "torch.IntTensor": _tensor,
    "torch.LongTensor": _tensor,
    **dict.fromkeys(
        ("torch.zeros", "torch.ones", "torch.empty", "torch.full", "torch.arange", "torch.eye"),
        _made_tensor,
    ),
    **dict.fromkeys(("torch.rand", "torch.randn", "torch.randint", "torch.normal", "torch.randperm", "torch.bernoulli"), _random("torch")),
    **dict.fromkeys(("random.random", "random.randint", "random.uniform", "random.choice", "random.gauss", "random.randrange"), _random("random")),
    **dict.fromkeys(("numpy.random.rand", "numpy.random.randn", "numpy.random.randint", "numpy.random.random", "numpy.random.uniform"), _random("numpy")),
    **dict.fromkeys(("torch.manual_seed", "torch.cuda.manual_seed", "torch.random.manual_seed"), _seed("torch")),
    "random.seed": _seed("random"),
    "numpy.random.seed": _seed("numpy"),
    **dict.fromkeys(("accelerate.utils.set_seed", "lightning.pytorch.seed_everything", "transformers.set_seed", "lightning.fabric.seed_everything",
                     "lightning.seed_everything", "pytorch_lightning.seed_everything"), _seed("all")),
    "torch.Generator": _generator,
    "signal.signal": _signal,
    **dict.fromkeys(("torch.device",), _seeded),
    **dict.fromkeys(
        ("time.time", "time.monotonic", "time.perf_counter", "time.process_time", "datetime.datetime.now", "datetime.datetime.utcnow",
         "datetime.datetime.today", "time.strftime", "time.ctime", "datetime.date.today", "time.time_ns", "timeit.default_timer"),
        _local("time"),
    ),
    **dict.fromkeys(("uuid.uuid4", "uuid.uuid1", "secrets.token_hex", "tempfile.mkdtemp", "tempfile.gettempdir", "os.getpid", "os.urandom"), _local("own")),
    **dict.fromkeys(("socket.gethostname", "platform.node", "os.uname", "socket.gethostbyname"), _local("host")),
    **dict.fromkeys(
        ("os.path.exists", "os.path.isfile", "os.path.isdir", "os.path.getmtime", "os.path.getsize", "shutil.disk_usage", "os.access", "os.path.islink"),
        _local("exists"),
    ),
    **dict.fromkeys(("os.listdir", "glob.glob", "glob.iglob", "os.scandir", "os.walk"), _same_file),
    **dict.fromkeys(
        ("torch.cuda.memory_allocated", "torch.cuda.max_memory_allocated", "torch.cuda.mem_get_info", "torch.cuda.memory_reserved", "psutil.virtual_memory"),
        _local("memory"),
    ),
}  # fmt: skip
