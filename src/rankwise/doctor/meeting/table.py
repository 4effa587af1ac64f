"""The holder's end of all connections: who sits at the table, what was asked of whom, and who does not answer any more."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rankwise.doctor.meeting.border import clean_name, one_line
from rankwise.doctor.meeting.proof import is_proof, make_nonce, mark, prove
from rankwise.doctor.meeting.together import NO_SENSE
from rankwise.doctor.meeting.wire import (
    BEAT_S,
    CLOSED,
    GREETING,
    VERSION,
    GoneError,
    Message,
    StrangerError,
    Wire,
    encode,
    number,
    text,
    whole,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.base.clock import Clock

_STEP_S = 0.1
#: Who connects and does not say who it is goes after so long; so many may wait for that.
_WORD_S, _MOST_UNKNOWN = 10.0, 1024
#: No job has more nodes: whoever says more is no doctor.
_MOST_HOSTS = 1 << 16
#: So often the host's own user is told who is waited for, and after so long for the first time.
_SAY_S, _FIRST_SAY_S = 10.0, 2.0


@dataclass(eq=False, slots=True, kw_only=True)
class Seat:
    """One host of the meeting, as its holder sees it.

    Attributes:
        name: Its name, fit for a terminal and for a command's comment; made distinct when all are there.
        address: Where it comes from; ``met_at``: at which of our addresses.
        is_own: Whether it is the holder itself.
        nonce: What it is to prove that it knows the token with, and ``challenge``, ours; empty until it has said hello.
        rival: What another holder calls itself, who asks whether this is it; empty for all others.
        lost: Why it is not here any more; empty while it is.
        answers: The last answer to each kind of order.
    """

    wire: Wire
    heard_s: float
    address: str = ""
    met_at: str = ""
    name: str = ""
    node_rank: int | None = None
    num_hosts: int | None = None
    is_own: bool = False
    nonce: str = ""
    challenge: str = ""
    rival: str = ""
    number: int = -1
    lost: str = ""
    answers: dict[str, Message] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        """Whether it still answers."""
        return not self.lost


class OwnLostError(Exception):
    """The host that holds the meeting does not take part in it any more; the text tells why."""


@final
class Table:
    """All connections of the holder; one thread drives it.

    Args:
        listener: Where hosts arrive.
        token: Of the meeting.
        own: A word that only the holder's own process knows: who says it is the holder.
        clock: Where the time comes from.
        silence_s: After so long a silence a host is lost.
        admit: Asked of each that says who it is; a message refuses it.
        check: Called at each look; what it raises ends the meeting.
        on_loss: Told of each other host that is lost.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str,
        own: str,
        clock: Clock,
        silence_s: float,
        admit: Callable[[Seat], Message | None],
        check: Callable[[], None],
        on_loss: Callable[[Seat], None],
    ) -> None:
        self.seats: list[Seat] = []
        self._check, self.silence_s = check, silence_s
        self._clock, self._token, self._own, self._admit = clock, token, own, admit
        self._on_loss, self._is_over = on_loss, False
        self._unknown: list[Seat] = []
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)  # noqa: FBT003 - its only form
        self._selector.register(listener, selectors.EVENT_READ)
        self._beat_s = clock.monotonic()

    def here(self) -> list[Seat]:
        """Return those that still answer."""
        return [one for one in self.seats if one.is_here]

    def ask(
        self,
        orders: Mapping[Seat, Message],
        *,
        timeout_s: float,
        doing: str = "",
        say: Callable[[str], None] | None = None,
    ) -> dict[Seat, Message]:
        """Give orders, and wait for the answers. Who is late is lost.

        Args:
            orders: By seat; all of one kind, which stands as ``do``.
            timeout_s: How long to wait.
            doing: What is done, in words: ``trying all links``.
            say: Told whom it waits for.

        Returns:
            The answers of those that gave one.
        """
        kind = next((text(one, "do") for one in orders.values()), "")
        for seat, order in orders.items():
            seat.answers.pop(kind, None)
            self.tell(seat, order)

        def waited() -> list[Seat]:
            return [one for one in orders if one.is_here and kind not in one.answers]

        begin_s = self._clock.monotonic()
        next_say_s = begin_s + _FIRST_SAY_S
        while waited() and self._clock.monotonic() < begin_s + timeout_s:
            self.pump()
            if say and doing and waited() and self._clock.monotonic() >= next_say_s:
                next_say_s += _SAY_S
                say(
                    f"{doing}: waiting for {list_names(sorted(waited(), key=lambda one: (one.number, one.name)))}"
                )
        for seat in waited():
            self.lose(seat, f"did not answer within {timeout_s:.0f} s ({doing or kind})")
        return {seat: seat.answers[kind] for seat in orders if kind in seat.answers and seat.is_here}

    def tell(self, seat: Seat, message: Message, line: bytes = b"") -> None:
        """Send a message; ``line`` is the same, if it was encoded already."""
        if not seat.is_here:
            return
        try:
            seat.wire.send(line or encode(message))
        except GoneError as error:
            self.lose(seat, f"its connection broke: {error}")
        else:
            self._watch(seat)

    def tell_all(self, message: Message) -> None:
        """Send a message to all that are here."""
        line = encode(message)
        for seat in self.here():
            self.tell(seat, message, line)

    def pump(self, timeout_s: float = _STEP_S) -> None:
        """Look once at all connections."""
        self._check()
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, Seat):
                self._look(key.data, events)
        self._look_at_time()

    def lose(self, seat: Seat, why: str) -> None:
        """Give a host up.

        Raises:
            OwnLostError: It is the holder's own: without it there is no result, and all others must hear of that.
        """
        if not seat.is_here:
            return
        if seat.is_own and not self._is_over:
            raise OwnLostError(why)
        seat.lost = why
        with suppress(KeyError, ValueError):
            self._selector.unregister(seat.wire.sock)
        seat.wire.close()
        if not self._is_over:
            self._on_loss(seat)

    def drain(self, timeout_s: float) -> None:
        """Wait until all that was told has left, or nobody is here any more."""
        until_s = self._clock.monotonic() + timeout_s
        while any(one.wire.wants_room for one in self.here()) and self._clock.monotonic() < until_s:
            self.pump()

    def wait_until_left(self, timeout_s: float, most_s: float) -> None:
        """Wait until all have taken what they were told, and have left: to close before would take it away from them.

        Args:
            timeout_s: So long to wait at most while nobody takes any of it.
            most_s: So long to wait at all.
        """
        self.end()
        now_s = self._clock.monotonic()
        last_s, least, end_s = now_s, sum(one.wire.waiting_bytes for one in self.here()), now_s + most_s
        while self.here() and now_s < min(last_s + timeout_s, end_s):
            self.pump()
            now_s = self._clock.monotonic()
            left = sum(one.wire.waiting_bytes for one in self.here())
            if left < least:
                last_s, least = now_s, left

    def end(self) -> None:
        """Take it as natural from here on that hosts leave, our own as well."""
        self._is_over = True

    def close(self) -> None:
        """Close all connections."""
        for seat in (*self.seats, *self._unknown):
            seat.wire.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
            address, met_at = str(sock.getpeername()[0]), str(sock.getsockname()[0])
        except OSError:
            return
        if len(self._unknown) >= _MOST_UNKNOWN:
            sock.close()
            return
        # A socket for both families shows addresses of IPv4 within IPv6.
        seat = Seat(
            wire=Wire(sock), heard_s=self._clock.monotonic(), address=address.removeprefix("::ffff:").partition("%")[0],
            met_at=met_at.removeprefix("::ffff:").partition("%")[0],
        )  # fmt: skip
        self._unknown.append(seat)
        self._selector.register(sock, selectors.EVENT_READ, data=seat)

    def _watch(self, seat: Seat) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if seat.wire.wants_room else 0)
        if self._selector.get_key(seat.wire.sock).events != events:
            self._selector.modify(seat.wire.sock, events, data=seat)

    def _look(self, seat: Seat, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                seat.wire.flush()
            messages = seat.wire.receive() if events & selectors.EVENT_READ else []
        except GoneError as error:
            if seat in self._unknown:
                self._drop(seat)
            else:
                self.lose(seat, _explain_end(error))
            return
        # Who has not said who it is has so long from its coming, however it doles out its words.
        seat.heard_s = seat.heard_s if seat in self._unknown else self._clock.monotonic()
        for message in messages:
            self._take(seat, message)
        if seat.is_here and seat in self.seats:
            self._watch(seat)

    def _take(self, seat: Seat, message: Message) -> None:
        if seat in self._unknown:
            self._meet(seat, message)
        elif seat not in self.seats:  # sent away by a message before this one
            return
        elif text(message, "broke"):
            why = one_line(text(message, "broke"), 500)
            self.lose(seat, f"its doctor failed ({why}): please report this bug in rankwise")
        elif text(message, "leaves"):
            self.lose(seat, one_line(text(message, "leaves"), 500))
        elif text(message, "answer"):
            seat.answers[text(message, "answer")] = message

    def _meet(self, seat: Seat, message: Message) -> None:
        if seat.challenge:
            is_known = is_proof(text(message, "proof"), self._token, "guest", seat.nonce, seat.challenge)
            self._decide(seat, self._admit(seat) if is_known else _refuse_other())
            return
        seat.name, seat.rival = clean_name(text(message, "name")) or seat.address, text(message, "holds")
        # Compared in whole: nobody else knows it.
        seat.is_own = text(message, "own") == self._own
        seat.node_rank, seat.num_hosts = _read_count(message, "node_rank"), _read_count(message, "num_hosts")
        if message.get(GREETING) != VERSION:
            refusal: Message | None = refuse(
                f"the rendezvous host speaks version {VERSION} of the doctor's protocol, this host {one_line(repr(message.get(GREETING)), 20)}",
                "use the same version of rankwise on all hosts", "R11",
            )  # fmt: skip
        elif text(message, "mark") != mark(self._token):
            refusal = _refuse_other()
        elif self._token and not seat.rival:  # a rival is told nothing but that it is one
            self._challenge(seat, text(message, "nonce"))
            return
        else:
            refusal = self._admit(seat)
        self._decide(seat, refusal)

    def _challenge(self, seat: Seat, nonce: str) -> None:
        """Prove that we know the token, and ask for the same."""
        seat.nonce, seat.challenge = nonce, make_nonce()
        proof = prove(self._token, "holder", seat.nonce, seat.challenge)
        try:
            seat.wire.send(encode({"challenge": seat.challenge, "proof": proof}))
        except GoneError:
            self._drop(seat)

    def _decide(self, seat: Seat, refusal: Message | None) -> None:
        if refusal is None:
            self._unknown.remove(seat)
            seat.heard_s = self._clock.monotonic()
            seat.wire.is_known = True
            self.seats.append(seat)
            self.tell(seat, {"welcome": VERSION})
        else:
            with suppress(GoneError):
                seat.wire.send(encode(refusal))
            self._drop(seat)

    def _drop(self, seat: Seat) -> None:
        self._unknown.remove(seat)
        with suppress(KeyError, ValueError):
            self._selector.unregister(seat.wire.sock)
        with suppress(OSError):
            seat.wire.sock.shutdown(socket.SHUT_WR)
        seat.wire.close()

    def _look_at_time(self) -> None:
        now_s = self._clock.monotonic()
        for seat in [one for one in self._unknown if now_s - one.heard_s > _WORD_S]:
            self._drop(seat)
        if now_s - self._beat_s < BEAT_S:
            return
        # If we were stopped ourselves, the others' words still wait to be read: then nobody was silent.
        was_stopped = now_s - self._beat_s > self.silence_s / 2
        self._beat_s = now_s
        beat = encode({"beat": 1})
        for seat in self.here():
            if was_stopped:
                seat.heard_s = now_s
            # Our own is in this process: if it is slow, so are we.
            if now_s - seat.heard_s > self.silence_s and not seat.is_own:
                self.lose(
                    seat, f"nothing received for {self.silence_s:.0f} s: it is frozen, or its cable is cut"
                )
            else:
                self.tell(seat, {}, beat)


def _explain_end(error: GoneError) -> str:
    """Return why a host is not here any more; that it closed the connection says all."""
    if isinstance(error, StrangerError):
        return f"{NO_SENSE}: {error}"
    return str(error) if str(error) == CLOSED else f"its connection ended: {error}"


def _refuse_other() -> Message:
    return refuse(
        "another doctor has its rendezvous at this port",
        "start all hosts with the same arguments, or choose another port",
    )


def _read_count(message: Message, key: str) -> int | None:
    told = whole(message, key)
    return told if told is not None and 0 <= told <= _MOST_HOSTS else None


def refuse(why: str, hint: str, class_id: str = "") -> Message:
    """Return the message that refuses a host."""
    return {"no": why, "hint": hint, "class": class_id}


def list_names(seats: Iterable[Seat], most: int = 8) -> str:
    """Return the names of hosts in one line, the first ones of many."""
    names = [one.name for one in seats]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def measure_clock(table: Table, seat: Seat, clock: Clock) -> tuple[float, float] | None:
    """Ask a host for its time.

    Args:
        table: The table.
        seat: The host.
        clock: Ours.

    Returns:
        By how much its clock is ahead of ours, and how far off that may be, in seconds; None if it does not answer.
    """
    begin, begin_s = clock.time(), clock.monotonic()
    told = table.ask({seat: {"do": "time"}}, timeout_s=table.silence_s, doing="asking for the time").get(seat)
    if told is None:
        return None
    trip_s = clock.monotonic() - begin_s
    return number(told, "at") - (begin + trip_s / 2), trip_s / 2
