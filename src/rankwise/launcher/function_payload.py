"""A function and its arguments on their way to the ranks, and what came of them on its way back."""

# mypy: disallow-any-explicit=False
# A pickler takes anything.

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import io
import linecache
import pickle
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from rankwise.base.errors import RankFailedError, UsageError
from rankwise.engine.call_process import make_pickler_class

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

#: Words that stand where a function builds DDP, FSDP or an optimizer: each of these makes torch import its compiler.
_NEEDS_COMPILER = re.compile(
    rb"\b(DistributedDataParallel|DDP|FullyShardedDataParallel|FSDP|fully_shard|ZeroRedundancyOptimizer"
    rb"|torch\.optim|optim|Adam|AdamW|SGD|torch\.compile|torch\._dynamo|lightning|transformers|accelerate)\b"
)
_COMPILER = "torch._dynamo"
#: Which modules are pickled by value is cloudpickle's own global state.
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What the ranks are given.

    Attributes:
        data: Three pickles, one after the other: where the caller stands; the function with its arguments; what these
            bring from the caller's ``__main__``.
        imports: What a warm server imports for it.
    """

    data: bytes
    imports: tuple[str, ...]


def make_payload(function: object, args: tuple[object, ...], *, pass_rank: bool = False) -> Payload:
    """Pickle a function with its arguments, so that the ranks need neither the caller's script nor its notebook.

    What an importable module defines goes by its name; all else by value: what was typed in, a script's own functions,
    lambdas and closures.

    Args:
        function: What each rank calls.
        args: Its arguments.
        pass_rank: Whether its first argument is the rank.

    Raises:
        UsageError: Something in it can't be pickled, or the caller's folder is gone.
    """
    inner = unwrap(function)
    try:
        folder = str(Path.cwd())
    except OSError as error:
        raise UsageError(
            f"the current folder of this process is gone: {error}", hint="os.chdir to one that exists"
        ) from error
    place = {
        "folder": folder, "path": list(sys.path), "argv": list(sys.argv), "lines": _find_typed_lines(inner),
    }  # fmt: skip
    modules = {getattr(inner, "__module__", ""), *(type(arg).__module__ for arg in args)}
    try:
        with _by_value([name for name in modules if isinstance(name, str)]):
            called = _dump(function, args, pass_rank=pass_rank)
    except Exception as error:
        # Any class may fail in its own way.
        what = _find_unpicklable(function, args) or f"{name_function(function)} or its arguments"
        raise UsageError(
            f"{what} can't be sent to the ranks: {type(error).__name__}: {error}",
            hint="open files, locks, process groups, handles of devices … inside the function, not before it",
        ) from error
    text = called + _read_source(inner)
    needs_compiler = _COMPILER in sys.modules or _NEEDS_COMPILER.search(text)
    imports = ("torch", *([_COMPILER] if needs_compiler else []), "cloudpickle")
    return Payload(data=pickle.dumps(place) + called, imports=imports)


def _dump(function: object, args: tuple[object, ...], *, pass_rank: bool) -> bytes:
    """Pickle the call, and with it the list of what stands in the caller's ``__main__``."""
    base: Any = make_pickler_class()
    brought: list[object] = []

    class Pickler(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
                brought.append(obj)
            return super().reducer_override(obj)

    file = io.BytesIO()
    pickler = Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump((function, args, pass_rank))
    pickler.dump(list(brought))  # of one memory with the first, so the very same objects
    return file.getvalue()


def _find_unpicklable(function: object, args: tuple[object, ...]) -> str:
    """Return what it is that can't be pickled, and where it stands; empty if it is none of what one can name."""
    parts = [(f"argument {number} of {name_function(function)}", arg) for number, arg in enumerate(args, 1)]
    seen: set[int] = set()
    parts += _list_parts(function)
    while parts:
        name, part = parts.pop(0)
        if id(part) in seen or _can_pickle(part):
            continue
        seen.add(id(part))
        inner = _list_parts(part)
        if all(_can_pickle(one) for _, one in inner):
            return f"{name} (of type {type(part).__name__})"
        parts = inner
    return ""


def _list_parts(function: object) -> list[tuple[str, object]]:
    """Return what a function takes along, each with its name."""
    inner, name = unwrap(function), name_function(function)
    parts: list[tuple[str, object]] = []
    if isinstance(function, functools.partial):
        parts += [(f"argument {number} of the partial", arg) for number, arg in enumerate(function.args, 1)]
        parts += [(f"argument {key}= of the partial", arg) for key, arg in function.keywords.items()]
    if not isinstance(inner, FunctionType):
        return parts
    for key, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            parts.append((f"{key!r} around {name}", cell.cell_contents))
    names = inner.__globals__
    parts += [(f"the global {key!r} in {name}", names[key]) for key in inner.__code__.co_names if key in names]
    return parts


def _can_pickle(thing: object) -> bool:
    try:
        make_pickler_class()(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def unwrap(function: object) -> object:
    """Return the function inside partials, decorators and bound methods."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif callable(function) and hasattr(function, "__wrapped__"):
            function = inspect.unwrap(function)
        else:
            return function


def name_function(function: object) -> str:
    """Return how a person calls a function."""
    inner = unwrap(function)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def read_value(path: Path, *, rank: int, name: str) -> object:
    """Return what a rank has left for us in a folder that nobody else can write to.

    Raises:
        RankFailedError: It can't be made anew here.
    """
    try:
        with path.open("rb") as file:
            return pickle.load(file)  # noqa: S301 - written by our own rank
    except Exception as error:
        raise RankFailedError(
            f"what {name} returned can't be loaded here: {type(error).__name__}: {error}", rank=rank,
            hint="return plain numbers, lists, dicts and tensors, or import here what its classes need",
        ) from error  # fmt: skip


def read_error(path: Path) -> tuple[BaseException | None, str]:
    """Return the exception that a rank has left for us, None if it can't be made anew here, and its traceback."""
    try:
        with path.open("rb") as file:
            pickled, text = cast("tuple[bytes, str]", pickle.load(file))  # noqa: S301 - written by our own rank
    except FileNotFoundError:
        return None, ""
    error: object = None
    # Its class may need what only the ranks have; the text is there in any case.
    with contextlib.suppress(Exception):
        error = pickle.loads(pickled)  # noqa: S301 - written by our own rank
    return (error if isinstance(error, BaseException) else None), text


@contextlib.contextmanager
def _by_value(names: list[str]) -> Iterator[None]:
    """Have cloudpickle take along what these modules define, where the ranks could not import them."""
    with _lock, contextlib.ExitStack() as stack:
        known = cloudpickle.list_registry_pickle_by_value()
        for name in names:
            module = sys.modules.get(name)
            if module is None or name in known or name == "__main__" or _is_importable(module):
                continue
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _is_importable(module: ModuleType) -> bool:
    """Whether a fresh Python with our sys.path finds this module, or its package, and from the same file."""
    top, _, rest = module.__name__.partition(".")
    if top in sys.builtin_module_names:
        return True
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(top, None)
        except (AttributeError, ImportError, ValueError):
            continue
        if isinstance(spec, importlib.machinery.ModuleSpec):
            # A test or a notebook may have loaded one of the same name from elsewhere.
            return bool(rest) or spec.origin in {getattr(module, "__file__", None), "frozen", "built-in"}
    return False


def _find_typed_lines(function: object) -> dict[str, list[str]]:
    """Return the source of a function that stands in no file: without it a traceback in a rank has no lines."""
    code = getattr(function, "__code__", None)
    name = getattr(code, "co_filename", "")
    if not name or Path(name).exists():
        return {}
    lines = linecache.getlines(name)
    return {name: lines} if lines else {}


def _read_source(function: object) -> bytes:
    """Return the text of the module that a function stands in; nothing if there is no such file."""
    try:
        return Path(inspect.getsourcefile(function) or "").read_bytes()  # type: ignore[arg-type]
    except (OSError, TypeError):
        return b""
