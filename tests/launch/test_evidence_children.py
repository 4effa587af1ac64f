"""Processes that a recorded rank starts, in all ways that Python has: they record nothing, hold nothing of ours, and are disturbed in nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from evidence_ranks import recorded_ranks
from support import write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux

#: In a child: what it holds of ours, whether torch.distributed is torch's own, and a collective among itself alone.
_CHILD = """
import os, sys
def look(_=None):
    import torch.distributed as dist
    held = []
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.islink(path) and "memfd:" in os.readlink(path): held.append(os.readlink(path))
    if not dist.is_initialized():
        import torch
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
    import threading
    return held, [name for name in sys.modules if "rankwise" in name], os.environ.get("RANKWISE_RANK"), threading.active_count()
"""
_RANK = """
import multiprocessing, os, subprocess, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from child import look
class Seen(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return [str(look()[:3])]
def spawned(index, folder):
    with open(os.path.join(folder, f"spawned.{index}"), "w") as file: file.write(str(look()[:3]))
def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    way = sys.argv[1]
    def pool(kind):
        with multiprocessing.get_context(kind).Pool(1) as workers: return [told[:3] for told in workers.map(look, range(2))]
    def load(kind):
        loader = torch.utils.data.DataLoader(Seen(), num_workers=1, multiprocessing_context=kind, collate_fn=lambda_free)
        return [one for batch in loader for told in batch for one in told]
    if way == "pool": print(pool(sys.argv[2]))
    if way == "loader": print(load(sys.argv[2]))
    if way == "program":
        code = "from child import look; print(look()[:3])"
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    if way == "mp.spawn":
        mp.spawn(spawned, args=(os.getcwd(),), nprocs=1)
        print([open("spawned.0").read()])
    dist.barrier()
def lambda_free(batch): return batch
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("way", ["pool fork", "pool spawn", "pool forkserver", "loader fork", "loader spawn", "program", "mp.spawn"])  # fmt: skip
def test_children_are_left_alone(way: str, tmp_path: Path) -> None:
    """A collective of their own goes well and is in nobody's records; no descriptor, variable or module of ours is in them."""
    (tmp_path / "child.py").write_text(_CHILD, encoding="utf-8")
    script = write_script(tmp_path, _RANK)
    with recorded_ranks(script, 1, folder=tmp_path, arguments=way.split()) as (rank,):
        code, out, err = rank.finish()
        assert code == 0, err
        evidence = rank.read()
    assert out.count("([], [], None)") >= 1
    assert out.count("([], [], None)") == out.count("None)")
    assert "rankwise" not in err
    assert [op.name for op in evidence.ops] == ["all_reduce", "barrier"]
