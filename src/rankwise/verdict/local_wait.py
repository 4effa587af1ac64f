"""What a rank waits for that is no rank: a lock, a child, a file, a server. By its frames, the kernel's word, and its own line."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, final

from rankwise.verdict.rank_state import list_calls
from rankwise.verdict.source_text import list_assignments, name_of, parse, spans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.evidence.reader.notes import Stack
    from rankwise.evidence.reader.scene import RankFacts

_LOCK = "waiting for a lock"
_FILE_LOCK = "waiting for a file lock"
_CHILD = "waiting for a process it has started"
_SERVER = "waiting for a server to answer"
_CLIENT = "waiting for a client to connect"
_TYPING = "waiting for input"
_THREAD = "waiting for another thread"
_QUEUE = "waiting for an item in a queue"
_SLEEP = "sleeping"
_PEER = "waiting for another process to send something"

#: Part of a file's name, its functions (none: all of them), and what is done there; the first one that holds.
_FRAMES: tuple[tuple[str, frozenset[str], str], ...] = (
    ("/filelock/", frozenset(), _FILE_LOCK),
    ("/portalocker/", frozenset(), _FILE_LOCK),
    ("/fasteners/", frozenset(), _FILE_LOCK),
    ("/subprocess.py", frozenset({"wait", "_wait", "_try_wait", "communicate", "_communicate"}), _CHILD),
    ("/multiprocessing/popen_", frozenset({"wait", "poll"}), _CHILD),
    ("/multiprocessing/connection.py", frozenset({"accept"}), _CLIENT),
    ("/multiprocessing/pool.py", frozenset(), "waiting for the result of a pool"),
    ("/multiprocessing/spawn.py", frozenset({"join"}), _CHILD),
    ("/multiprocessing/queues.py", frozenset({"get"}), _QUEUE),
    ("/multiprocessing/", frozenset({"recv", "_recv", "recv_bytes", "_recv_bytes"}), _PEER),
    ("/queue.py", frozenset({"get"}), _QUEUE),
    ("/queue.py", frozenset({"put"}), "waiting for space in a queue"),
    ("/ssl.py", frozenset({"do_handshake", "read", "recv", "recv_into"}), _SERVER),
    ("/http/client.py", frozenset(), _SERVER),
    ("/socket.py", frozenset({"readinto"}), _SERVER),
    ("/socket.py", frozenset({"accept"}), _CLIENT),
    ("/socket.py", frozenset({"create_connection"}), "connecting to a server"),
    ("/socket.py", frozenset({"getaddrinfo"}), "looking up a server's address"),
    ("/concurrent/futures/", frozenset({"result", "exception", "wait", "as_completed"}), "waiting for the result of a future"),
    ("/asyncio/", frozenset(), "waiting in asyncio's event loop"),
    ("/threading.py", frozenset({"join", "_wait_for_tstate_lock"}), "waiting for a thread to end"),
    ("/threading.py", frozenset({"wait", "wait_for", "acquire", "__enter__"}), _THREAD),
)  # fmt: skip
#: Functions that the user's own line may call, which have no frame of their own, and what is done there.
_CALLS = {
    "sleep": _SLEEP, "acquire": _LOCK, "flock": _FILE_LOCK, "lockf": _FILE_LOCK, "input": _TYPING, "recv": "waiting for data from a socket",
    "recvfrom": "waiting for data from a socket", "recv_into": "waiting for data from a socket", "accept": _CLIENT,
    "waitpid": _CHILD, "wait3": _CHILD, "wait4": _CHILD, "waitid": _CHILD,
}  # fmt: skip
_LOCKS = re.compile(r"lock|mutex|sem(aphore)?$|condition", re.IGNORECASE)
_LOCK_CLASSES = {"Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition"}
#: What to do, by what stands in the phrase, and whether a thread or a process of the rank's own may end the wait.
_ADVICE = (
    ("reading from", False, "that read takes long: look at the disk, or the network file system, that the file is on"),
    ("writing to", False, "that write takes long: look at the disk, or the network file system, that the file is on"),
    ("sleeping", False, "if it polls for something in a loop, look at what does not happen; else shorten the sleep, or move it before the loop"),
    ("file lock", False, "find out who holds that lock: a rank that waits for this one in a collective never releases it"),
    ("lock of", False, "find out who holds that lock: a rank that waits for this one in a collective never releases it"),
    ("a lock", True, "threads that take two locks must take them in the same order: find out which one holds this one"),
    ("process", True, "look at what that process does: one that waits for input, or for space in a pipe, never ends; give the call a timeout"),
    ("pipe", False, "nothing has opened the other end: open both, or don't block"),
    ("server", False, "give the request a timeout; download once, before the ranks start"),
    ("socket", False, "give the socket a timeout; look at its other end"),
    ("client", False, "nothing connects: look at the other end, and set a timeout"),
    ("queue", True, "whatever fills or empties that queue has stopped: give the call a timeout, and look at that thread or process"),
    ("thread", True, "look at the stack of that thread in the evidence"),
    ("future", True, "look at the stack of that thread in the evidence"),
    ("pool", True, "a task is lost if its worker is killed: use concurrent.futures, which raises then, or give the call a timeout"),
    ("for input", False, "nobody can type into a job: remove the prompt"),
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWait:
    """What a rank waits for that is no other rank.

    Attributes:
        doing: In words that go on after "rank 1 is".
        advice: What to do about it; empty if nothing is known.
        is_own: Whether a thread or a process of its own may end the wait.
        own: What these do; empty if there is none.
    """

    doing: str
    advice: str = ""
    is_own: bool = False
    own: str = ""


def find_local_wait(facts: RankFacts, sources: Mapping[str, str]) -> LocalWait | None:
    """Return what a rank waits for; None if it is at work, waits for other ranks, or nothing tells."""
    if facts.state != "running" or facts.stack is None or not facts.stack.frames:
        return None
    by_frames = _find_by_frames(facts.stack)
    # Of a stream without a name the frames tell more: what it is for.
    is_vague = facts.awaits.endswith((" a socket", " a pipe"))
    message = (by_frames, facts.awaits) if is_vague else (facts.awaits, by_frames)
    doing = next((text for text in message if text), "") or _find_by_line(facts.stack, sources)
    if not doing:
        return None
    is_own, advice = next(((is_own, advice) for word, is_own, advice in _ADVICE if word in doing), (False, ""))
    return LocalWait(doing=doing, advice=advice, is_own=is_own)


def _find_by_frames(stack: Stack) -> str:
    calls = list_calls(stack)
    return next(
        (
            doing
            for part, functions, doing in _FRAMES
            if any(part in call.file and (not functions or call.function in functions) for call in calls)
        ),
        "",
    )


def _find_by_line(stack: Stack, sources: Mapping[str, str]) -> str:
    frame = stack.frames[0]
    text = sources.get(frame.file) if frame.is_users else None
    return _read_line(text, frame.line) if text is not None else ""


@lru_cache(maxsize=64)
def _read_line(text: str, line: int) -> str:
    """Return what a line of Python waits for, if it says so."""
    locks = _find_locks(parse(text))
    for node in ast.walk(parse(text)):
        if isinstance(node, (ast.With, ast.AsyncWith)) and node.lineno == line:
            names = [name_of(item.context_expr) for item in node.items]
            if any(name in locks or _LOCKS.search(name) for name in names):
                return _LOCK
        if isinstance(node, ast.Call) and spans(node, line) and (doing := _CALLS.get(name_of(node))):
            return doing
    return ""


def _find_locks(tree: ast.Module) -> set[str]:
    """Return the names that locks are kept under, as in ``A, B = Lock(), Lock()``."""
    found = {
        name_of(name)
        for name, value in list_assignments(tree)
        if isinstance(value, ast.Call) and name_of(value) in _LOCK_CLASSES
    }
    return found - {""}
