"""Runs on a warm server that outlives them: found by its key, asked for a supervisor, started where there is none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base import __version__
from rankwise.base.environ import environ, get, is_on, read_float
from rankwise.base.errors import UsageError
from rankwise.base.os_calls import (
    IS_LINUX,
    SUPERVISOR_NAME,
    die_with_peer,
    list_limits,
    make_memory_file,
    wait_ready,
)
from rankwise.launcher.process_facts import read_process_facts, read_tracer
from rankwise.launcher.rank_command import build_argv, build_shared_env, hook_path_env
from rankwise.launcher.supervisor_protocol import make_supervisor_socket
from rankwise.warm.command_line import NAME
from rankwise.warm.plan import LATCHED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.launcher.console import Console
    from rankwise.launcher.signals import Signals
    from rankwise.launcher.spec import LaunchSpec
    from rankwise.launcher.warm_start import Host
    from rankwise.warm.plan import Plan

#: The compiler is a second of import, and as many modules again as torch has for each rank to take apart at its end: a
#: server has it, and what comes with it, or has not.
_COMPILER = "torch._dynamo"
_WITH_COMPILER = (
    _COMPILER,
    "torch.utils.data",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
)
#: What Python and the C library read at their start, beside what torch and its libraries do.
_LATCHED = (
    *LATCHED,
    "PYTHON",
    "LC_",
    "LANG",
    "LANGUAGE",
    "TZ",
    "HOME",
    "MALLOC_",
    "GLIBC_",
    "GCONV_",
    "LOCPATH",
    "HOSTALIASES",
    "RES_OPTIONS",
    # What the .pth files of packages read that act on each Python at its start.
    "COVERAGE_",
    "COV_CORE_",
    "SETUPTOOLS_USE_",
    "DD_",
)
_FOLDER, _IDLE, _MOST = "RANKWISE_RESIDENT_FOLDER", "RANKWISE_RESIDENT_IDLE", "RANKWISE_RESIDENT_MOST"
_IDLE_S = 900.0
#: Of so many servers the one that was used longest ago goes for a new one.
_USUAL_MOST = 4
#: A server forks in milliseconds; it may have to import what the last runs did not ask for.
_ANSWER_S = 30.0
#: Nobody imports torch for so long, unless a disk hangs.
_READY_S = 900.0
_LONGEST_DATAGRAM = 60_000
#: The size of a thread's stack is read at the start, so it is in the key.
_NOT_GIVEN = "RLIMIT_STACK"
_DEAF_TO = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A resident server, as it describes itself.

    Attributes:
        begun: When it was started, as time.time() has it.
        served: Runs so far; ``running``: those that have not ended.
        memory_bytes: Its own part of the memory; what ranks share with it counts in parts.
        asked: What was preloaded because the user wished it.
    """

    pid: int
    begun: float
    served: int
    running: int
    python: str
    torch: str
    asked: tuple[str, ...]
    memory_bytes: int
    key: str


def is_wanted(console: Console, *, flag: bool | None) -> bool:
    """Tell whether runs are to be forked off a resident server.

    Args:
        console: Told where the variable does not count.
        flag: What the command line says; None: nothing.
    """
    asked = get("RANKWISE_RESIDENT").strip().lower()
    if not IS_LINUX or flag is not None or asked == "always" or not is_on("RANKWISE_RESIDENT"):
        return IS_LINUX and (asked == "always" if flag is None else flag)
    if place := _find_place():
        console.say(f"rankwise: no resident server {place}, unless --resident or RANKWISE_RESIDENT=always asks for it")
    return not place


def _find_place() -> str:
    """Return where we are if that is no place where somebody edits and runs; empty elsewhere."""
    env = environ()
    if "SLURM_JOB_ID" in env:
        return "inside a job of Slurm"
    if "KUBERNETES_SERVICE_HOST" in env:
        return "in a pod of Kubernetes"
    is_seen = any(os.isatty(fd) for fd in (0, 1, 2))
    inside = any(Path(path).exists() for path in _CONTAINERS)
    return "in a container without a terminal" if inside and not is_seen else ""


def open_run(
    spec: LaunchSpec,
    host: Host,
    plan: Plan,
    signals: Signals,
    console: Console,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[int, socket.socket] | None:
    """Have a supervisor forked, below which the ranks will be; None where that can't be, which costs only time.

    Args:
        spec: The command.
        host: What its start depends on beside that.
        plan: What the script needs; for a cold start nobody need ask.
        signals: End the wait for a server that is still importing torch.
        console: Where to say what the user should know.
        meanwhile: Called while the server forks.

    Returns:
        The supervisor's pid, and the socket to it.
    """
    env = {
        **environ(),
        **{name: value for name, value in build_shared_env(host.num_threads).items() if value is not None},
    }
    key = make_key(spec, host, plan, env)
    if (folder := _find_folder(console)) is None:
        return None
    reason = ""
    try:
        ask = _Request(spec, host, plan, signals, meanwhile)
        for name in _list_sockets(folder, f"{key}-"):
            sock = _connect(folder, name)
            if sock is None:
                continue
            with sock:
                if not _is_like_us(sock):
                    continue
                supervisor, reason = ask.send(sock)
            if supervisor is not None:
                return supervisor
        _make_room(folder)
        with _start(spec, host, plan, key, env) as sock:
            if not _wait_import(sock, signals, console):
                return None
            supervisor, reason = ask.send(sock)
    finally:
        os.close(folder)
    if supervisor is None and reason:
        console.say(f"rankwise: no resident server: {reason}")
    return supervisor


def make_key(spec: LaunchSpec, host: Host, plan: Plan, env: dict[str, str]) -> str:
    """Return the name that servers have from which such a run can be forked.

    Args:
        spec: The command.
        host: What its start depends on beside that.
        plan: What the script needs.
        env: The ranks' environment.
    """
    facts = {
        "rankwise": [__version__, str(Path(__file__).parent)],
        "python": host.interpreter.path,
        "flags": spec.program.flags,
        "how": spec.program.how,
        "env": {name: value for name, value in sorted(env.items()) if name.startswith(_LATCHED)},
        "folder": str(Path.cwd()) if _has_relative(env.get("PYTHONPATH", "")) else "",
        "compiler": _COMPILER in plan.modules,
        # A script that does not import it must not find it loaded.
        "library": any(name.startswith("rankwise.") for name in plan.modules),
        "asked": [
            spec.preload,
            str(plan.first_path),
            [one for one in plan.wanted if one[0].partition(".")[0] in spec.preload],
        ]
        if spec.preload
        else [],
        "process": read_process_facts("self"),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _has_relative(path: str) -> bool:
    """Whether Python takes a part of a PYTHONPATH from the current folder: it makes that absolute at its start."""
    return bool(path) and not all(entry.startswith("/") for entry in path.split(os.pathsep))


def list_servers() -> list[Server]:
    """Return this user's resident servers, those that answer."""
    found = [_ask(sock, {"info": 1}) for sock in _connect_all()]
    return [Server(**{**one, "asked": tuple(one["asked"])}) for one in found if "pid" in one]  # type: ignore[arg-type]


def stop_servers() -> list[int]:
    """End this user's resident servers; what they have forked goes on. Return their pids."""
    found = [_ask(sock, {"stop": 1}) for sock in _connect_all()]
    return [int(str(one["stopped"])) for one in found if "stopped" in one]


@final
class _Request:
    """What a server is told of a run."""

    def __init__(
        self, spec: LaunchSpec, host: Host, plan: Plan, signals: Signals, meanwhile: Callable[[], None]
    ) -> None:
        self._signals, self._meanwhile = signals, meanwhile
        own_umask = os.umask(0o77)
        os.umask(own_umask)
        argv = build_argv(spec.program, host.interpreter.path, 0)
        self._message = {
            "shown": [SUPERVISOR_NAME, str(os.getpid())],
            "program": spec.program.script,
            "args": argv[len(argv) - len(spec.program.args) :] if spec.program.args else [],
            "env": environ(),
            "umask": own_umask,
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "limits": {name: limits for name, limits in list_limits().items() if name != _NOT_GIVEN},
            "ignored": [name for name in _DEAF_TO if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN],
            "first_path": None if is_on("PYTHONSAFEPATH") else str(plan.first_path),
            "modules": plan.modules,
            "num_processes": host.num_ranks + spec.is_one_node,  # with the store
        }

    def send(self, sock: socket.socket) -> tuple[tuple[int, socket.socket] | None, str]:
        """Ask for a supervisor; return it, or why there is none."""
        ours, theirs = make_supervisor_socket()
        text = make_memory_file("rankwise-run")
        here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.write(text, json.dumps(self._message).encode())
            socket.send_fds(sock, [b'{"run": 1}'], [theirs.fileno(), here, 0, 1, 2, text])
            self._meanwhile()
            answer = _wait_answer(sock, _ANSWER_S, self._signals)
        except OSError as error:
            answer = {"refused": f"it does not accept the run: {error.strerror}"}
        finally:
            theirs.close()
            os.close(text)
            os.close(here)
        if "supervisor" in answer:
            return (int(str(answer["supervisor"])), ours), ""
        ours.close()
        return None, str(answer.get("refused", f"it has ended, or not answered for {_ANSWER_S:.0f} s"))


def _start(spec: LaunchSpec, host: Host, plan: Plan, key: str, env: dict[str, str]) -> socket.socket:
    """Start a server, and return the socket to it; it is no child of ours."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tops = {name.partition(".")[0] for name in spec.preload}
    orders = {
        "fd": theirs.fileno(),
        "torch": tuple(dict.fromkeys((*plan.modules, *(_WITH_COMPILER if _COMPILER in plan.modules else ())))),
        "asked": spec.preload,
        "wanted": [one for one in plan.wanted if one[0].partition(".")[0] in tops],
        "later": [],
        "first_path": str(plan.first_path) if spec.preload and not is_on("PYTHONSAFEPATH") else None,
        "latched": LATCHED,
        "resident": {
            "folder": str(_name_folder()), "key": key, "home": str(Path(__file__).parents[2]), "idle_s": read_float(_IDLE, _IDLE_S),
            "asked": spec.preload,
        },
    }  # fmt: skip
    argv = build_argv(replace(spec.program, script=NAME, args=()), host.interpreter.path, 0)
    hook = {name: value for name, value in hook_path_env().items() if value is not None}
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            process = subprocess.Popen(
                argv, env={**env, **hook, "RANKWISE_WARM": json.dumps(orders)}, stdin=subprocess.DEVNULL,
                start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip
            # An import may hang; a server that is ready takes it back.
            die_with_peer(theirs.fileno(), process.pid)
            code = 0
        os._exit(code)
    os.waitpid(pid, 0)
    theirs.close()
    return ours


def _wait_import(sock: socket.socket, signals: Signals, console: Console) -> bool:
    """Wait until a new server is ready; False if it can't be one, which the start that follows will say.

    It ends with the socket's close if it is still importing: nobody waits for it any more.
    """
    while True:
        message = _wait_answer(sock, _READY_S, signals)
        if "warning" in message:
            console.say(f"rankwise: warning: {message['warning']}")
        elif "hello" not in message:
            return "ready" in message


def _wait_answer(sock: socket.socket, timeout_s: float, signals: Signals | None) -> dict[str, object]:
    """Return one message; nothing if none comes in time, the other side is gone, or somebody wants this process to end."""
    awaited = [sock.fileno(), *([signals.fileno()] if signals is not None else [])]
    if sock.fileno() not in wait_ready(awaited, timeout_s):
        return {}
    try:
        data = sock.recv(_LONGEST_DATAGRAM)
        message = json.loads(data) if data else {}
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def _ask(sock: socket.socket, message: dict[str, object]) -> dict[str, object]:
    with sock, contextlib.suppress(OSError):
        sock.send(json.dumps(message).encode())
        return _wait_answer(sock, _ANSWER_S, None)
    return {}


def _is_like_us(sock: socket.socket) -> bool:
    """Whether a server is still in the same cgroup, namespaces and so on: somebody may have moved it."""
    pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    return read_process_facts(pid) == read_process_facts("self")


# ------------------------------------------------------------------- where


def _name_folder() -> Path:
    if named := get(_FOLDER):
        return Path(named).absolute()
    runtime = get("XDG_RUNTIME_DIR")
    return (
        Path(runtime, "rankwise")
        if runtime and os.access(runtime, os.W_OK)
        else Path(f"/tmp/rankwise-resident-{os.geteuid()}")
    )


def _find_folder(console: Console) -> int | None:
    """Open the folder of servers; None where none may serve this command, which a line says."""
    if tracer := read_tracer():
        reason = f"process {tracer} traces this command, and would not see the ranks"
    else:
        try:
            return _open_folder()
        except OSError as error:
            reason = f"{error.filename or _name_folder()}: {error.strerror}"
        except UsageError as error:
            # In /tmp anybody can make a folder of that name, and must not stop our runs by it.
            reason = str(error)
    console.say(f"rankwise: no resident server: {reason}")
    return None


def _open_folder() -> int:
    """Open the folder of this user's servers, which nobody else can enter.

    Raises:
        UsageError: It is somebody else's, or open to others.
    """
    path, flags = _name_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:  # a cleaner of temporary files may take it away while it is empty
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, flags)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(fd)
        raise UsageError(
            f"{path} belongs to uid {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}: a resident server would be open to others",
            hint=f"remove it, or name another folder by {_FOLDER}",
        )
    return fd


def _list_sockets(folder: int, prefix: str = "") -> list[str]:
    """Return the names of sockets, the one that was used last first."""
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if name.startswith(prefix) and name.endswith(".sock"):
                found.append((-os.stat(name, dir_fd=folder).st_mtime_ns, name))
    return [name for _, name in sorted(found)]


def _connect(folder: int, name: str) -> socket.socket | None:
    """Connect to a server of this user's; what nobody listens at any more is removed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(_ANSWER_S)
        # Through a descriptor: a path of a socket has 107 bytes at most.
        sock.connect(f"/proc/self/fd/{folder}/{name}")
        uid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], sys.byteorder)
        if uid == os.geteuid():
            return sock
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # it is gone, or does not answer
    sock.close()
    return None


def _connect_all() -> Iterator[socket.socket]:
    if not IS_LINUX or not _name_folder().is_dir():
        return
    folder = _open_folder()
    try:
        for name in _list_sockets(folder):
            if (sock := _connect(folder, name)) is not None:
                yield sock
    finally:
        os.close(folder)


def _make_room(folder: int) -> None:
    text = get(_MOST, str(_USUAL_MOST)).strip()
    if not text.isdecimal() or not int(text):
        raise UsageError(f"{_MOST}={text!r} is not a number above 0", hint=f"set {_MOST} to a number, or unset it")
    for name in _list_sockets(folder)[int(text) - 1 :]:
        if (sock := _connect(folder, name)) is not None:
            _ask(sock, {"stop": 1})
