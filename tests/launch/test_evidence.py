"""What a rank records of itself: its collectives, told alike on all ranks, also after it was killed; and nothing of the script is changed."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from evidence_ranks import RecordedRank, recorded_ranks
from python_forks import TRAINING
from rankwise.evidence.in_rank.ring import RingReader
from rankwise.evidence.reader.merge_records import Merger
from support import line_of, run_rankwise, write_script

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.evidence.reader.scene import Evidence, Op

pytestmark = pytest.mark.linux

_BEGIN = """
    import os, sys, time, torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, x = dist.get_rank(), dist.get_world_size(), torch.ones(4)
"""

_MIXED = (
    _BEGIN
    + """
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.monitored_barrier()
    pair, alone = dist.new_group([0, 2]), dist.new_group([1])
    if rank == 0: dist.send(x, 1)
    if rank == 1: dist.recv(x, 0)
    dist.broadcast(x, src=2)
    if rank != 1: dist.broadcast(x[:3], src=2, group=pair)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(x).sum().backward()
        optimizer.step()
    found = [None] * size
    dist.all_gather_object(found, rank)
    if rank < 2:
        for one in dist.batch_isend_irecv([dist.P2POp(dist.isend if rank == 0 else dist.irecv, x, 1 - rank)]): one.wait()
    try:
        dist.broadcast(x, src=9)
    except Exception:
        refused = True
    dist.all_reduce(x, async_op=True).wait()
    dist.barrier()
"""
)


def finish_all(ranks: list[RecordedRank]) -> list[Evidence]:
    """Wait until all ranks have ended well, and return what each has recorded."""
    for rank in ranks:
        code, _, err = rank.finish()
        assert code == 0, err
    return [rank.read() for rank in ranks]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Evidence]]:
    """Run the script above on three ranks, once; give it and what each rank has recorded."""
    script = write_script(tmp_path_factory.mktemp("mixed"), _MIXED)
    with recorded_ranks(script, 3, modules=TRAINING) as ranks:
        return script, finish_all(ranks)


def list_collectives(evidence: Evidence, group: str = "0") -> list[Op]:
    return [op for op in evidence.ops if op.group == group and not op.is_message]


def test_all_ranks_tell_the_same_numbers(mixed: tuple[Path, list[Evidence]]) -> None:
    """Collectives of Python and of C++ have one number each, the same on all ranks, whatever messages some of them exchange between."""
    zero, one, two = mixed[1]
    told = [[(op.seq, op.name, op.shapes, op.dtypes, op.site, op.source) for op in list_collectives(evidence)]
            for evidence in (zero, one, two)]  # fmt: skip
    assert told[0] == told[1] == told[2]
    numbers = [seq for seq, *_ in told[0]]
    # A monitored barrier takes two numbers of Gloo's.
    assert numbers == [1, 2, *range(4, numbers[-1] + 1)]
    assert zero.steps == 3
    assert zero.has_joined
    assert {name: group.ranks for name, group in zero.groups.items()} == {"0": (0, 1, 2), "1": (0, 2)}
    assert {name: group.ranks for name, group in one.groups.items()} == {"0": (0, 1, 2), "2": (1,)}
    assert not zero.missing


def test_a_collective_tells_what_it_is(mixed: tuple[Path, list[Evidence]]) -> None:
    """Name, root, reduce op, peer, line and the functions between are told in torch.distributed's words and global ranks."""
    script, (zero, one, _) = mixed
    first, *_ = list_collectives(zero)
    assert (first.name, first.reduce_op, first.shapes, first.dtypes) == (
        "all_reduce",
        "max",
        ((4,),),
        ("float32",),
    )
    assert first.site == line_of(script, "ReduceOp.MAX")
    (broadcast,) = list_collectives(zero, "1")
    assert (broadcast.root, broadcast.shapes) == (2, ((3,),))
    buckets = [op for op in zero.ops if op.source == "native" and "backward" in op.inside]
    assert len(buckets) == 3
    assert {op.name for op in buckets} == {"all_reduce"}
    assert {op.site for op in buckets} == {line_of(script, "backward()")}
    messages = [(op.name, op.peer, op.seq) for op in zero.ops if op.is_message]
    assert messages == [("send", 1, 1), ("isend", 1, 2)]
    assert [(op.name, op.peer) for op in one.ops if op.is_message] == [("recv", 0), ("irecv", 0)]
    assert all(op.is_over for op in zero.ops)
    assert any("all_gather_object" in op.inside for op in zero.ops)


def test_a_rank_that_is_stuck_shows_it(tmp_path: Path) -> None:
    """A rank that waits for a message that never comes is seen in it, with its stacks; when killed, what it was in can still be read."""
    script = write_script(tmp_path, _BEGIN + """
    import threading
    threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="sleeper").start()
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    net(x).sum().backward()
    if rank == 0: dist.recv(x, 1)
    time.sleep(1000)
    """)  # fmt: skip
    with recorded_ranks(script, 2) as ranks:
        ranks[0].wait_until(lambda evidence: any(op.name == "recv" for op in evidence.ops))
        seen = ranks[0].ask()
        assert (seen.ops[-1].name, seen.ops[-1].peer, seen.ops[-1].is_over) == ("recv", 1, False)
        assert seen.stacks["MainThread"].where == line_of(script, "dist.recv")
        assert seen.stacks["MainThread"].op == "recv"
        assert "sleeper" in seen.stacks
        assert any(op.source == "native" for op in seen.ops)
        assert seen.stacks_s is not None
        ranks[0].process.send_signal(signal.SIGKILL)
        ranks[0].process.wait()
        after = ranks[0].read()
    assert (after.ops[-1].name, after.ops[-1].site) == ("recv", line_of(script, "dist.recv"))
    assert after.ops[-1].is_over is False


def test_a_rank_that_waits_for_the_others_to_come_answers(tmp_path: Path) -> None:
    """Also in init_process_group, before it has joined anything: it says where it waits, and that it has come."""
    script = write_script(tmp_path, """
    import os, torch.distributed as dist
    store = dist.FileStore("store", 2)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    """)  # fmt: skip
    with recorded_ranks(script, 1, {"PWD": str(tmp_path)}, folder=tmp_path) as (rank,):
        rank.wait_until(lambda evidence: evidence.has_come)
        evidence = rank.ask()
        assert evidence.stacks["MainThread"].where == line_of(script, "init_process_group")
        assert not evidence.has_joined


def test_questions_are_answered_anew(tmp_path: Path) -> None:
    """A question asked twice is answered twice, with what is so by then; to a rank that has ended none does harm."""
    script = write_script(tmp_path, _BEGIN + """
    while not os.path.exists("go"): time.sleep(0.01)
    dist.barrier()
    print("through", flush=True)
    time.sleep(1000)
    """)  # fmt: skip
    with recorded_ranks(script, 1, {"PWD": str(tmp_path)}, folder=tmp_path) as (rank,):
        rank.wait_until(lambda evidence: evidence.has_joined)
        rank.wait_until(lambda _: rank.ask().stacks["MainThread"].where == line_of(script, "exists"))
        (tmp_path / "go").touch()
        rank.wait_until(lambda evidence: any(op.is_over for op in evidence.ops))
        rank.wait_until(lambda _: rank.ask().stacks["MainThread"].where == line_of(script, "sleep(1000)"))
        rank.process.kill()
        rank.process.wait()
        rank.place.ask()
        assert not rank.place.is_answered


def test_children_record_nothing(tmp_path: Path) -> None:
    """A forked child, as a worker of a DataLoader is, neither writes into the rank's records nor holds its descriptors."""
    script = write_script(tmp_path, _BEGIN + """
    dist.all_reduce(x)
    before = set(os.listdir("/proc/self/fd"))
    # A fork while Gloo's thread holds the lock of its queue would leave it locked in the child for good.
    others = [one for one in os.listdir("/proc/self/task") if int(one) != os.getpid()]
    while any(open(f"/proc/self/task/{one}/stat").read().rpartition(")")[2].split()[0] != "S" for one in others):
        time.sleep(0.001)
    child = os.fork()
    if not child:
        try:
            lone = torch.distributed.ProcessGroupGloo
            dist.distributed_c10d._world.default_pg.allreduce([x], dist.AllreduceOptions())
        finally:
            held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
            os._exit(any("memfd:evidence" in one for one in held))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(os.listdir("/proc/self/fd")) >= before
    dist.barrier()
    """)  # fmt: skip
    with recorded_ranks(script, 1) as ranks:
        (evidence,) = finish_all(ranks)
    assert [op.name for op in evidence.ops] == ["all_reduce", "barrier"]


def test_what_the_script_sees_is_torchs(tmp_path: Path) -> None:
    """Errors, warnings, signatures, threads, and what torch.compile makes of a collective are the same with and without."""
    script = write_script(tmp_path, _BEGIN + """
    import inspect, pickle, threading, traceback, warnings
    import torch.distributed._functional_collectives as functional
    def tell(name, call):
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                print(name, call(), [str(one.message) for one in seen])
        except BaseException as error:
            print(name, type(error).__name__, str(error).partition("<")[0][:60])
            print([one.name for one in traceback.extract_tb(error.__traceback__) if "rankwise" not in one.filename])
    class Own(dist.ProcessGroup):
        def broadcast(self, *args): return "mine"
    tell("root", lambda: dist.broadcast(x, src=9))
    tell("types", lambda: dist.all_reduce("x"))
    tell("direct", lambda: dist.group.WORLD.allreduce(7))
    tell("signature", lambda: inspect.signature(dist.ProcessGroup.allreduce))
    tell("doc", lambda: dist.ProcessGroup.allreduce.__doc__[:300].partition("0x")[0])
    tell("name", lambda: dist.ProcessGroup.barrier.__name__)
    tell("threads", lambda: [thread.name for thread in threading.enumerate()])
    tell("own", lambda: Own(0, 1).broadcast([x]))
    tell("inherited", lambda: Own(0, 1).allreduce([x]))
    tell("compiled", lambda: torch.compile(lambda: functional.all_reduce(x * 2, "sum", dist.group.WORLD), backend="eager", fullgraph=True)())
    def step():
        y = x * 2
        dist.broadcast(y, src=0)
        return y + 1
    tell("broken graph", torch.compile(step, backend="eager"))
    p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=0.5)
    def train():
        optimizer.step()
        return p.detach().clone()
    tell("optimizer", torch.compile(train, backend="eager"))
    tell("inductor", lambda: "torch._inductor" in sys.modules)
    """)  # fmt: skip
    told = []
    for is_watched in (True, False):
        with recorded_ranks(script, 1, is_watched=is_watched, modules=TRAINING) as (rank,):
            code, out, err = rank.finish()
            assert code == 0, err
            told.append(out)
            assert (rank.place.read() is not None) == is_watched
    assert told[0] == told[1]


def test_a_script_that_is_no_job_is_left_alone(tmp_path: Path) -> None:
    """Without a process group there is no thread, and torch's compiler is not imported for the flight recorder's sake."""
    script = write_script(tmp_path, """
        import os, sys, torch, torch.distributed as dist
        assert len(sys._current_frames()) == 1
        print(sorted(name for name in sys.modules if "rankwise" in name or name.startswith("torch._inductor")))
    """)  # fmt: skip
    with recorded_ranks(script, 1, modules=()) as (rank,):
        code, out, err = rank.finish()
    assert (code, out) == (0, "[]\n"), err


@pytest.mark.parametrize("way", [[], ["--cold"], ["--no-watch"]], ids=["warm", "cold", "off"])
def test_ranks_of_the_launcher_record(way: list[str], tmp_path: Path) -> None:
    """Forked from the warm server or started anew a rank records; with ``--no-watch`` nothing is wrapped, and there is no place to write."""
    script = write_script(tmp_path, _BEGIN + """
    dist.all_reduce(x)
    dist.barrier()
    with open(f"told.{rank}", "w") as file: file.write(str(hasattr(dist.ProcessGroup.allreduce, "__wrapped__")))
    places = [fd for fd in os.listdir("/proc/self/fd") if "memfd:evidence" in os.readlink(f"/proc/self/fd/{fd}")] if rank == 0 else []
    for place in places:
        with open("raw", "wb") as file: file.write(os.pread(int(place), 1 << 24, 0))
    dist.destroy_process_group()
    """.replace("os.readlink(f", "(os.path.islink(f\"/proc/self/fd/{fd}\") and os.readlink or str)(f"))  # fmt: skip
    result = run_rankwise([*way, "--nproc-per-node", "2", str(script)], tmp_path)
    assert result.code == 0, result.err
    is_on = way != ["--no-watch"]
    assert (tmp_path / "told.1").read_text() == str(is_on)
    assert (tmp_path / "raw").exists() == is_on
    if is_on:
        evidence = Merger().merge(RingReader((tmp_path / "raw").read_bytes()))
        assert [(op.seq, op.name, op.site) for op in evidence.ops] == [
            (1, "all_reduce", line_of(script, "dist.all_reduce(x)")),
            (2, "barrier", line_of(script, "dist.barrier()")),
        ]
        assert json.dumps(evidence.missing) == "[]"


def test_a_group_with_several_backends_is_one_group_for_each(tmp_path: Path) -> None:
    """Each backend of a group counts for itself, so each is a group of its own; DDP's collectives are counted with the script's."""
    script = write_script(tmp_path, """
        import torch, torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg
        dist.init_process_group("cpu:gloo,cuda:fake")
        rank, x = dist.get_rank(), torch.ones(4)
        dist.all_reduce(x)
        if rank == 0: dist.send(x, 1)
        if rank == 1: dist.recv(x, 0)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
        dist.barrier()
    """)  # fmt: skip
    with recorded_ranks(script, 2) as ranks:
        told = finish_all(ranks)
    for evidence in told:
        assert {name: group.backend for name, group in evidence.groups.items()} == {
            "0:gloo": "gloo",
            "0:fake": "fake",
        }
        collectives = list_collectives(evidence, "0:gloo")
        assert [op.seq for op in collectives] == list(range(1, len(collectives) + 1))
        assert {op.source for op in collectives} == {"python", "native"}
        assert not list_collectives(evidence)


def test_what_was_refused_is_not_counted(tmp_path: Path) -> None:
    """A call that torch refuses, as its tensors are wrong, leaves the numbers of all others as they are on the other ranks."""
    script = write_script(tmp_path, _BEGIN + """
    def refuse(call, *args):
        try:
            call(*args)
        except Exception:
            return
        raise AssertionError
    refuse(dist.broadcast, x, 9)
    refuse(dist.group.WORLD.send, [x.to_sparse()], 1 - rank, 0)
    refuse(dist.group.WORLD.allreduce, 7)
    if rank == 0: dist.send(x, 1)
    else: dist.recv(x, 0)
    dist.barrier()
    """)  # fmt: skip
    with recorded_ranks(script, 2) as ranks:
        zero, _ = finish_all(ranks)
    assert [(op.name, op.seq) for op in zero.ops] == [("send", 1), ("barrier", 1)]
