"""What a rank with a GPU records of itself: NCCL's collectives beside Gloo's, those of Python and those that C++ issues."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from evidence_ranks import recorded_ranks
from gpu_ranks import ENV, IS_CUDA
from support import write_script

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Evidence, Op

pytestmark = pytest.mark.linux
SCRIPT = f"""
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
device = {"cuda" if IS_CUDA else "cpu"!r}
dist.init_process_group({"cpu:gloo,cuda:nccl" if IS_CUDA else "gloo"!r})
dist.all_reduce(torch.ones(3, device=device))
dist.all_reduce(torch.ones(5))
net = DistributedDataParallel(torch.nn.Linear(4, 3).to(device))
for _ in range(3):
    net(torch.ones(2, 4, device=device)).sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
open("trained", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evidence, str]:
    """What a rank answers while it lives and is at rest; and what it says until its end."""
    folder = tmp_path_factory.mktemp("recorded")
    with recorded_ranks(write_script(folder, SCRIPT), 1, {"CUBLAS_WORKSPACE_CONFIG": ENV["CUBLAS_WORKSPACE_CONFIG"]}, folder=folder, modules=()) as (rank,):  # fmt: skip
        end = time.monotonic() + 90
        while not (folder / "trained").exists() and rank.process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert (folder / "trained").exists(), rank.process.communicate()
        evidence = rank.ask()
        (folder / "go").touch()
        code, _, err = rank.finish()
        assert code == 0, err
        return evidence, err


def _list(evidence: Evidence, source: str) -> list[Op]:
    return [op for op in evidence.ops if op.source == source and op.name == "all_reduce"]


def test_ddps_gradients_on_nccl_are_seen(asked: tuple[Evidence, str]) -> None:
    """NCCL keeps what C++ issues in a flight recorder of its own: it is read, and all three passes are over."""
    buckets = _list(asked[0], "native")
    assert [op.shapes for op in buckets] == [((15,),)] * 3
    assert {op.dtypes for op in buckets} == {("float32",)}
    assert all(op.is_over for op in buckets)
    assert {op.group for op in buckets} == ({"0:nccl"} if IS_CUDA else {"0"})


def test_each_backend_of_a_group_counts_for_itself(asked: tuple[Evidence, str]) -> None:
    """The script's own reduction of a CUDA tensor is NCCL's first, that of a CPU tensor Gloo's first."""
    own = [(op.group, op.seq, op.shapes) for op in _list(asked[0], "python")]
    assert own == ([("0:nccl", 1, ((3,),)), ("0:gloo", 1, ((5,),))] if IS_CUDA else [("0", 1, ((3,),)), ("0", 2, ((5,),))])  # fmt: skip


def test_the_recorder_misses_nothing_and_says_nothing(asked: tuple[Evidence, str]) -> None:
    """No part of the evidence is missing, and on the rank's standard error there is no word of rankwise."""
    evidence, err = asked
    assert evidence.missing == ()
    assert "rankwise" not in err
