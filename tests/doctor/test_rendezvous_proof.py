"""Who takes part in a rendezvous with a token must know it, on both sides, and it never travels; what is asked for has bounds."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from clocks import FakeClock
from rankwise.base.clock import SystemClock
from rankwise.base.errors import UsageError
from rankwise.cli.doctor_flags import read_token
from rankwise.doctor.host import Host
from rankwise.doctor.multi_host.all_reduce import run_ranks
from rankwise.doctor.multi_host.coordinator import Coordinator
from rankwise.doctor.multi_host.examine_hosts import examine_hosts
from rankwise.doctor.multi_host.link_probe import read_greeting
from rankwise.doctor.multi_host.link_speed import LinkServer
from rankwise.doctor.multi_host.over_ssh import RemoteHosts
from rankwise.doctor.multi_host.peer import Admission, Peer
from rankwise.doctor.multi_host.plan import JoinError, Plan
from rankwise.doctor.multi_host.wire import VERSION, encode, is_proof, make_nonce, mark, prove

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.linux

TOKEN = "a word that is long enough"


class Guest:
    """A host that speaks by hand to a coordinator."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.settimeout(10)
        self._file = self._sock.makefile("rb")
        self.nonce = make_nonce()

    def say(self, *messages: dict[str, Any]) -> None:
        self._sock.sendall(b"".join(map(encode, messages)))

    def hello(self, **changes: Any) -> dict[str, Any]:
        self.say({"rankwise-doctor": VERSION, "mark": mark(TOKEN), "nonce": self.nonce, "name": "guest", **changes})
        return self.hear()

    def hear(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._file.readline() or b"{}")
        return found

    def dole_out(self, byte: bytes) -> None:
        """Send a byte again and again, until the other side has closed the connection."""
        self._sock.settimeout(0.02)
        with suppress(ConnectionError):
            while True:
                self._sock.sendall(byte)
                try:
                    if not self._sock.recv(10):
                        return
                except TimeoutError:
                    continue

    def close(self) -> None:
        self._file.close()
        self._sock.close()


def visit(scene: Callable[[Guest], None], **changes: Any) -> tuple[list[str], list[str]]:
    """Let a guest visit a coordinator with a token; return the names of the hosts that it admitted, and of those that it lost."""
    lost: list[str] = []

    async def play() -> tuple[list[str], list[str]]:
        plan = Plan(endpoint_host="127.0.0.1", endpoint_port=1, num_hosts=2, token=TOKEN)
        made = Coordinator(Host(name="host0", env={}), plan, **changes)
        made.on_loss = lambda peer: lost.append(peer.name)
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(made.serve(listener))
        guest = await asyncio.to_thread(Guest, listener.getsockname()[1])
        try:
            await asyncio.to_thread(scene, guest)
            return [one.name for one in made.peers], list(lost)
        finally:
            guest.close()
            serving.cancel()
            await asyncio.wait({serving})
            await made.close()

    return asyncio.run(play())


def test_a_proof_is_of_one_side_and_of_two_nonces() -> None:
    """What one side says can't be said back to it, nor again another time; another token's proof is none."""
    guest, holder = make_nonce(), make_nonce()
    proof = prove("secret", "coordinator", guest, holder)
    assert is_proof(proof, "secret", "coordinator", guest, holder)
    assert not is_proof(proof, "secret", "peer", guest, holder)
    assert not is_proof(proof, "secret", "coordinator", guest, make_nonce())
    assert not is_proof(proof, "other", "coordinator", guest, holder)
    assert not is_proof("é", "secret", "coordinator", guest, holder)
    assert (mark(""), mark("secret") == mark("other")) == ("", False)


def test_both_sides_prove_that_they_know_the_token() -> None:
    """The coordinator's answer to hello is a proof that the guest can check; with the guest's own it is welcome. The token is in no message."""

    def scene(guest: Guest) -> None:
        answer = guest.hello()
        assert is_proof(answer["proof"], TOKEN, "coordinator", guest.nonce, answer["challenge"])
        assert TOKEN not in json.dumps(answer)
        guest.say({"proof": prove(TOKEN, "peer", guest.nonce, answer["challenge"])})
        assert guest.hear() == {"welcome": VERSION}

    assert visit(scene) == (["guest"], [])


@pytest.mark.parametrize("way", ["other mark", "no proof", "the coordinator's own", "another time's"])
def test_who_does_not_know_the_token_is_rejected(way: str) -> None:
    """By another mark at once; else by a proof that is none: nothing, what the coordinator itself has sent, or an earlier one.

    What it says in the same breath as a false proof is not taken: no host is lost by it.
    """

    def scene(guest: Guest) -> None:
        answer = guest.hello(**({"mark": mark("other")} if way == "other mark" else {}))
        if way != "other mark":
            proofs = {
                "no proof": "",
                "the coordinator's own": answer["proof"],
                "another time's": prove(TOKEN, "peer", guest.nonce, make_nonce()),
            }
            guest.say({"proof": proofs[way]}, {"leaves": "never was here"})
            answer = guest.hear()
        assert answer["no"] == "another doctor has its rendezvous at this port"

    assert visit(scene) == ([], [])


def test_a_coordinator_that_does_not_know_the_token_is_left() -> None:
    """It admits everybody: a host that has a token says that this is not its rendezvous, and obeys no order."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def play_coordinator() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(encode({"welcome": VERSION, "challenge": "1", "proof": "2"}))
                sock.recv(4096)

        thread = threading.Thread(target=play_coordinator, daemon=True)
        thread.start()
        plan = Plan(
            endpoint_host="127.0.0.1", endpoint_port=server.getsockname()[1], num_hosts=2, node_rank=1, is_coordinator=False,
            listen_address="127.0.0.2", measure=False, arrival_timeout_s=5.0, token=TOKEN,
        )  # fmt: skip
        with pytest.raises(JoinError) as caught:
            examine_hosts(Host(name="guest", env={}), (), plan, lambda _: None)
        thread.join(timeout=5)
    assert "does not have the token of this rendezvous" in caught.value.message


def test_an_ssh_that_has_ended_takes_no_secret(tmp_path: Path) -> None:
    """It ends before the token is written: its own last line is the reading, and closing breaks on no pipe."""
    said: list[str] = []
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec 0<&-\necho no route to host >&2\nexit 255\n")
    ssh.chmod(0o755)
    remotes = RemoteHosts(str(ssh), str(tmp_path), said.append)
    clock = SystemClock()
    for _ in range(3):
        remotes.start("far", ["rankwise", "doctor"], secret=TOKEN)
    end_s = clock.monotonic() + 10
    while len(said) < 3 and clock.monotonic() < end_s:
        clock.sleep(0.05)
        remotes.look()
    remotes.close(clock)
    assert said == ["rankwise: ssh does not reach far: no route to host"] * 3


def test_who_leaves_before_the_greeting_leaves_no_descriptor() -> None:
    """A port that is tried and left at once (a reset before the greeting goes out): its connection is closed here, too."""

    def count() -> int:
        return sum(one.name == "rankwise-link" for one in threading.enumerate())

    async def scene() -> None:
        server = LinkServer(mark="", name="host", clock=FakeClock())
        port = server.listen("127.0.0.1")
        for _ in range(3):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert json.loads(await reader.readline())["name"] == "host"
        for _ in range(1000):
            if count() == 1:
                break
            await asyncio.sleep(0.01)
        assert count() == 1
        writer.close()
        await writer.wait_closed()
        server.close()

    asyncio.run(scene())


def test_a_greeting_that_is_doled_out_ends_at_its_bound() -> None:
    """A byte now and then, as from a tarpit: whoever tries that port goes on after the time that a greeting has."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        other, _ = listener.accept()
        done = threading.Event()

        def dole() -> None:
            while not done.wait(0.02):
                other.send(b"x")

        thread = threading.Thread(target=dole)
        thread.start()
        with pytest.raises(TimeoutError):
            read_greeting(sock, 0.2)
        done.set()
        thread.join()
        other.close()


def test_hosts_with_one_token_meet() -> None:
    """The holder and two others, with a token: all get a result, and every link is open."""
    from doctor.test_rendezvous import make_plans, play

    ends = play(make_plans(3, token=TOKEN))
    assert [len(one.hosts) for one in ends] == [3, 3, 3]
    assert {one.outcome for one in ends[0].links} == {"ok"}


def test_a_hello_that_is_doled_out_holds_no_place() -> None:
    """A byte now and then: the connection is closed some seconds after it was opened, as is one that sends nothing at all."""
    assert visit(lambda guest: guest.dole_out(b"{"), hello_s=0.2) == ([], [])


def test_hosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes up hosts by the thousand is rejected from some number on; the coordinator's own has its place."""
    monkeypatch.setattr("rankwise.doctor.multi_host.peer._MOST_HOSTS", 2)
    nobody: Any = None
    peers = [Peer(connection=nobody, name=f"host{number}") for number in range(4)]
    admission = Admission("host0", Plan(endpoint_host="host0", endpoint_port=29500), lambda: peers[:2], FakeClock())
    refusal = admission.admit(peers[2])
    assert refusal is not None
    assert refusal["no"] == "2 hosts have joined already"
    peers[3].is_own = True
    assert admission.admit(peers[3]) is None


@pytest.mark.parametrize("count", [-1, 129, 2**53])
def test_no_holder_starts_thousands_of_ranks(count: int) -> None:
    """A number of ranks that no host has is an answer with both numbers, and no process."""
    told = run_ranks(Host(name="host", env={}), {"do": "all-reduce", "ranks": count, "backend": "gloo"})
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
