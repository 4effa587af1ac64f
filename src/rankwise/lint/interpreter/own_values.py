"""What differs between processes by itself, and what is done against that: random numbers and seeds, clocks, files, memory; tensors and data made of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.values import ANY, NUMBER, UNKNOWN, Object, Spread, Value, mixed
from rankwise.lint.library.constructor_table import DRAWN, FACTORIES, OF_VALUES, SEEDS_ALL, TENSOR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.lint.interpreter.run import Run
    from rankwise.lint.interpreter.values import Call


def _local(origin: str, thing: object = None) -> Callable[[Run, Call], Value]:
    def differ(_run: Run, call: Call) -> Value:
        return Value(Spread.LOCAL, call.given.origin | {origin}, thing=thing)

    return differ


#: What of a format tells more than the hour.
_FINE = re.compile(r"%[-_]?[MSfTXcsRr]")
#: Fields of a moment that ranks which ask at almost the same time share.
COARSE = frozenset({"year", "month", "day", "hour", "tm_year", "tm_mon", "tm_mday", "tm_yday", "tm_wday", "tm_hour"})


def clock_text(_run: Run, call: Call, _kinds: Sequence[str] = ()) -> Value | None:
    """`now.strftime("%Y-%m-%d")` and `time.strftime(...)`: the hour is the same for all ranks, the second is not."""
    if "time" not in call.receiver.origin and call.name != "time.strftime":
        return None
    form = call.args[0].const if call.args else UNKNOWN
    is_coarse = isinstance(form, str) and not _FINE.search(form)
    return ANY if is_coarse else Value(Spread.LOCAL, call.given.origin | {"time"})


def _same_file(_run: Run, call: Call) -> Value:
    return Value(Spread.LOCAL, call.given.origin | {"files", "unsorted"})


def _seed(library: str) -> Callable[[Run, Call], Value | None]:
    def seed(run: Run, call: Call) -> Value | None:
        given = call.given
        run.seeds[library] = given
        call.result = given
        return given if library == "torch" else None

    return seed


def _random(library: str) -> Callable[[Run, Call], Value]:
    """A random number differs between ranks if its seed does; Python's and NumPy's do unless somebody sets them."""

    def draw(run: Run, call: Call) -> Value:
        generator = call.arg(None, "generator")
        seed = generator if generator is not None else run.seeds.get(library)
        thing = Object(TENSOR, call) if library == "torch" else None
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


def _seeded(_run: Run, call: Call) -> Value:
    return Value(origin=call.given.origin)


def _tensor(_run: Run, call: Call) -> Value:
    """A tensor made of a number differs as the number does; its place does not matter, nor does its size."""
    inner = mixed(call.args[:1]) if call.name in OF_VALUES else ANY
    return Value(inner.spread, inner.origin, thing=Object(TENSOR, call))


def _loaded(_run: Run, call: Call) -> Value:
    """What a file holds differs as the file does; where its tensors are put (map_location) does not matter."""
    file = call.args[0] if call.args else call.arg(None, "f") or call.arg(None, "filename") or ANY
    inner = mixed((file,))
    if inner.spread is Spread.RANK:  # each rank has a file of its own
        return Value(Spread.LOCAL, inner.origin | {"data", "loaded"})
    return Value(inner.spread, inner.origin | {"loaded"})


def _load_dataset(_run: Run, call: Call) -> Value:
    """A data set of Hugging Face, or a stream."""
    streams = call.arg(None, "streaming")
    kind = "datasets.IterableDataset" if streams is not None and streams.const is True else "datasets.Dataset"
    given = call.given
    return Value(given.spread, given.origin, thing=Object(kind, call))


OWN: dict[str, Callable[[Run, Call], Value | None]] = {
    "datasets.load_dataset": _load_dataset,
    "datasets.load.load_dataset": _load_dataset,
    "builtins.input": _local("input"),
    "torch.cuda.device_count": lambda *_: Value(thing=NUMBER),
    **dict.fromkeys(("torch.load", "torch.jit.load", "safetensors.torch.load_file"), _loaded),
    **dict.fromkeys(FACTORIES, _tensor),
    **dict.fromkeys(DRAWN, _random("torch")),
    **dict.fromkeys(("random.random", "random.randint", "random.uniform", "random.choice", "random.gauss", "random.randrange"), _random("random")),
    **dict.fromkeys(("numpy.random.rand", "numpy.random.randn", "numpy.random.randint", "numpy.random.random", "numpy.random.uniform"), _random("numpy")),
    **dict.fromkeys(("torch.manual_seed", "torch.cuda.manual_seed", "torch.random.manual_seed"), _seed("torch")),
    "random.seed": _seed("random"),
    "numpy.random.seed": _seed("numpy"),
    **dict.fromkeys(SEEDS_ALL, _seed("all")),
    "torch.Generator": _generator,
    **dict.fromkeys(("torch.device",), _seeded),
    **dict.fromkeys(
        ("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "time.ctime"),
        _local("time"),
    ),
    "time.strftime": clock_text,
    **dict.fromkeys(
        ("time.time", "time.monotonic", "time.perf_counter", "time.process_time", "time.time_ns", "timeit.default_timer"),
        _local("time", NUMBER),
    ),
    **dict.fromkeys(("uuid.uuid4", "uuid.uuid1", "secrets.token_hex", "tempfile.mkdtemp", "os.getpid", "os.urandom"), _local("own")),
    **dict.fromkeys(("tempfile.gettempdir", "socket.gethostname", "platform.node", "os.uname", "socket.gethostbyname"), _local("host")),
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
