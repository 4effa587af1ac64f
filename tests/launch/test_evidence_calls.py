"""What a rank records of single calls: parts for each member, torch's functions between, exceptions on hand; and no trace of us in its errors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from evidence_ranks import RecordedRank, recorded_ranks
from support import line_of, write_script

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.evidence.reader.scene import Evidence

pytestmark = pytest.mark.linux

_BEGIN = """
    import os, sys, time, torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, x = dist.get_rank(), dist.get_world_size(), torch.ones(12)
"""


def _finish_all(ranks: list[RecordedRank]) -> list[Evidence]:
    for rank in ranks:
        code, _, err = rank.finish()
        assert code == 0, err
    return [rank.read() for rank in ranks]


def test_how_much_goes_from_one_to_another_is_told(tmp_path: Path) -> None:
    """Elements given to each member and expected from each, cut evenly, by lists or by rows; also in a part of the ranks."""
    script = write_script(tmp_path, _BEGIN + """
    gives = [[1, 2, 3], [0, 1, 2], [2, 0, 1]]
    mine, theirs = gives[rank], [row[rank] for row in gives]
    dist.all_to_all_single(torch.empty(12), x)
    dist.all_to_all_single(torch.empty(sum(theirs), 2), torch.ones(sum(mine), 2), theirs, mine)
    dist.all_gather([torch.empty(2) for _ in range(3)], x[:2])
    dist.reduce_scatter(torch.empty(rank + 1), [torch.ones(num + 1) for num in range(3)])
    pair = dist.new_group([2, 0])
    if rank != 1:
        cuts = [5, 0] if rank == 0 else [0, 5]
        dist.all_to_all_single(torch.empty(5), torch.ones(5), cuts, cuts, group=pair)
    dist.all_reduce(x)
    """)  # fmt: skip
    with recorded_ranks(script, 3) as ranks:
        told = _finish_all(ranks)
    parts = [[(op.gives, op.gets) for op in evidence.ops if op.gives] for evidence in told]
    gives = [(1, 2, 3), (0, 1, 2), (2, 0, 1)]
    for rank, mine in enumerate(gives):
        theirs = tuple(row[rank] for row in gives)
        assert parts[rank][0] == ((4, 4, 4), (4, 4, 4))
        assert parts[rank][1] == (tuple(2 * num for num in mine), tuple(2 * num for num in theirs))
        assert parts[rank][2] == ((2, 2, 2), (2, 2, 2))
        assert parts[rank][3] == ((1, 2, 3), (rank + 1,) * 3)
    assert [each[4:] for each in parts] == [[((5, 0), (5, 0))], [], [((0, 5), (0, 5))]]
    assert [op.name for op in told[0].ops if op.source == "python"][-1] == "all_reduce"
    assert not next(op for op in told[0].ops if op.name == "all_reduce" and op.source == "python").gives


def test_how_much_goes_in_lists_of_tensors_is_told(tmp_path: Path) -> None:
    """Elements given to each member and expected from each, where each part is a tensor of its own."""
    script = write_script(tmp_path, _BEGIN + """
    dist.all_to_all([torch.empty(3) for _ in range(2)], [torch.ones(3) for _ in range(2)])
    """)  # fmt: skip
    with recorded_ranks(script, 2) as ranks:
        ends = [rank.finish() for rank in ranks]
        told = [rank.read() for rank in ranks]
    if any("Backend gloo does not support alltoall" in err for _, _, err in ends):
        pytest.skip("Gloo of this torch has no all_to_all of lists of tensors")
    assert [code for code, _, _ in ends] == [0, 0], ends
    found = [next((op.gives, op.gets) for op in evidence.ops if op.gives) for evidence in told]
    assert found == [((3, 3), (3, 3))] * 2


def test_the_function_that_the_users_line_called_is_told(tmp_path: Path) -> None:
    """However many of torch's functions lie between it and the collective."""
    script = write_script(tmp_path, _BEGIN + """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    whole = distribute_tensor(x, init_device_mesh("cpu", (size,)), [Shard(0)])
    whole.full_tensor()  # the user's
    """)  # fmt: skip
    with recorded_ranks(script, 2) as ranks:
        zero, _ = _finish_all(ranks)
    found = [op for op in zero.ops if op.site == line_of(script, "# the user's")]
    assert found
    assert {op.inside[0] for op in found} == {"full_tensor"}


def test_an_exception_on_hand_is_told(tmp_path: Path) -> None:
    """A rank that raised and waits in its finally tells what it raised, and where; one that waits without any says so."""
    script = write_script(tmp_path, _BEGIN + """
    def look_up(step):
        return {}["key"] if rank == 1 and step == 2 else step
    try:
        for step in range(3):
            look_up(step)
            dist.all_reduce(x)
    finally:
        dist.barrier()  # waits
    """)  # fmt: skip
    with recorded_ranks(script, 2) as ranks:
        ranks[1].wait_until(lambda evidence: evidence.ops[-1].name == "barrier" if evidence.ops else False)
        ranks[0].wait_until(lambda evidence: len(evidence.ops) == 3)
        zero, one = ranks[0].ask(), ranks[1].ask()
    assert zero.handled == {}
    assert one.handled is not None
    fault = one.handled["MainThread"]
    assert fault.message == "KeyError: 'key'"
    assert fault.where == line_of(script, '["key"]')
    assert "in look_up" in fault.callstack
    assert one.stacks["MainThread"].where == line_of(script, "# waits")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 keeps the traceback beside the error")
def test_no_error_shows_a_line_of_ours(tmp_path: Path) -> None:
    """Tracebacks of calls that fail are those that torch alone would have given, whole, with what was raised before."""
    script = write_script(tmp_path, """
    import sys, time, torch, traceback, torch.distributed as dist
    from datetime import timedelta
    def tell(name, call):
        try:
            try: raise KeyError("before")
            except KeyError: call()
            print(name, "went well")
        except BaseException as error:
            text = "".join(traceback.format_exception(error)).splitlines()
            print(name, *(line for line in text if line.startswith("  File") or "During" in line), sep="\\n")
            print(type(error).__name__, "rankwise" in "".join(text))
    tell("meet", lambda: dist.init_process_group("mpi"))
    tell("rendezvous", lambda: dist.init_process_group("gloo", init_method="tcp://nowhere", rank=0, world_size=2))
    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(4)
    dist.barrier()
    tell("refused", lambda: dist.broadcast(x, src=9))
    tell("types", lambda: dist.group.WORLD.allreduce(7))
    tell("parts", lambda: dist.all_to_all_single(x, x, [9, 9], [9, 9]))
    tell("group", lambda: dist.new_group([0], backend="mpi"))
    if rank == 1:
        sys.stdout.flush(); time.sleep(0.5); import os; os._exit(0)
    tell("monitored", lambda: dist.monitored_barrier(timeout=timedelta(seconds=0.1)))
    tell("wait", lambda: dist.all_reduce(x, async_op=True).wait())
    tell("all_reduce", lambda: dist.all_reduce(x))
    tell("recv", lambda: dist.recv(x, 1))
    sys.stdout.flush(); import os; os._exit(0)
    """)  # fmt: skip
    told = []
    for is_watched in (True, False):
        with recorded_ranks(script, 2, is_watched=is_watched) as ranks:
            told.append([rank.finish()[1] for rank in ranks])
    assert told[0] == told[1]
    assert "RuntimeError False" in told[0][0]
    assert "went well" not in told[0][0]
    assert "True" not in told[0][0]
