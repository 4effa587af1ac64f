"""A Python that has imported torch and stands before the first line of its script: `python_forks.py` has it forked for each test.

What a fork runs it takes from its order: by then it is a process as a started one would be, by the means of the warm server.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import termios
import time
from pathlib import Path
from typing import Any

#: What an interpreter, its libraries and torch read before a script's first line; what is for NCCL is read when a group is made.
_READ_BEFORE = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "OMP_", "MKL_", "TORCH_", "PYTORCH_")
_PR_SET_PDEATHSIG = 1
_HERE = Path(__file__).parent
_WARM = _HERE.parents[1] / "src" / "rankwise" / "warm"


def _load(name: str, folder: Path = _WARM) -> Any:
    spec = importlib.util.spec_from_file_location(f"rankwise.warm.{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(settings: dict[str, Any]) -> None:
    """Import, and fork for each order; returns in a fork, and never here."""
    become_rank, freezing, command_line = (_load(name) for name in ("become_rank", "freezing", "command_line"))
    line, name = command_line.CommandLine(), become_rank.get_name()
    begin_env = dict(os.environ)
    gc.disable()
    for module in settings["modules"]:
        importlib.import_module(module)
    if settings["helpers_fd"] is not None:
        _load("forked_helper", _HERE).replace_popen(sys.modules["rankwise.launcher.helper"], settings["helpers_fd"])
    freezing.freeze(freezing.list_libraries())
    gc.enable()
    set_by_imports = {key: value for key, value in os.environ.items() if begin_env.get(key) != value}
    listener = socket.socket(fileno=settings["fd"])
    clients: dict[int, socket.socket] = {}
    ends: dict[int, tuple[int, int]] = {}
    while True:
        ready = {fd for fd, _ in _wait((listener.fileno(), *clients), ends)}
        for pidfd, (_, end) in ends.items():
            if end in ready and pidfd not in ready:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # who has asked for it is gone
        if listener.fileno() in ready:
            client = listener.accept()[0]
            clients[client.fileno()] = client
            client.send(b"ready" if line.can_change else b"cold")
        for fd in [fd for fd in (*ends, *clients) if fd in ready]:
            if fd in ends:
                pid, end = ends.pop(fd)
                _, status, usage = os.wait4(pid, 0)
                _answer(end, status, int((usage.ru_utime + usage.ru_stime) * 1000))
                os.close(fd)
                os.close(end)
                continue
            data, fds = _receive(clients[fd])
            if not data:
                clients.pop(fd).close()
                if not clients and listener.fileno() not in ready:
                    os._exit(0)  # the tests are over
                continue
            end, *fds = fds
            pid = os.fork()
            if not pid:
                for one in (listener.detach(), *(client.detach() for client in clients.values()), end, *ends, *(end for _, end in ends.values())):  # fmt: skip
                    os.close(one)
                order = json.loads(data)
                _enter(order.get("host_pid"))
                if order.get("forks_ranks"):
                    order, fds = _fork_ranks(order, fds, become_rank, begin_env)
                if order["own_session"]:
                    os.setsid()
                become_rank.place(fds, order["fds"])
                if order["takes_terminal"]:
                    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
                become_rank.renew_streams()
                become_rank.set_name(name)
                os.environ.clear()
                os.environ.update({**set_by_imports, **order["env"]})
                os.chdir(order["folder"])
                become_rank.renew_identity()
                if order["program"] == "rankwise.watch":
                    order["program"], *order["args"] = _watch(order["args"])
                line.change(order["program"], order["args"])
                become_rank.show(os.environb, sys.orig_argv)
                return
            for one in fds:
                os.close(one)
            ends[os.pidfd_open(pid)] = (pid, end)
            _answer(end, pid)


def _fork_ranks(
    order: dict[str, Any], fds: list[int], become_rank: Any, begin_env: dict[str, str]
) -> tuple[dict[str, Any], list[int]]:
    """Leave a process behind that forks torchrun's ranks, and ends with it; return torchrun's order in torchrun, and a rank's in each rank.

    Torchrun adopts them, so they are its children, as those that it starts itself.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    become_rank.adopt_orphans()
    if os.fork():
        theirs.close()
        return {**order, "args": [str(ours.detach()), *order["args"]]}, fds
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    os.setsid()  # Ctrl-C at torchrun is not ours
    for one in (ours.detach(), *fds):
        os.close(one)
    while True:
        data, fds, _, _ = socket.recv_fds(theirs, 1 << 20, 16)
        if not data:
            os._exit(0)
        order = json.loads(data)
        differing = {name for name, _ in {*order["env"].items()} ^ {*begin_env.items()}} - {"PYTHONPATH"}
        is_cold = any(one.startswith(_READ_BEFORE) and not one.startswith("TORCH_NCCL_") for one in differing)
        if is_cold or "PYTHONPATH" in order["env"]:
            theirs.send(b"cold")
        elif not (middle := os.fork()):
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.0001)
            theirs.send(b"%d" % os.getpid())  # not before: torchrun may look at once whether its child lives
            theirs.close()
            return order, fds
        else:
            os.waitpid(middle, 0)
        for one in fds:
            os.close(one)


def _watch(words: list[str]) -> list[str]:
    """Do what `python -m rankwise.watch` does; return the script, and its arguments, that it executes in its place.

    To execute it would mean an import of torch. Tests whose torchrun is a started process have that.
    """

    class Executed(BaseException):
        pass

    def execute(_: str, *command: Any) -> None:
        raise Executed(*command)

    known, plain, argv = set(sys.modules), os.execve, sys.orig_argv[:]
    sys.orig_argv[:] = [sys.executable, "-u", "-m", "rankwise.watch", *words]
    os.execve = execute  # type: ignore[assignment]
    try:
        os._exit(importlib.import_module("rankwise.watch").main(words))
    except Executed as executed:
        command, env = executed.args
    os.execve, sys.orig_argv[:] = plain, argv
    for name in set(sys.modules) - known:
        if name.startswith("rankwise"):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(env)
    return list(command[2:])


def _enter(pid: int | None) -> None:
    """Be on the host of a process: in its namespaces."""
    for kind in ("net", "uts", "mnt") if pid is not None else ():
        with Path(f"/proc/{pid}/ns/{kind}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")


def _receive(client: socket.socket) -> tuple[bytes, list[int]]:
    """Return an order and its descriptors; nothing from one that is gone."""
    with contextlib.suppress(ConnectionError):
        return socket.recv_fds(client, 1 << 20, 16)[:2]
    return b"", []


def _answer(end: int, *numbers: int) -> None:
    """Tell whoever has asked for a fork, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(end, b"".join(b"%-16d" % number for number in numbers))


def _wait(readable: tuple[int, ...], others: dict[int, tuple[int, int]]) -> list[tuple[int, int]]:
    poll = select.poll()
    for fd in (*readable, *others):
        poll.register(fd, select.POLLIN)
    for _, end in others.values():
        poll.register(end, 0)  # tells that nobody reads it
    return poll.poll()


_settings = os.environ.pop("TESTS_FORKS", None)
sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != _HERE]
sys.path_importer_cache.pop(str(_HERE), None)
sys.modules.pop("sitecustomize", None)
if _settings is not None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the tests is not ours
    try:
        _serve(json.loads(_settings))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if "RANKWISE_RANK" in os.environ:
            _hook = os.environ["PYTHONPATH"].partition(os.pathsep)[0]
            exec(compile(Path(_hook, "sitecustomize.py").read_text(), f"{_hook}/sitecustomize.py", "exec"), {"__name__": "sitecustomize", "__file__": f"{_hook}/sitecustomize.py"})  # fmt: skip
    except ImportError as _error:
        if _error.name != "sitecustomize":
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    except BaseException:  # noqa: BLE001 - site.py would print a line and go on
        sys.excepthook(*sys.exc_info())
        os._exit(1)
raise ImportError("done", name="sitecustomize")
