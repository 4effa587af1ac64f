"""The ranks as a grid: degrees are checked in one place, and data is dealt out by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

import rankwise
from rankwise.data.metrics import Mean
from rankwise.runtime.mesh import AXES, read_degrees
from rankwise.testing import run_ranks


@pytest.mark.parametrize(
    ("wanted", "size", "degrees"),
    [
        ({"shard": -1}, 8, [1, 1, 8, 1]),
        ({"tensor": 2, "replicate": -1, "shard": 2}, 8, [1, 2, 2, 2]),
        ({"pp": 2, "dp_replicate": 1, "dp_shard": -1, "tp": 2}, 8, [2, 1, 2, 2]),
        ({"replicate": 1}, 1, [1, 1, 1, 1]),
        ({}, 1, [1, 1, 1, 1]),
    ],
)
def test_degrees_make_up_the_ranks(wanted: dict[str, int], size: int, degrees: list[int]) -> None:
    """One axis may take what is left, torchtitan's names are the same axes, and the order is that of AXES."""
    assert list(read_degrees(wanted, size).items()) == list(zip(AXES, degrees, strict=True))


@pytest.mark.parametrize(
    ("wanted", "size", "words"),
    [
        ({"shard": 3}, 8, "has 3 positions, and the job 8 ranks"),
        ({"shard": 3, "tensor": -1}, 8, "8 ranks can't be divided by 3"),
        ({"shard": -1, "tensor": -1}, 8, "leaves shard and tensor open"),
        ({"rows": 2}, 2, "has an axis 'rows'"),
        ({"tp": 2, "tensor": 1}, 2, "names an axis twice"),
        ({"shard": 0}, 2, "shard=0"),
        ({"shard": 2.0}, 2, "shard=2.0"),
        ([2, 2], 4, "is a list"),
    ],
)
def test_degrees_that_cant_be_are_named(wanted: Any, size: int, words: str) -> None:
    """The error holds both numbers or the axis, and a way out."""
    with pytest.raises(rankwise.UsageError) as caught:
        read_degrees(wanted, size)
    assert words in str(caught.value)
    assert caught.value.hint


def look_around() -> dict[str, Any]:
    with rankwise.init(device="cpu", mesh={"replicate": 2, "shard": -1, "tensor": 2}) as ctx:
        mesh = ctx.mesh()
        data = TensorDataset(torch.arange(10))
        loader = rankwise.DataLoader(data, global_batch=4, shuffle=False)
        ctx.seed(3)
        with pytest.raises(rankwise.UsageError, match="has a mesh already"):
            ctx.mesh(shard=8)
        with pytest.raises(rankwise.UsageError, match="no axis 'pipeline'"):
            mesh.of("pipeline")
        with pytest.raises(rankwise.UsageError, match="shards it by tensor"):
            rankwise.apply_ddp(torch.nn.Linear(2, 2))
        return {
            "place": tuple(mesh.position.values()),
            "groups": [torch.distributed.get_process_group_ranks(mesh.of(axis).get_group()) for axis in ("replicate", "shard", "tensor")],
            "batches": [batch[0].tolist() for batch in loader],
            "sampler": (rankwise.DistributedSampler(data).num_replicas, rankwise.GlobalBatchSampler(10, global_batch=4).num_replicas),
            "noise": float(torch.rand(())),
            "plan": str(ctx.plan_batch(global_size=8)),
            "scale": next(iter(loader.steps())).scale,
            "metrics": rankwise.evaluate(torch.nn.Identity(), TensorDataset(torch.arange(10.0), torch.zeros(10)), {"mean": Mean(lambda x, _: x)}, batch_size=3),
            "predicted": rankwise.predict(torch.nn.Identity(), torch.arange(10.0), batch_size=3),
        }  # fmt: skip


def test_tensor_ranks_share_their_batch() -> None:
    """On replicate 2 x shard 2 x tensor 2, each batch is cut into four; neighbours have the same samples and the same noise, and count once."""
    found = run_ranks(look_around, 8)
    assert [one["place"] for one in found] == [(0, a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    assert found[0]["groups"] == [[0, 4], [0, 2], [0, 1]]
    assert found[7]["groups"] == [[3, 7], [5, 7], [6, 7]]
    for left, right in zip(found[::2], found[1::2], strict=True):
        assert left["batches"] == right["batches"]
        assert left["noise"] == right["noise"]
    assert len({one["noise"] for one in found}) == 4
    samples = [sample for one in found[::2] for batch in one["batches"] for sample in batch]
    assert sorted(samples) == list(range(10))
    for one in found:
        assert one["sampler"] == (4, 4)
        assert one["metrics"] == {"mean": 4.5}
        assert one["scale"] == 1.0
        assert one["plan"] == found[0]["plan"]
    assert "4 ranks x 1 passes x 2 samples" in found[0]["plan"]
    assert found[0]["predicted"].tolist() == list(range(10))


def adopt() -> Any:
    with rankwise.init(device="cpu") as ctx:
        mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        mesh = ctx.mesh(mine)
        unnamed = init_device_mesh("cpu", (2, 2))
        ctx._meshes.clear()
        with pytest.raises(rankwise.UsageError, match="without names"):
            ctx.mesh(unnamed)
        with pytest.raises(rankwise.UsageError, match="in the order tp, dp_shard"):
            ctx.mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard")))
        return mesh.data_rank, mesh.data_size, mesh.of("tensor").mesh_dim_names


def test_torchs_own_mesh_is_taken() -> None:
    """A DeviceMesh with torchtitan's names is the job's mesh; one without names, or in another order, is refused."""
    assert run_ranks(adopt, 4) == [(rank // 2, 2, ("tp",)) for rank in range(4)]


def differ(rank_of: int) -> str:
    rank = int(__import__("os").environ["RANK"])
    with pytest.raises(rankwise.CollectiveError) as caught:
        rankwise.init(device="cpu", mesh={"shard": 2, "replicate": 1} if rank == rank_of else {"replicate": 2})
    with rankwise.init(device="cpu"):  # the job was left in order: it can be joined again
        return str(caught.value)


def test_ranks_that_want_other_meshes_are_told() -> None:
    """The ranks do not agree on the mesh: the error says who wants what."""
    for text in run_ranks(differ, 2, 1):
        assert "do not agree on the mesh" in text
        assert "shard 2" in text
        assert "replicate 2" in text
