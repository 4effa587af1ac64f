"""The connecting side of a host: all ways to all others at once, and who answers at their ends."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rankwise.doctor.meeting.wire import GREETING, GoneError, StrangerError, decode, text, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.base.clock import Clock
    from rankwise.doctor.meeting.together import Outcome, Plane
    from rankwise.doctor.reading import Fact

#: A first packet that is lost comes again after 1 s and after 3 s. Who has opened may be busy: its word may take longer.
_OPEN_S, _WORD_S = 3.5, 10.0
_MOST_WORD_BYTES = 1024
_REFUSED = {errno.ECONNREFUSED}
_RESET = {errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE}
#: Said at once, these are the words of this host's own table of routes; a router's, or a firewall's, come later.
_NO_ROUTE = {errno.ENETUNREACH, errno.ENETDOWN, errno.EAFNOSUPPORT}
_UNDER_WAY = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EINTR}
_WINDOWS_UNDER_WAY = 10035


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to connect: ``number`` is that of the host which is to answer there."""

    number: int
    plane: Plane
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """How it went."""

    target: Target
    outcome: Outcome
    detail: str = ""
    connect_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Attempt:
    index: int
    target: Target
    sock: socket.socket
    begin_s: float
    until_s: float
    connect_s: float = -1.0
    word: bytes = b""


def open_socket(address: str, source_address: str = "") -> socket.socket:
    """Return a socket of an address's family that does not block.

    Args:
        address: Where it is to connect.
        source_address: From where; empty: the kernel chooses.

    Raises:
        OSError: There is no descriptor left, or the source is not ours.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # noqa: FBT003 - its only form
        if source_address:
            sock.bind((source_address, 0))
    except OSError:
        sock.close()
        raise
    return sock


def begin_connect(sock: socket.socket, address: str, port: int) -> None:
    """Begin to connect.

    Raises:
        OSError: It fails at once.
    """
    code = sock.connect_ex((address, port))
    if code not in _UNDER_WAY and code != _WINDOWS_UNDER_WAY:
        raise OSError(code, os.strerror(code))


def judge_error(error: OSError) -> Outcome:
    """Return the outcome that a system's error means."""
    if error.errno in _REFUSED:
        return "refused"
    if error.errno in _RESET:
        return "reset"
    return "timeout" if error.errno == errno.ETIMEDOUT else "unreachable"


def try_all(
    targets: Sequence[Target],
    *,
    mark: str,
    clock: Clock,
    source_address: str = "",
    at_once: int = 128,
    word_s: float = _WORD_S,
) -> list[Tried]:
    """Connect to all targets, many at a time, and see who answers.

    Args:
        targets: Where.
        mark: Of the meeting: who answers must say it.
        clock: Where the time comes from.
        source_address: From where to connect; empty: the kernel chooses.
        at_once: How many attempts may be open at a time.
        word_s: For how long who has opened may say nothing.

    Returns:
        How it went, in their order.
    """
    trial = _Trial(targets, mark=mark, clock=clock, source_address=source_address, word_s=word_s)
    try:
        return trial.run(at_once)
    finally:
        trial.close()


def _has_no_route(error: OSError, target: Target) -> bool:
    # Where IPv6 is switched off, there is no address of our own to connect from. With IPv4 it is the ports that have run out.
    is_off = error.errno == errno.EADDRNOTAVAIL and ":" in target.address
    return is_off or error.errno in _NO_ROUTE


@final
class _Trial:
    def __init__(
        self, targets: Sequence[Target], *, mark: str, clock: Clock, source_address: str, word_s: float
    ) -> None:
        self._targets, self._mark, self._clock, self._source = targets, mark, clock, source_address
        self._word_s = word_s
        self._results: list[Tried | None] = [None] * len(targets)
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, _Attempt] = {}

    def run(self, at_once: int) -> list[Tried]:
        waiting = deque(enumerate(self._targets))
        while waiting or self._open:
            while waiting and len(self._open) < at_once:
                self._begin(*waiting.popleft())
            for key, _ in self._selector.select(0.1):
                self._look(self._open[key.fd])
            # Only after all that has come was looked at: who was stopped meanwhile has seen nothing of the others.
            now_s = self._clock.monotonic()
            for attempt in [one for one in self._open.values() if now_s > one.until_s]:
                silent = f"it accepted, but sent nothing within {self._word_s:.0f} s"
                self._end(
                    attempt,
                    "timeout",
                    silent if attempt.connect_s >= 0 else f"no answer within {_OPEN_S:g} s",
                )
        return [one for one in self._results if one is not None]

    def close(self) -> None:
        for attempt in self._open.values():
            attempt.sock.close()
        self._selector.close()

    def _begin(self, index: int, target: Target) -> None:
        begin_s = self._clock.monotonic()
        try:
            sock = open_socket(target.address, self._source)
        except OSError as error:
            self._results[index] = Tried(
                target=target, outcome="not tried", detail=error.strerror or str(error)
            )
            return
        try:
            begin_connect(sock, target.address, target.port)
        except OSError as error:
            sock.close()
            outcome: Outcome = "no route" if _has_no_route(error, target) else judge_error(error)
            self._results[index] = Tried(target=target, outcome=outcome, detail=error.strerror or str(error))
            return
        self._open[sock.fileno()] = _Attempt(
            index=index, target=target, sock=sock, begin_s=begin_s, until_s=begin_s + _OPEN_S
        )
        self._selector.register(sock, selectors.EVENT_WRITE)

    def _look(self, attempt: _Attempt) -> None:
        try:
            if attempt.connect_s < 0:
                self._see_opened(attempt)
            else:
                self._read_word(attempt)
        except OSError as error:
            self._end(attempt, judge_error(error), error.strerror or str(error))
        except StrangerError as error:
            self._end(attempt, "other host", str(error))
        except GoneError as error:
            self._end(attempt, "reset", str(error))

    def _see_opened(self, attempt: _Attempt) -> None:
        code = attempt.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        now_s = self._clock.monotonic()
        attempt.connect_s, attempt.until_s = now_s - attempt.begin_s, now_s + self._word_s
        self._selector.modify(attempt.sock, selectors.EVENT_READ)

    def _read_word(self, attempt: _Attempt) -> None:
        data = attempt.sock.recv(_MOST_WORD_BYTES)
        if not data:
            raise GoneError("it closed the connection")
        attempt.word += data
        if b"\n" not in attempt.word:
            if len(attempt.word) >= _MOST_WORD_BYTES:
                raise StrangerError(f"it sent {attempt.word[:40]!r}")
            return
        word = decode(attempt.word.partition(b"\n")[0])
        who = self._find_stranger(word, attempt.target)
        self._end(attempt, "other host" if who else "ok", who)

    def _find_stranger(self, word: dict[str, Fact], target: Target) -> str:
        if GREETING not in word or text(word, "mark") != self._mark:
            return "it is not part of this rendezvous"
        return "" if whole(word, "number") == target.number else text(word, "name") or "another host"

    def _end(self, attempt: _Attempt, outcome: Outcome, detail: str) -> None:
        del self._open[attempt.sock.fileno()]
        self._selector.unregister(attempt.sock)
        attempt.sock.close()
        self._results[attempt.index] = Tried(
            target=attempt.target, outcome=outcome, detail=detail, connect_s=max(0.0, attempt.connect_s)
        )
