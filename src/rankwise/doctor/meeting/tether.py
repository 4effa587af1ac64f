"""A host's connection to the holder: a thread that says we are alive, tells our time, and notices when the holder is gone."""

from __future__ import annotations

import queue
import selectors
import socket
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, final

from rankwise.doctor.meeting.wire import (
    BEAT_S,
    SILENCE_S,
    GoneError,
    Message,
    SilentError,
    StrangerError,
    Wire,
    encode,
    text,
)

if TYPE_CHECKING:
    from rankwise.base.clock import Clock

_STEP_S = 0.5


@final
class Tether:
    """The connection to the holder, while it holds.

    Args:
        sock: The socket; it is ours from here on.
        hello: What we say first.
        clock: Where the time comes from: that of this host, as the others are to see it.
        silence_s: After so long a silence the holder is gone.
    """

    def __init__(
        self, sock: socket.socket, hello: Message, clock: Clock, silence_s: float = SILENCE_S
    ) -> None:
        self.address = str(sock.getsockname()[0]).removeprefix("::ffff:").partition("%")[0]
        self._wire = Wire(sock)
        self._clock, self._silence_s = clock, silence_s
        self._come: queue.SimpleQueue[Message | GoneError] = queue.SimpleQueue()
        self._waiting = [encode(hello)]
        self._lock = Lock()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)  # noqa: FBT003 - its only form
        self._is_wanted = True
        self._thread = Thread(target=self._run, name="rankwise-tether", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message soon; if the holder is gone, `next` tells it."""
        with self._lock:
            self._waiting.append(encode(message))
        self._wake()

    def next(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none has come in time.

        Raises:
            GoneError: The holder is gone.
            StrangerError: It is no doctor.
        """
        try:
            found = self._come.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, GoneError):
            self._come.put(found)  # for whoever asks again
            raise found
        return found

    def close(self) -> None:
        """Close it; what was to be sent is sent before, as far as there is room."""
        self._is_wanted = False
        self._wake()
        self._thread.join(timeout=5)

    def _wake(self) -> None:
        with suppress(OSError):  # enough bytes wait there already
            self._waker.send(b"x")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._wire.sock, selectors.EVENT_READ)
            try:
                self._serve(selector)
            except GoneError as error:
                self._come.put(error)
            finally:
                for sock in (self._woken, self._waker, self._wire.sock):
                    sock.close()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        heard_s = beat_s = self._clock.monotonic()
        while self._is_wanted:
            self._say()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wire.wants_room else 0)
            selector.modify(self._wire.sock, events)
            ready = {key.fd for key, _ in selector.select(_STEP_S)}
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            now_s = self._clock.monotonic()
            if self._wire.sock.fileno() in ready:
                heard_s = now_s
                self._hear()
            elif now_s - heard_s > self._silence_s:
                if not self._wire.is_known:
                    raise SilentError(f"it accepted, but sent nothing within {self._silence_s:.0f} s")
                raise GoneError(
                    f"nothing received for {self._silence_s:.0f} s: it is frozen, or the cable is cut"
                )
            if now_s - beat_s > BEAT_S:
                beat_s = now_s
                self._wire.send(encode({"beat": 1}))
        self._say()

    def _say(self) -> None:
        with self._lock:
            lines, self._waiting = self._waiting, []
        for line in lines:
            self._wire.send(line)
        self._wire.flush()

    def _hear(self) -> None:
        for message in self._wire.receive():
            if not self._wire.is_known and not {"welcome", "no", "challenge"} & message.keys():
                raise StrangerError(f"it sent {str(message)[:40]!r}")
            self._wire.is_known = True
            if text(message, "do") == "time":
                # At once, and not when the rest has time: the way back and forth bounds the error.
                self._wire.send(encode({"answer": "time", "at": self._clock.time()}))
            elif "beat" not in message:
                self._come.put(message)
