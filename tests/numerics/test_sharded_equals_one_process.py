"""Models cut over the ranks by FSDP train as one process does: the Trainer's curves under every mesh against a loop by hand."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

import rankwise
from one_process import MODELS, OPTIMIZERS, TOLERANCE, assert_same, fit, train_by_hand
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def shard(model: torch.nn.Module, mesh: dict[str, int], **options: Any) -> torch.nn.Module:
    rankwise.current().mesh(mesh)
    return rankwise.apply_fsdp(model, sync_batchnorm=True, **options)


def fit_sharded(
    cases: list[tuple[str, str, dict[str, int], dict[str, Any]]], options: dict[str, Any]
) -> list[Any]:
    return [
        fit(kind, optimizer, spread=functools.partial(shard, mesh=mesh, **how), **options)
        for kind, optimizer, mesh, how in cases
    ]


MESHES = {2: [{"shard": 2}], 3: [{"shard": -1}], 4: [{"shard": 4}, {"replicate": 2, "shard": 2}]}


@pytest.mark.parametrize("world_size", MESHES)
def test_fsdp_and_hsdp_have_one_processs_curves(world_size: int) -> None:
    """MLP, BatchNorm net and transformer with uneven tokens, SGD to 1e-12 and AdamW to 1e-9 over 50 steps, in float64."""
    cases = [(kind, opt, mesh, {}) for kind in MODELS for opt in OPTIMIZERS for mesh in MESHES[world_size]]
    for found in run_ranks(fit_sharded, world_size, cases, {}, timeout_s=300):
        for (kind, optimizer, mesh, _), ours in zip(cases, found, strict=True):
            assert_same(
                ours, train_by_hand(kind, optimizer), TOLERANCE[optimizer], f"{mesh}, {kind}, {optimizer}"
            )


@pytest.mark.parametrize("world_size", [2, 4])
def test_accumulation_and_clipping_change_nothing(world_size: int) -> None:
    """Two micro-batches a step, some of no samples, gradients sent with each or with the last only, and clipped: one process's curve."""
    # 195 samples: the last step of an epoch has 3.
    options = {"num_micro": 2, "clip_norm": 0.3, "num_samples": 195}
    cases = [
        ("transformer", optimizer, mesh, {"defer_gradients": defers})
        for optimizer in OPTIMIZERS
        for mesh in MESHES[world_size]
        for defers in (False, True)
    ]
    for found in run_ranks(fit_sharded, world_size, cases, options, timeout_s=300):
        for (kind, optimizer, mesh, how), ours in zip(cases, found, strict=True):
            expected = train_by_hand(kind, optimizer, clip_norm=0.3, num_samples=195)
            assert_same(ours, expected, TOLERANCE[optimizer], f"{mesh}, {how}, {optimizer}")


def go_on(mesh: dict[str, int] | str | None, folder: Path, stop_after: int | None) -> Any:
    spread = functools.partial(shard, mesh=mesh) if isinstance(mesh, dict) else None
    return fit("batchnorm", "adamw", folder=folder, stop_after=stop_after, spread=spread, cut=mesh == "zero")


def test_a_stop_and_another_composition_change_nothing(tmp_path: Path) -> None:
    """DDP on 2 ranks, then FSDP on 4, ZeRO-1 on 3, HSDP, ZeRO-1 on 2, one process, FSDP on 3: weights and AdamW's states go from each to the next, and the curve is one."""
    stages: list[tuple[int, dict[str, int] | str | None, int | None]] = [
        (2, None, 6), (4, {"shard": 4}, 13), (3, "zero", 19), (4, {"replicate": 2, "shard": 2}, 26), (2, "zero", 32), (1, None, 37),
        (3, {"shard": -1}, 43), (2, None, None),
    ]  # fmt: skip
    for world_size, mesh, stop_after in stages:
        found = run_ranks(go_on, world_size, mesh, tmp_path / "run", stop_after, timeout_s=120)
    for ours in found:
        assert_same(ours, train_by_hand("batchnorm", "adamw"), TOLERANCE["adamw"], "seven changes")


def fit_replicated(cut: bool) -> list[Any]:
    options = {"num_micro": 2, "clip_norm": 0.3, "num_samples": 195, "cut": cut}
    return [fit(kind, optimizer, **options) for kind in ("mlp", "transformer") for optimizer in OPTIMIZERS]


@pytest.mark.parametrize("world_size", [2, 3])
def test_zero1_is_the_optimizer_itself_to_the_bit(world_size: int) -> None:
    """Each parameter is moved by one rank, by the same arithmetic: losses and weights are those of the whole optimizer, bit by bit."""
    whole = run_ranks(fit_replicated, world_size, False)
    for ours, theirs in zip(run_ranks(fit_replicated, world_size, True), whole, strict=True):
        for (losses, state), (expected, expected_state) in zip(ours, theirs, strict=True):
            assert losses == expected
            assert all(state[name].equal(value) for name, value in expected_state.items())


#: The vocabulary is too odd to be split: embedding and head stay whole.
PLAN = {
    "blocks.*.attention.[qkv]": "colwise", "blocks.*.attention.out": "rowwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise",
}  # fmt: skip


def split(model: torch.nn.Module, mesh: dict[str, int], **options: Any) -> torch.nn.Module:
    degrees = rankwise.current().mesh(mesh).degrees
    rankwise.apply_tensor_parallel(model, PLAN, **options)
    if degrees["shard"] * degrees["replicate"] > 1:
        rankwise.apply_checkpointing(model)
        rankwise.apply_fsdp(model)
    return model


def fit_split(cases: list[tuple[str, dict[str, int], dict[str, Any]]], options: dict[str, Any]) -> list[Any]:
    return [
        fit("gpt", optimizer, spread=functools.partial(split, mesh=mesh, **how), **options)
        for optimizer, mesh, how in cases
    ]


SPLIT: dict[int, list[tuple[str, dict[str, int], bool]]] = {
    2: [("sgd", {"tensor": 2}, False), ("sgd", {"tensor": 2}, True)],
    4: [("adamw", {"shard": 2, "tensor": 2}, True), ("sgd", {"replicate": 2, "tensor": 2}, False)],
    8: [("sgd", {"replicate": 2, "shard": 2, "tensor": 2}, True)],
}


@pytest.mark.parametrize("world_size", SPLIT)
def test_tensor_parallel_and_fsdp_together_have_one_processs_curves(world_size: int) -> None:
    """A GPT split by tensor 2, with sequence parallel, and over that FSDP, HSDP or copies: two micro-batches, clipped, one process's curve."""
    options = {"num_micro": 2, "clip_norm": 0.3, "num_samples": 195}  # some micro-batches have no samples
    cases = [(kind, mesh, {"sequence_parallel": parts}) for kind, mesh, parts in SPLIT[world_size]]
    for found in run_ranks(fit_split, world_size, cases, options, timeout_s=400):
        for (optimizer, mesh, how), ours in zip(cases, found, strict=True):
            expected = train_by_hand("gpt", optimizer, clip_norm=0.3, num_samples=195)
            assert_same(ours, expected, TOLERANCE[optimizer], f"{mesh}, {how}, {optimizer}")


def go_on_split(mesh: dict[str, int] | None, folder: Path, stop_after: int | None) -> Any:
    spread = None
    if mesh is not None:
        spread = functools.partial(split if "tensor" in mesh else shard, mesh=mesh)
    return fit("gpt", "adamw", folder=folder, stop_after=stop_after, spread=spread)


def test_checkpoints_go_from_split_layers_to_any_other_composition(tmp_path: Path) -> None:
    """Tensor 2 with FSDP, then DDP on 2 ranks, tensor 2 alone, FSDP on 3, copies with tensor 2, one process: one curve, AdamW's states too."""
    stages: list[tuple[int, dict[str, int] | None, int | None]] = [
        (4, {"shard": 2, "tensor": 2}, 8), (2, None, 17), (2, {"tensor": 2}, 26), (3, {"shard": 3}, 33), (4, {"replicate": 2, "tensor": 2}, 41), (1, None, None),
    ]  # fmt: skip
    for world_size, mesh, stop_after in stages:
        found = run_ranks(go_on_split, world_size, mesh, tmp_path / "run", stop_after, timeout_s=120)
    for ours in found:
        assert_same(ours, train_by_hand("gpt", "adamw"), TOLERANCE["adamw"], "five changes")
