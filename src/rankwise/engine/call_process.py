"""Call a function that another process has pickled, and leave what it returned, or raised, in a file.

What runs in each rank of ``rankwise.launch``. A folder that is named by RANKWISE_CALL holds the file ``payload``: where
the caller stands (folder, sys.path, sys.argv), and the function with its arguments. Beside it this rank writes
``value.RANK.RESTART`` or ``error.RANK.RESTART``. It needs cloudpickle, which the caller's sys.path has.
"""

import atexit
import importlib
import io
import linecache
import os
import pickle
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

_SIGINT_CODE = 130


def main() -> int:
    """Be where the caller is, call, and leave the outcome; return the exit code."""
    folder = Path(os.environ.pop("RANKWISE_CALL"))
    name = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    try:
        function, args = _load(folder / "payload")
        value = function(*args)
        _write(folder / f"value.{name}", lambda file: _dump_value(value, file))
    except KeyboardInterrupt:
        # Asked for at the terminal, and told there once, by the caller.
        return _SIGINT_CODE
    except SystemExit as leave:
        if leave.code not in {None, 0}:
            raise
        error = RuntimeError("sys.exit(0) was called before the function had returned")
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
        function, args, needs_rank = pickle.load(file)  # noqa: S301 - the same
    names = getattr(function, "__globals__", None)
    if names is not None and getattr(function, "__module__", "") == "__main__":
        # So that plain pickle finds the caller's own classes: torch.save, data-loading workers.
        own = vars(sys.modules["__main__"])
        own.update({key: value for key, value in names.items() if not key.startswith("__")})
    return function, (int(os.environ["RANK"]), *args) if needs_rank else args


def _dump_value(value: Any, file: Any) -> None:
    try:
        _make_pickler(file).dump(value)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"what the function returned can't be sent back: {kind}: {type(error).__name__}: {error}"
        ) from error


def _make_pickler(file: Any) -> Any:
    cloudpickle: Any = importlib.import_module("cloudpickle")
    torch: Any = sys.modules.get("torch")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Takes tensors to the CPU: the caller may have no such device, or want nothing there."""

        def reducer_override(self, obj: Any) -> Any:
            if torch is None or not isinstance(obj, torch.Tensor) or obj.device.type in {"cpu", "meta"}:
                return super().reducer_override(obj)
            if isinstance(obj, torch.nn.Parameter):
                return torch.nn.Parameter, (obj.detach().cpu(), obj.requires_grad)
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)


def _write(path: Path, dump: Any) -> None:
    """Write a file that is whole, or is not there."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        dump(file)
    part.replace(path)


def _leave_error(error: BaseException, raised: BaseException, folder: Path, name: str) -> None:
    """Leave the error for the caller, and for the recorder, without the frames of this file.

    Nothing is printed: the caller raises the first rank's error, and the others' are its echo.
    """
    trace = raised.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if trace is not None or error is not raised:
        error.__traceback__ = trace
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.last_exc = error  # type: ignore[attr-defined,unused-ignore] # Python 3.12
    _write(folder / f"error.{name}", lambda file: pickle.dump((_pickle_error(error), text), file))


def _pickle_error(error: BaseException) -> bytes:
    """Return the error as the caller can have it; nothing if it can't be made anew from its pickle."""
    file = io.BytesIO()
    try:
        _make_pickler(file).dump(error)
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
    end_threads()
    run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # closed by the function
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
