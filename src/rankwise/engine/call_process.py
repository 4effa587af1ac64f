"""Call a function that another process has pickled, and leave what it returned, or raised, in a file.

What runs in each rank of ``rankwise.launch``. A folder that is named by RANKWISE_CALL holds the file ``payload``: where
the caller stands (folder, sys.path, sys.argv), and the function with its arguments. Beside it this rank writes
``begun.RANK.RESTART`` when it calls, then ``value.RANK.RESTART`` or ``error.RANK.RESTART``. It needs cloudpickle, which
the caller's sys.path has.
"""

import atexit
import builtins
import errno
import importlib
import io
import linecache
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

_SIGINT_CODE = 130
#: What a write says when a disk, or a share of it, is full.
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}
#: Tells rankwise.launch in this process that a module is being imported for the payload.
_LOADING = "RANKWISE_LOADING"


def main() -> int:
    """Be where the caller is, call, and leave the outcome; return the exit code."""
    folder = Path(os.environ.pop("RANKWISE_CALL"))
    name = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    try:
        if hasattr(signal, "pthread_sigmask"):
            # A warm start keeps it from us so far, so that Ctrl-C prints no traceback of our own start.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.environ[_LOADING] = str(os.getpid())
        function, args = _load(folder / "payload")
        del os.environ[_LOADING]
        (folder / f"begun.{name}").touch()
        value = function(*args)
        _write(folder / f"value.{name}", lambda file: _dump_value(value, file))
    except KeyboardInterrupt:
        # Asked for at the terminal, and told there once, by the caller.
        return _SIGINT_CODE
    except SystemExit as leave:
        if leave.code not in {None, 0}:
            raise
        error = RuntimeError("sys.exit(0) was called before the function returned")
        _leave_error(error, leave, folder, name)
        return 1
    except BaseException as raised:  # noqa: BLE001 - raised again, in the caller
        _leave_error(raised, raised, folder, name)
        return 1
    return 0


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        place = pickle.load(file)  # noqa: S301 - the caller's, in a folder of its own
        try:
            os.chdir(place["folder"])
        except OSError as error:
            sys.stderr.write(f"rankwise: the caller's folder can't be entered: {error}\n")
        sys.path[:], sys.argv[:] = place["path"], place["argv"]
        for name, lines in place["lines"].items():
            # A cell or a line typed in: it is in no file, and a traceback should show it all the same.
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        main = _renew_main()
        loader = pickle.Unpickler(file)  # noqa: S301 - the same
        function, args, needs_rank = loader.load()
        for one in loader.load():
            # So that plain pickle finds the caller's own classes: torch.save, data-loading workers.
            names = getattr(one, "__globals__", {})
            vars(main).update({key: value for key, value in names.items() if not key.startswith("__")})
            if "." not in one.__qualname__:
                setattr(main, one.__qualname__, one)
    return function, (int(os.environ["RANK"]), *args) if needs_rank else args


def _renew_main() -> types.ModuleType:
    """Put an empty ``__main__`` in our place: nothing of ours is the caller's, and nothing of the caller's ours.

    It has no ``__file__``, so processes that are spawned from here do not run this file again.
    """
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["rankwise.engine.call_process"] = sys.modules["__main__"]
    sys.modules["__main__"] = main
    return main


def _dump_value(value: Any, file: Any) -> None:
    try:
        make_pickler_class()(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"what the function returned can't be sent back: {kind}: {type(error).__name__}: {error}"
        ) from None


def make_pickler_class() -> Any:
    """Return cloudpickle's pickler, which takes tensors from a device to the CPU."""
    base: Any = make_code_pickler_class()
    torch: Any = sys.modules.get("torch")
    spread: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())

    class Pickler(base):  # type: ignore[misc]
        """Takes tensors to the CPU: the caller may have no such device, or want nothing there."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, spread):
                raise TypeError("a DTensor is spread over several ranks: return x.full_tensor() or x.to_local()")
            if torch is None or not isinstance(obj, torch.Tensor) or obj.device.type in {"cpu", "meta"}:
                return super().reducer_override(obj)
            if isinstance(obj, torch.nn.Parameter):
                return torch.nn.Parameter, (obj.detach().cpu(), obj.requires_grad)
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return Pickler


def make_code_pickler_class() -> Any:
    """Return cloudpickle's pickler, with which code keeps the name of its file.

    Since 3.1.3 it puts "<dynamic-code>" in its place, and a traceback would have neither the file nor its lines.
    """
    base: Any = importlib.import_module("cloudpickle").Pickler
    reduce = base.dispatch_table[types.CodeType]

    def reduce_code(code: types.CodeType) -> tuple[Any, tuple[Any, ...]]:
        make, values = reduce(code)
        # Of what a code object is made of, the file is the first string in all versions of Python.
        place = next(number for number, value in enumerate(values) if isinstance(value, str))
        return make, (*values[:place], code.co_filename, *values[place + 1 :])

    class Pickler(base):  # type: ignore[misc]
        """Read from the class, at the pickler's making."""

        dispatch_table = base.dispatch_table.new_child({types.CodeType: reduce_code})

    return Pickler


def _write(path: Path, dump: Any) -> None:
    """Write a file that is whole, or is not there."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            dump(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno not in _NO_ROOM:
            raise
        text = f"{error.strerror}: no space for what the function returned; set TMPDIR to a folder that has some"
        raise OSError(error.errno, text, str(path.parent)) from None
    part.replace(path)


def _leave_error(error: BaseException, raised: BaseException, folder: Path, name: str) -> None:
    """Leave the error for the caller, and for the recorder, without the frames of this file.

    Nothing is printed: the caller raises the first rank's error, and the others' are its echo.
    """
    trace = raised.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.last_exc = error  # type: ignore[attr-defined,unused-ignore] # Python 3.12
    try:
        _write(folder / f"error.{name}", lambda file: pickle.dump((_pickle_error(error), text), file))
    except OSError:
        return  # the recorder has the text, in memory


def _pickle_error(error: BaseException) -> bytes:
    """Return the error as the caller can have it; nothing if it can't be made anew from its pickle."""
    file = io.BytesIO()
    try:
        make_pickler_class()(file, protocol=pickle.HIGHEST_PROTOCOL).dump(error)
        pickle.loads(file.getvalue())  # noqa: S301 - written here
    except Exception:  # noqa: BLE001 - any class may have a pickle that fails in its own way
        return b""
    return file.getvalue()


def _leave(code: int) -> None:
    """End this process as multiprocessing ends its own: threads, exit functions, streams, and no more.

    To take an interpreter with torch in it apart lasts 0.2 s, and may abort it (pytorch#190489).
    """
    end_threads: Any = getattr(threading, "_shutdown", None)
    run_exit_functions: Any = getattr(atexit, "_run_exitfuncs", None)
    if end_threads is None or run_exit_functions is None:
        sys.exit(code)
    try:
        end_threads()
        run_exit_functions()
    except KeyboardInterrupt:
        os._exit(_SIGINT_CODE)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # closed by the function
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
