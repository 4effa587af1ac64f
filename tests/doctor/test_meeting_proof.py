"""Who takes part in a meeting with a token must know it, on both sides, and it never travels; what is asked for has bounds."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from clocks import FakeClock
from rankwise.base.clock import SystemClock
from rankwise.base.errors import UsageError
from rankwise.cli.doctor_flags import read_token
from rankwise.doctor.host import Host
from rankwise.doctor.meeting.admitting import Admission
from rankwise.doctor.meeting.all_reducing import Reducing
from rankwise.doctor.meeting.answering import Answering
from rankwise.doctor.meeting.examining import examine_together
from rankwise.doctor.meeting.over_ssh import RemoteHosts
from rankwise.doctor.meeting.plan import MeetingError, Plan
from rankwise.doctor.meeting.proof import is_proof, make_nonce, mark, prove
from rankwise.doctor.meeting.table import Seat, Table
from rankwise.doctor.meeting.wire import Wire, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.linux

TOKEN = "a word that is long enough"


@pytest.fixture
def table() -> Iterator[tuple[Table, FakeClock]]:
    """Give the holder's end of a meeting with a token, and its clock."""
    clock = FakeClock()
    made = Table(
        socket.create_server(("127.0.0.1", 0)), token=TOKEN, own="own", clock=clock, silence_s=1e9, admit=lambda _: None,
        check=lambda: None, on_loss=lambda _: None,
    )  # fmt: skip
    yield made, clock
    made.close()


class Guest:
    """A host that speaks by hand."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._sock = socket.create_connection(table._listener.getsockname())
        self._file = self._sock.makefile("rb")
        self.nonce = make_nonce()

    def say(self, message: dict[str, Any]) -> None:
        self._sock.sendall(encode(message))

    def hello(self, **changes: Any) -> dict[str, Any]:
        self.say({"rankwise-doctor": 1, "mark": mark(TOKEN), "nonce": self.nonce, "name": "guest", **changes})
        return self.hear()

    def hear(self) -> dict[str, Any]:
        for _ in range(5):
            self._table.pump(0.05)
        self._sock.settimeout(5)
        found: dict[str, Any] = json.loads(self._file.readline() or b"{}")
        return found

    def close(self) -> None:
        self._file.close()
        self._sock.close()


def test_a_proof_is_of_one_side_and_of_two_nonces() -> None:
    """What one side says can't be said back to it, nor again another time; another token's proof is none."""
    guest, holder = make_nonce(), make_nonce()
    proof = prove("secret", "holder", guest, holder)
    assert is_proof(proof, "secret", "holder", guest, holder)
    assert not is_proof(proof, "secret", "guest", guest, holder)
    assert not is_proof(proof, "secret", "holder", guest, make_nonce())
    assert not is_proof(proof, "other", "holder", guest, holder)
    assert not is_proof("é", "secret", "holder", guest, holder)
    assert (mark(""), mark("secret") == mark("other")) == ("", False)


def test_both_sides_prove_that_they_know_the_token(table: tuple[Table, FakeClock]) -> None:
    """The holder's answer to hello is a proof that the guest can check; with the guest's own it is welcome. The token is in no message."""
    guest = Guest(table[0])
    told = guest.hello()
    assert is_proof(told["proof"], TOKEN, "holder", guest.nonce, told["challenge"])
    assert TOKEN not in json.dumps(told)
    assert table[0].seats == []
    guest.say({"proof": prove(TOKEN, "guest", guest.nonce, told["challenge"])})
    assert guest.hear() == {"welcome": 1}
    assert len(table[0].seats) == 1
    guest.close()


@pytest.mark.parametrize("way", ["other mark", "no proof", "the holder's own", "another time's"])
def test_who_does_not_know_the_token_is_sent_away(table: tuple[Table, FakeClock], way: str) -> None:
    """By another mark at once; else by a proof that is none: nothing, what the holder itself has said, or what was heard before."""
    guest = Guest(table[0])
    told = guest.hello(**({"mark": mark("other")} if way == "other mark" else {}))
    if way != "other mark":
        proofs = {
            "no proof": "",
            "the holder's own": told["proof"],
            "another time's": prove(TOKEN, "guest", guest.nonce, make_nonce()),
        }
        guest.say({"proof": proofs[way]})
        told = guest.hear()
    assert told["no"] == "another doctor has its rendezvous at this port"
    assert table[0].seats == []
    guest.close()


def test_a_holder_that_does_not_know_the_token_is_left() -> None:
    """It bids everybody welcome: a host that has a token says that this is none of its meeting, and obeys no order."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def play_holder() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(encode({"welcome": 1, "challenge": "1", "proof": "2"}))
                sock.recv(4096)

        thread = threading.Thread(target=play_holder, daemon=True)
        thread.start()
        plan = Plan(
            endpoint_host="127.0.0.1", endpoint_port=server.getsockname()[1], num_hosts=2, node_rank=1, is_holder=False,
            listen_address="127.0.0.2", measure=False, arrival_timeout_s=5.0, token=TOKEN,
        )  # fmt: skip
        with pytest.raises(MeetingError) as caught:
            examine_together(Host(name="guest", env={}), (), plan, lambda _: None)
        thread.join(timeout=5)
    assert "does not have the token of this rendezvous" in caught.value.message


def test_who_was_sent_away_is_no_host_that_was_lost(table: tuple[Table, FakeClock]) -> None:
    """What it says in the same breath as a false proof is not taken: no host of the meeting is lost by it."""
    lost: list[Seat] = []
    holder = table[0]
    holder._on_loss = lost.append
    guest = Guest(holder)
    guest.hello()
    guest._sock.sendall(encode({"proof": ""}) + encode({"leaves": "never was here"}))
    assert guest.hear()["no"] == "another doctor has its rendezvous at this port"
    assert (holder.seats, lost) == ([], [])
    guest.close()


def test_an_ssh_that_has_ended_takes_no_secret(tmp_path: Path) -> None:
    """It ends before the token is written: its own last line is the reading, and closing breaks on no pipe."""
    said: list[str] = []
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec 0<&-\necho no route to host >&2\nexit 255\n")
    ssh.chmod(0o755)
    remotes = RemoteHosts(str(ssh), said.append)
    clock = SystemClock()
    for _ in range(3):
        remotes.start("far", ["rankwise", "doctor"], folder=tmp_path, secret=TOKEN)
    end_s = clock.monotonic() + 10
    while len(said) < 3 and clock.monotonic() < end_s:
        clock.sleep(0.05)
        remotes.look()
    remotes.close(clock)
    assert said == ["rankwise: ssh does not reach far: no route to host"] * 3


def test_who_leaves_before_the_greeting_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is tried and left at once (a reset before the first word goes out): its connection is closed here, too."""
    closed: list[int] = []

    class Gone:
        def setsockopt(self, *_: object) -> None:
            raise ConnectionResetError

        def send(self, _: bytes) -> None:
            raise ConnectionResetError

        def close(self) -> None:
            closed.append(1)

    class Listener:
        def accept(self) -> tuple[Gone, str]:
            return Gone(), ""

    answering = Answering(mark="", number=0, name="host", clock=FakeClock())
    monkeypatch.setattr("rankwise.doctor.meeting.answering.tune", lambda _: None)
    answering._welcome(Listener())  # type: ignore[arg-type]
    answering.close()
    assert closed == [1]


def test_hosts_with_one_token_meet() -> None:
    """The holder and two others, with a token: all get a result, and every link is open."""
    from doctor.test_meeting import make_plans, play

    ends = play(make_plans(3, token=TOKEN))
    assert [len(one.hosts) for one in ends] == [3, 3, 3]
    assert {one.outcome for one in ends[0].links} == {"ok"}


def test_a_word_that_is_doled_out_holds_no_place(table: tuple[Table, FakeClock]) -> None:
    """A byte every nine seconds: it is dropped ten seconds after it came, as is who says nothing at all."""
    holder, clock = table
    slow = socket.create_connection(holder._listener.getsockname())
    holder.pump(0.05)
    for _ in range(2):
        slow.sendall(b"{")
        clock.sleep(9)
        holder.pump(0.05)
    assert slow.recv(10) == b""
    slow.close()


def test_hosts_without_a_node_rank_are_as_many_as_are_waited_for() -> None:
    """Two are to come: the third that says no rank is sent away; one with a rank, and the holder's own, have their places."""
    pairs = [socket.socketpair() for _ in range(4)]
    seats = [Seat(wire=Wire(pair[0]), heard_s=0.0, name=f"host{number}") for number, pair in enumerate(pairs)]
    plan = Plan(endpoint_host="host0", endpoint_port=29500, num_hosts=2)
    admission = Admission("host0", plan, lambda: seats[:2], FakeClock())
    refusal = admission.admit(seats[2])
    assert refusal is not None
    assert "2 hosts without a node rank have joined already" in str(refusal["no"])
    seats[2].node_rank, seats[3].is_own = 1, True
    assert admission.admit(seats[2]) is admission.admit(seats[3]) is None
    for pair in pairs:
        for sock in pair:
            sock.close()


@pytest.mark.parametrize("count", [-1, 129, 2**53])
def test_no_holder_starts_thousands_of_ranks(count: int) -> None:
    """A number of ranks that no host has is an answer with both numbers, and no process."""
    told = Reducing(Host(name="host", env={})).run({"do": "all-reduce", "ranks": count, "backend": "gloo"})
    (rank,) = told["ranks"]  # type: ignore[misc]
    assert rank == {"why": f"{count} ranks on this host were requested; at most 128 are started"}


def test_a_token_may_stand_in_a_file(tmp_path: Path) -> None:
    """Its first word counts; a file that is empty or absent is told by name."""
    path = tmp_path / "word"
    with pytest.raises(UsageError, match="can't be read"):
        read_token(path)
    path.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_token(path)
    path.write_text("abc\n")
    assert read_token(path) == "abc"


def test_the_first_line_of_the_input_is_taken_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ssh brings: a line with the word; the rest of the input is the lifeline's."""
    from rankwise.cli import doctor_hosts

    stream = io.BytesIO(b"word\nrest")
    monkeypatch.setattr(os, "read", lambda _fd, count: stream.read(count))
    assert doctor_hosts._read_line() == "word"
    assert stream.read() == b"rest"
