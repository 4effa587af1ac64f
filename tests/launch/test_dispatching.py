"""RANKWISE_WATCH=dispatcher: what C++ issues is in the rank's own records, without torch's flight recorder, and nothing of it is doubled."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest

from evidence_ranks import RecordedRank, recorded_ranks
from python_forks import TRAINING
from rankwise.evidence.in_rank.ring import RingReader
from rankwise.evidence.reader.merge_records import Merger
from support import line_of, run_rankwise, write_script

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.evidence.reader.scene import Evidence

pytestmark = pytest.mark.linux

_ASKS = {"RANKWISE_WATCH": "dispatcher"}
_BLIND = {**_ASKS, "TORCH_FR_BUFFER_SIZE": "0"}
_BEGIN = """
    import os, sys, time, torch, torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, x = dist.get_rank(), dist.get_world_size(), torch.ones(12)
"""
_TRAINS = (
    _BEGIN
    + """
    dist.all_reduce(x)
    if rank == 0: dist.send(x, 1)
    if rank == 1: dist.recv(x, 0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
    cuts, theirs = ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])
    functional.all_to_all_single(torch.ones(sum(cuts), 2), theirs, cuts, dist.group.WORLD) + 0  # uneven
    found = torch.compile(lambda y: functional.all_reduce(y * 2, "sum", dist.group.WORLD) + 1, backend="eager", fullgraph=True)(x)
    dist.monitored_barrier()
    try: dist.broadcast(x, src=9)
    except Exception: pass
    dist.barrier()
"""
)


def _finish_all(ranks: list[RecordedRank]) -> list[Evidence]:
    for rank in ranks:
        code, _, err = rank.finish()
        assert code == 0, err
        assert "rankwise" not in err
    return [rank.read() for rank in ranks]


@pytest.mark.parametrize("env", [_BLIND, _ASKS], ids=["alone", "beside"])
def test_what_cpp_issues_is_in_the_ring(env: dict[str, str], tmp_path: Path) -> None:
    """Buckets, DDP's own broadcasts and functional collectives, under torch's numbers, each once; the same with the flight recorder beside it."""
    script = write_script(tmp_path, _TRAINS)
    with recorded_ranks(script, 2, env, modules=TRAINING) as ranks:
        zero, one = _finish_all(ranks)
    rows = [
        [(op.seq, op.name, op.shapes, op.dtypes, op.site, op.source, op.inside, op.gives) for op in evidence.ops if not op.is_message]
        for evidence in (zero, one)
    ]  # fmt: skip
    assert [row[:6] for row in rows[0] if not row[7]] == [row[:6] for row in rows[1] if not row[7]]
    numbers = [row[0] for row in rows[0]]
    assert len(set(numbers)) == len(numbers)
    buckets = [op for op in zero.ops if "backward" in op.inside]
    assert [(op.name, op.source, op.site) for op in buckets] == [
        ("all_reduce", "native", line_of(script, "backward()"))
    ] * 2
    assert {op.is_over for op in buckets} == ({None} if env is _BLIND else {True})
    (exchange,) = [op for op in zero.ops if op.site == line_of(script, "# uneven")]
    assert (exchange.name, exchange.gives, exchange.gets) == ("all_to_all_single", (2, 4), (2, 6))
    assert any(op.name == "broadcast" and op.source == "native" and op.root == 0 for op in zero.ops)
    assert [op.name for op in zero.ops if op.source == "python"] == [
        "all_reduce", "send", "monitored_barrier", "barrier",
    ]  # fmt: skip
    assert not zero.missing


def test_a_killed_rank_shows_what_ddp_was_in(tmp_path: Path) -> None:
    """Nobody has asked it before it was killed, and the flight recorder went with it."""
    script = write_script(tmp_path, _BEGIN + """
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
    net(torch.ones(2, 4)).sum().backward()
    if rank == 0: net(torch.ones(2, 4)).sum().backward()  # alone
    time.sleep(1000)
    """)  # fmt: skip
    alone = line_of(script, "# alone")
    with recorded_ranks(script, 2, _BLIND) as ranks:
        ranks[0].wait_until(lambda evidence: any(op.site == alone for op in evidence.ops))
        ranks[0].process.send_signal(signal.SIGKILL)
        ranks[0].process.wait()
        last = ranks[0].read().ops[-1]
    assert (last.site, last.source, last.is_over) == (alone, "native", None)
    assert last.name in {"broadcast", "all_reduce"}


def test_the_flag_tells_the_ranks(tmp_path: Path) -> None:
    """``--watch-dispatcher`` reaches ranks that are forked from the warm server."""
    script = write_script(tmp_path, _BEGIN + """
    functional.all_reduce(x, "sum", dist.group.WORLD) + 0
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.islink(path) and "memfd:evidence" in os.readlink(path):
            with open("raw", "wb") as file: file.write(os.pread(int(fd), 1 << 24, 0))
    """)  # fmt: skip
    result = run_rankwise(["--watch-dispatcher", str(script)], tmp_path, env={"TORCH_FR_BUFFER_SIZE": "0"})
    assert result.code == 0, result.err
    evidence = Merger().merge(RingReader((tmp_path / "raw").read_bytes()))
    assert [(op.name, op.source) for op in evidence.ops] == [("all_reduce", "native")]


def test_errors_are_those_of_torch(tmp_path: Path) -> None:
    """Also below Python: what C++ raises goes through us as it is, and what was refused is not recorded."""
    script = write_script(tmp_path, _BEGIN + """
    import traceback
    def tell(call):
        try: call()
        except Exception as error: print(type(error).__name__, str(error).splitlines()[0], [one.name for one in traceback.extract_tb(error.__traceback__)])
    tell(lambda: functional.all_reduce(x.to_sparse(), "product", dist.group.WORLD))
    tell(lambda: dist.all_reduce(x.to_sparse(), op=dist.ReduceOp.MAX))
    dist.barrier()
    """)  # fmt: skip
    told = []
    for env in (_BLIND, {"TORCH_FR_BUFFER_SIZE": "0"}):
        with recorded_ranks(script, 1, env) as (rank,):
            code, out, err = rank.finish()
            assert code == 0, err
            # Python 3.10 keeps the traceback beside the error, and shows our frame all the same.
            told.append(out if sys.version_info >= (3, 11) else out.replace(", 'issue']", "]"))
            assert [op.name for op in rank.read().ops] == ["barrier"]
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == 2
