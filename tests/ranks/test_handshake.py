"""The ranks meet: whoever is absent, doubled, of another world or at a dead place is named, on every rank, in seconds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

import rankwise
from rankwise import HandshakeError, RendezvousError, UsageError
from rankwise.evidence.in_rank.rendezvous_registry import RendezvousRegistry, describe_process
from rankwise.runtime.handshake import shake_hands
from rankwise.testing import RankOutcome, run_ranks, try_ranks
from support import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.linux


def join(**arguments: Any) -> tuple[int, int, int, int]:
    """Join, and tell who we are."""
    with rankwise.init(**arguments) as ctx:
        ctx.agree(ctx.world_size, "world size")
        return ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size


def join_as(change: Callable[[int, dict[str, str]], None], **arguments: Any) -> Callable[[], Any]:
    """Return a rank's program: change the environment, then join."""

    def program() -> Any:
        change(int(os.environ["RANK"]), os.environ)  # type: ignore[arg-type]
        return join(**arguments)

    return program


def errors(outcomes: list[RankOutcome]) -> list[str]:
    """Return what each rank raised, as text; "" for none."""
    return ["" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}" for outcome in outcomes]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_meet_by_the_launchers_variables(world_size: int) -> None:
    """Under torchrun's variables every rank finds its place without an argument."""
    assert run_ranks(join, world_size) == [(rank, world_size, rank, world_size) for rank in range(world_size)]


def test_a_process_alone_is_a_world_of_one() -> None:
    """Without any variable, init() makes a world of one, in which collectives and agreements work."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    assert run_ranks(join, 1, env=dict.fromkeys(names)) == [(0, 1, 0, 1)]


@pytest.mark.parametrize("method", ["tcp", "file", "store"])
def test_ranks_meet_by_hand(method: str, tmp_path: Path) -> None:
    """By tcp://, file:// or a store of their own they meet too, and find their place on the host by its name."""
    port = free_port()

    def program() -> Any:
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        place: dict[str, Any] = {
            "tcp": {"init_method": f"tcp://127.0.0.1:{port}"},
            "file": {"init_method": f"file://{tmp_path}/meet"},
            "store": {},
        }[method]
        if method == "store":
            place = {"store": dist.FileStore(str(tmp_path / "store"), 3)}
        return join(rank=rank, world_size=3, **place)

    assert run_ranks(program, 3) == [(rank, 3, rank, 3) for rank in range(3)]


def test_ranks_may_leave_and_join_again() -> None:
    """After close() the same processes may join again, at the same store."""

    def program() -> list[Any]:
        return [join() for _ in range(3)]

    assert run_ranks(program, 2) == [[(rank, 2, rank, 2)] * 3 for rank in range(2)]


# ------------------------------------------------------- I1, I10, I11, I12


def test_an_absent_rank_is_named_on_every_rank() -> None:
    """I1: rank 1 never comes: both others name it, and only it, when the wait is over."""

    def program() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(4)
            return
        rankwise.init(arrival_timeout_s=1)

    told = errors(try_ranks(program, 3, timeout_s=30))
    for rank in (0, 2):
        assert told[rank].startswith(
            f"HandshakeError: [rank {rank}] after 1 s rank 1 of 3 has not arrived; arrived: rank 0 (pid "
        )
    assert told[1] == ""


def test_two_processes_of_one_rank_are_named_at_once() -> None:
    """I10: two processes claim rank 1, nobody is rank 2: every rank reads so, without waiting for rank 2."""
    outcomes = try_ranks(join_as(lambda rank, env: env.update(RANK=str(min(rank, 1)))), 3, timeout_s=20)
    for outcome in outcomes:
        assert isinstance(outcome.error, HandshakeError)
        assert "2 processes claim rank 1: pid " in str(outcome.error)
        assert outcome.error.hint


def test_a_rank_beyond_the_world_is_named_on_every_rank() -> None:
    """I11: rank 7 of a world of 2 is named to both ranks."""
    outcomes = try_ranks(join_as(lambda rank, env: env.update(RANK=str(7 * rank))), 2, timeout_s=20)
    for outcome in outcomes:
        assert "the ranks of a world of 2 are 0 to 1" in str(outcome.error)


def test_different_world_sizes_are_named_on_every_rank() -> None:
    """I12: one rank says 2 and the other 3: both read both numbers, at once."""

    def change(rank: int, env: dict[str, str]) -> None:
        env.update(WORLD_SIZE=str(2 + rank), LOCAL_WORLD_SIZE=str(2 + rank))

    outcomes = try_ranks(join_as(change), 2, timeout_s=20)
    for outcome in outcomes:
        assert isinstance(outcome.error, HandshakeError)
        assert "2 on rank 0 (pid" in str(outcome.error)
        assert "3 on rank 1 (pid" in str(outcome.error)


def test_another_script_or_torch_is_named_and_may_be_let_pass(tmp_path: Path) -> None:
    """R11, X19: another version of torch or another content of the script is an error; RANKWISE_HANDSHAKE=lenient makes it a line."""

    def program() -> Any:
        import torch

        if os.environ["RANK"] == "1":
            torch.__version__ = "2.12.0"
        script = tmp_path / os.environ["RANK"] / "train.py"
        script.parent.mkdir()
        script.write_text(f"# {script}")
        sys.modules["__main__"].__file__, sys.modules["__main__"].__spec__ = str(script), None
        return join()

    for outcome in try_ranks(program, 2, timeout_s=20):
        assert "the ranks have different versions of torch: " in str(outcome.error)
        assert "2.12.0: rank 1 (pid" in str(outcome.error)
    for folder in ("0", "1"):
        (tmp_path / folder / "train.py").unlink()
        (tmp_path / folder).rmdir()
    assert run_ranks(program, 2, env={"RANKWISE_HANDSHAKE": "lenient"}) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_two_ranks_on_one_gpu_are_named() -> None:
    """R13: ranks that report the same GPU, with NCCL, are told so before NCCL hangs. The GPU is a pretended one."""

    def program() -> Any:
        from rankwise.runtime import joining

        joining.choose_backend = lambda *_: "cpu:gloo,cuda:nccl"
        joining.find_device_id = lambda _: "GPU-4711"
        sys.modules["torch"].cuda.nccl.version = lambda: (2, 27, 3)
        return join()

    for outcome in try_ranks(program, 2, timeout_s=20):
        assert "use the same GPU GPU-4711" in str(outcome.error)


# ----------------------------------------------- contradictions of variables


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 1}, "WORLD_SIZE is 1 in the call and 2 in the environment"),
        ({"rank": 1, "world_size": 2}, "RANK is 1 in the call and 0 in the environment"),
        ({"init_method": "tcp://h:1?rank=1"}, "RANK is 1 in the call and 0 in the environment"),
        ({"rank": 0, "init_method": "tcp://h:1?rank=1"}, "rank is 0 in the call and 1 in its init_method"),
        ({"init_method": "tcp://h"}, "lacks host or port"),
        ({"init_method": "file://tmp/x"}, "names the host 'tmp'"),
        ({"init_method": "file://"}, "has no path"),
        ({"init_method": "http://h:1"}, "this is not a rendezvous"),
        ({"init_method": "tcp://h:1?rank=a"}, "rank='a'"),
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"timeout_s": "10"}, "timeout_s='10'"),
        ({"backend": "nccl"}, "backend 'nccl'"),
        ({"device": "cuda"}, "device 'cuda'"),
    ],
)
def test_a_call_that_contradicts_the_environment(
    arguments: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contradictions, addresses that can't be understood, and what this host has not (I17) are errors before anything is sent."""
    import torch

    if torch.cuda.is_available() and {"backend", "device"} & set(arguments):
        pytest.skip("this host has what is asked for")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        rankwise.init(**arguments)
    assert text in str(caught.value)
    assert caught.value.hint


def test_a_rank_without_a_world_is_told_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """I14: half of the variables, or half of the arguments, is an error that names the other half."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="nor the environment gives the world_size"):
        rankwise.init(rank=1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="RANK=0 is set, but WORLD_SIZE is not"):
        rankwise.init()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT are not set"):
        rankwise.init()


def test_a_wrong_interface_for_gloo_is_named_with_the_right_ones() -> None:
    """I6: GLOO_SOCKET_IFNAME in NCCL's syntax, or of no interface, is an error that lists this host's."""
    for outcome in try_ranks(join, 2, env={"GLOO_SOCKET_IFNAME": "^lo"}, timeout_s=20):
        assert "GLOO_SOCKET_IFNAME=^lo: this host has no interface ^lo, but lo" in str(outcome.error)
        assert "no exclusions" in str(outcome.error)


def test_joining_twice_says_where_the_first_time_was() -> None:
    """I16: a second init() names the line of the first; one beside a foreign process group names that."""

    def program() -> list[str]:
        import torch.distributed as dist

        told = []
        with rankwise.init(), pytest.raises(UsageError) as caught:
            rankwise.init()
        told.append(str(caught.value))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(UsageError) as caught:
            rankwise.init()
        return [*told, str(caught.value)]

    for told in run_ranks(program, 2):
        assert "test_handshake.py:" in told[0]
        assert "which rankwise.init() did not create" in told[1]


def test_asking_before_joining() -> None:
    """I15: the context of a process that has not joined is an error that says how to join."""
    with pytest.raises(UsageError, match="has not joined a job"):
        rankwise.current()


# -------------------------------------------------- places that are no good


def test_nobody_at_the_stores_address() -> None:
    """I2, I27: where nobody listens, rank 1 reads the address and what to compare."""

    def change(rank: int, env: dict[str, str]) -> None:
        env.update(MASTER_PORT="1" if rank else env["MASTER_PORT"])

    told = errors(try_ranks(join_as(change, arrival_timeout_s=4), 2, timeout_s=30))
    assert "the launcher's store was not found at 127.0.0.1:1 within 4 s: Connection refused" in told[1]
    assert "rank 1 of 2 has not arrived" in told[0]


def test_a_host_without_an_address() -> None:
    """I3: a name that can't be looked up is told at once, as a name."""
    outcomes = try_ranks(join, 1, env={"MASTER_ADDR": "no-such-host.invalid", "WORLD_SIZE": "2"}, timeout_s=30)
    assert isinstance(outcomes[0].error, RendezvousError)
    assert "'no-such-host.invalid' of the store has no address here" in str(outcomes[0].error)


def test_a_taken_port_names_who_has_it() -> None:
    """I9: where the port is taken, rank 0 reads by whom."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"MASTER_PORT": str(taken.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        outcomes = try_ranks(
            join_as(lambda *_: None, arrival_timeout_s=1), 1, env={**env, "WORLD_SIZE": "2"}, timeout_s=30
        )
        assert f"the port is taken by pid {os.getpid()}" in str(outcomes[0].error)


def start(code: str, *args: str) -> subprocess.Popen[str]:
    """Start a Python program beside us."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *args], stdout=subprocess.PIPE, text=True)


def test_a_file_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    """I13: a run that was killed left its file:// behind; the next one is told so, and which file."""
    path = tmp_path / "meet"

    def die() -> None:
        rankwise.init(rank=int(os.environ["RANK"]), init_method=f"file://{path}")
        os.kill(os.getpid(), signal.SIGKILL)

    try_ranks(die, 2, timeout_s=20)
    assert path.exists()
    for outcome in try_ranks(join_as(lambda *_: None, init_method=f"file://{path}"), 2, timeout_s=20):
        assert isinstance(outcome.error, RendezvousError)
        assert f"file://{path} holds the traces of another run" in str(outcome.error)
        assert f"rm {path}" in str(outcome.error)


def test_a_file_whose_first_rank_died_is_not_joined(tmp_path: Path) -> None:
    """I13: rank 0 of an earlier try came and died; whoever comes next is not paired with a ghost."""
    path = tmp_path / "meet"

    def come_and_die() -> None:
        import threading

        threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        rankwise.init(init_method=f"file://{path}")

    try_ranks(come_and_die, 1, env={"WORLD_SIZE": "2"}, timeout_s=20)
    outcomes = try_ranks(join_as(lambda *_: None, init_method=f"file://{path}"), 2, timeout_s=20)
    told = errors(outcomes)
    assert any("(it has ended)" in text for text in told), told
    assert all("(it has ended)" in text or f"rm {path}" in text for text in told), told


def test_a_frozen_store_is_told_in_time() -> None:
    """A store whose process is stopped answers nobody, and torch's timeouts don't help: ours does."""
    server = start("""
        import sys, time
        from torch.distributed import TCPStore
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        print(store.port, flush=True)
        time.sleep(60)
    """)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        server.send_signal(signal.SIGSTOP)
        outcomes = try_ranks(join_frozen, 1, env={"MASTER_PORT": port, "WORLD_SIZE": "2"}, timeout_s=40)
    finally:
        server.kill()
        server.communicate()
    assert isinstance(outcomes[0].error, RendezvousError)
    assert f"the store at 127.0.0.1:{port} was reached, but did not answer" in str(outcomes[0].error)


def join_frozen() -> None:
    """Join with bounds that a test can wait for."""
    from rankwise.runtime import joining

    joining._GRACE_S = 1.0
    rankwise.init(arrival_timeout_s=1)


def test_a_refused_rank_leaves_no_process_group() -> None:
    """After a handshake that failed, the process can join another job."""

    def program() -> Any:
        with pytest.raises(HandshakeError):
            rankwise.init(arrival_timeout_s=0.5)
        os.environ.update(WORLD_SIZE="1", RANK="0")
        return join()

    assert run_ranks(program, 1, env={"WORLD_SIZE": "2"}) == [(0, 1, 0, 1)]


# ------------------------------------------------ what must not be mistaken


def test_job_ids_that_differ_are_no_mistake() -> None:
    """A terminal inside salloc has SLURM_JOB_ID and another has not: their ranks meet."""

    def change(rank: int, env: dict[str, str]) -> None:
        env.update({"SLURM_JOB_ID": "77"} if rank else {})

    assert run_ranks(join_as(change), 2) == [(0, 2, 0, 2), (1, 2, 1, 2)]


@pytest.mark.parametrize(
    ("gone", "arguments"),
    [("RANK", {"rank": True}), ("RANK", {"rank": True, "world_size": 2}), ("WORLD_SIZE", {"world_size": 2})],
)
def test_one_half_may_be_told_by_the_call(gone: str, arguments: dict[str, Any]) -> None:
    """Rank from the call and world size from the environment, or the other way round, are no contradiction."""

    def program() -> Any:
        rank = int(os.environ["RANK"])
        del os.environ[gone]
        return join(**{name: rank if value is True else value for name, value in arguments.items()})

    assert run_ranks(program, 2) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_the_query_of_an_env_address_counts() -> None:
    """``env://?rank=0&world_size=2`` is no world of one."""

    def program() -> Any:
        rank = os.environ.pop("RANK")
        del os.environ["WORLD_SIZE"]
        return join(init_method=f"env://?rank={rank}&world_size=2")

    assert run_ranks(program, 2) == [(0, 2, 0, 2), (1, 2, 1, 2)]


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a TCP port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a TCP port"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is not set"),
    ],
)
def test_addresses_that_cannot_be(env: dict[str, str], text: str) -> None:
    """A port out of range and an empty host are told on every rank, before anybody waits."""
    for outcome in try_ranks(join, 2, env=env, timeout_s=20):
        assert isinstance(outcome.error, UsageError)
        assert text in str(outcome.error)


def test_a_file_of_a_meeting_that_failed_is_refused_by_name(tmp_path: Path) -> None:
    """I13: the first run lacked a rank; the second, complete, is told to remove the file, and not that somebody is absent."""
    path = tmp_path / "meet"
    alone = join_as(lambda *_: None, init_method=f"file://{path}", arrival_timeout_s=0.5)
    assert "has not arrived" in errors(try_ranks(alone, 1, env={"WORLD_SIZE": "2"}, timeout_s=20))[0]
    for text in errors(try_ranks(alone, 2, timeout_s=20)):
        assert f"rm {path}" in text


def test_given_stores_of_unequal_lifetimes(tmp_path: Path) -> None:
    """One rank keeps its old stores and the other drops them: each new store is a new meeting all the same."""

    def program() -> list[Any]:
        import torch.distributed as dist

        kept, seen = [], []
        for number in range(3):
            store = dist.FileStore(str(tmp_path / str(number)), 2)
            seen.append(join(store=store))
            kept += [store] if os.environ["RANK"] == "0" else []
        return seen

    assert run_ranks(program, 2) == [[(rank, 2, rank, 2)] * 3 for rank in range(2)]


def test_a_rank_that_dies_while_all_connect_is_named() -> None:
    """Killed between handshake and process group: the others name it, in seconds, and can join another job."""

    def program() -> Any:
        from rankwise.runtime import joining

        rank = int(os.environ["RANK"])
        connect = joining.connect

        def die(*args: Any, **options: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return connect(*args, **options)

        joining.connect = die
        with pytest.raises(RendezvousError) as caught:
            rankwise.init()
        joining.connect = connect
        os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="")
        return str(caught.value), join()

    outcomes = try_ranks(program, 3, timeout_s=40)
    for rank in (0, 2):
        text, again = outcomes[rank].value or (str(outcomes[rank].error), None)
        assert "rank 1 ended before all were connected" in text
        assert again == (0, 1, 0, 1)


# ------------------------------------------------------------- the last word


class MovedClock:
    """A clock that only ``sleep`` moves; ``at`` some moment, something happens."""

    def __init__(self, at_s: float, happen: Callable[[], object]) -> None:
        self.now_s, self._at_s, self._happen = 0.0, at_s, happen

    def monotonic(self) -> float:
        """Return the seconds slept so far."""
        return self.now_s

    def time(self) -> float:
        """Return the same."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Move on."""
        before, self.now_s = self.now_s, self.now_s + seconds
        if before < self._at_s <= self.now_s:
            self._happen()


def meet_a_double(heard_at_s: float, *, serves: bool) -> float:
    """Meet another rank 0, which reads the verdict at some moment; return when we left with the error."""
    store, who = dist.HashStore(), {"rank": 0, "world_size": 2, "backend": "gloo", "local_rank": 0}
    double = RendezvousRegistry(store, describe_process(**who))
    double.enter()
    clock = MovedClock(heard_at_s, lambda: double.count_readers(1))
    with pytest.raises(HandshakeError, match="2 processes claim rank 0"):
        shake_hands(store, describe_process(**who), timeout_s=9, strict=True, serves=serves, clock=clock, notice=print)
    return clock.now_s


def test_whoever_serves_the_store_stays_until_the_others_have_read_the_verdict() -> None:
    """Else these would read of a lost store; and the stay has a bound, where somebody never reads."""
    assert 1.0 <= meet_a_double(1.0, serves=True) < 1.5
    assert 3.0 <= meet_a_double(99.0, serves=True) < 3.5
    assert meet_a_double(1.0, serves=False) == 0.0
