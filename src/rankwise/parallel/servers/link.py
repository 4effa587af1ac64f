"""A link between one worker and one server: messages with a bound on every wait, and the peer's name in every error.

A link is a Gloo process group of two. That a link is a group of its own is what lets the others go on when a peer is killed, and lets
workers join later: one TensorPipe agent serves a whole process, and meets all others when it starts. See ``parameter_server`` for
the measurements.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, RendezvousError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

#: Kinds of messages: what a worker asks for, and what the server answers.
HELLO, PULL, ROWS, PUSH, STATE, STATS, ADOPT, BYE, ANSWER, REFUSED = range(10)
_HEADER = 7  # numbers of int64
#: A peer says that it comes right before it does.
CONNECT_S, _GRACE_S = 20.0, 5.0


class LinkLostError(CollectiveError):
    """The peer has ended, or the connection to it is broken."""


@final
@dataclass(frozen=True, slots=True)
class Message:
    """What goes over a link.

    Attributes:
        kind: What is asked for or answered.
        shard: Which shard it is about.
        number: A version or a clock.
        weight: Of a gradient.
        seen: The version that a gradient was computed with.
        note: Small facts.
        body: Bytes, shape (N,), uint8; None if there are none.
    """

    kind: int
    shard: int = 0
    number: int = 0
    weight: float = 1.0
    seen: int = 0
    note: Mapping[str, Any] | None = None
    body: Tensor | None = None


@final
class Link:
    """One end of a link.

    Args:
        group: The group of two.
        is_server: Whether this end is the server's.
        peer: Who is at the other end, for errors.
        rank: Our own rank, for errors.
    """

    def __init__(self, group: dist.ProcessGroup, *, is_server: bool, peer: str, rank: int) -> None:
        self._group, self._other, self.peer, self._rank = group, 1 if is_server else 0, peer, rank

    def send(self, message: Message, *, timeout_s: float) -> None:
        """Send a message; its body may be written again afterwards.

        Raises:
            LinkLostError: The peer is gone.
            CollectiveTimeoutError: It does not take the message in time.
        """
        note = b"" if message.note is None else json.dumps(message.note).encode()
        bits = struct.unpack("<q", struct.pack("<d", message.weight))[0]
        size = 0 if message.body is None else message.body.numel()
        header = torch.tensor(
            [message.kind, message.shard, message.number, bits, len(note), size, message.seen]
        )
        parts = [header]
        if note:
            parts.append(torch.frombuffer(bytearray(note), dtype=torch.uint8))
        if message.body is not None and size:
            parts.append(message.body)
        for part in parts:
            self._wait(partial(self._group.send, [part], self._other, 0), timeout_s, "takes no message")

    def receive(
        self, *, timeout_s: float, place: Callable[[Message, int], Tensor | None] | None = None
    ) -> Message:
        """Receive a message.

        Args:
            timeout_s: Seconds to wait for it, and for each of its parts.
            place: Asked where the body is to be put, given the message without it and its size in bytes; None: into new memory.

        Raises:
            LinkLostError: The peer is gone.
            CollectiveTimeoutError: Nothing came in time.
        """
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._receive_into(header, timeout_s)
        kind, shard, number, bits, note_size, size, seen = header.tolist()
        note = None
        if note_size:
            text = torch.empty(note_size, dtype=torch.uint8)
            self._receive_into(text, timeout_s)
            note = json.loads(text.numpy().tobytes())
        weight = struct.unpack("<d", struct.pack("<q", bits))[0]
        message = Message(kind, shard, number, weight, seen, note)
        if not size:
            return message
        body = place(message, size) if place is not None else None
        if body is None:
            body = torch.empty(size, dtype=torch.uint8)
        if body.numel() != size:
            # Gloo aborts the process for a message that is larger than its place.
            raise LinkLostError(
                f"{self.peer} sends {size} bytes where {body.numel()} are expected", rank=self._rank,
                hint="the versions of rankwise or the models differ",
            )  # fmt: skip
        self._receive_into(body, timeout_s)
        return Message(kind, shard, number, weight, seen, note, body)

    def _receive_into(self, tensor: Tensor, timeout_s: float) -> None:
        self._wait(partial(self._group.recv, [tensor], self._other, 0), timeout_s, "sends nothing")

    def _wait(self, begin: Callable[[], dist.Work], timeout_s: float, what: str) -> None:
        try:
            begin().wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            if "imed out" in text:
                raise CollectiveTimeoutError(
                    f"{self.peer} {what} for {timeout_s:g} s", rank=self._rank,
                    hint="it is stopped or overloaded: look at its stacks (`rankwise why PID`); or raise timeout_s",
                ) from None  # fmt: skip
            raise LinkLostError(
                f"{self.peer} is gone: {text}", rank=self._rank, hint="look at its output"
            ) from None


def connect(store: dist.Store, *, is_server: bool, peer: str, rank: int) -> Link:
    """Make one end of a link.

    Args:
        store: A corner of the store that only the two ends use. (A connection of its own would be better, as one that waits lets
            nobody else ask; but torch's store resets many that come at once, and then they wait for seconds: torch 2.13, libuv.)
        is_server: Whether this end is the server's.
        peer: Who is at the other end, for errors.
        rank: Our own rank, for errors.

    Raises:
        RendezvousError: The peer did not come, or can't be reached.
    """

    def make() -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(store, 0 if is_server else 1, 2, timedelta(seconds=CONNECT_S))

    try:
        # Where the store is frozen, Gloo's own bound does not hold.
        return Link(call_within(CONNECT_S + _GRACE_S, make), is_server=is_server, peer=peer, rank=rank)
    except (OverdueError, RuntimeError) as error:
        raise RendezvousError(
            f"no link to {peer} within {CONNECT_S:g} s: {str(error).splitlines()[0]}", rank=rank,
            hint="it has ended or is stopped, or a firewall keeps the ranks' own ports shut (GLOO_SOCKET_IFNAME)",
        ) from None  # fmt: skip
