"""Models cut over the ranks by FSDP train as one process does: the Trainer's curves under every mesh against a loop by hand."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor._ops._view_ops import view_groups

import rankwise
from one_process import (
    FEW_STEPS,
    MODELS,
    NUM_STEPS,
    OPTIMIZERS,
    TOLERANCE,
    assert_same,
    fit,
    gather_whole,
    train_by_hand,
)
from rankwise.testing import run_ranks
from small_gpt import Gpt

if TYPE_CHECKING:
    from pathlib import Path


def shard(model: torch.nn.Module, mesh: dict[str, int], **options: Any) -> torch.nn.Module:
    rankwise.current().mesh(mesh)
    return rankwise.apply_fsdp(model, sync_batchnorm=True, **options)


def fit_sharded(cases: list[tuple[str, str, dict[str, int], dict[str, Any]]], options: dict[str, Any]) -> list[Any]:
    return [
        fit(kind, optimizer, spread=functools.partial(shard, mesh=mesh, **how), **options)
        for kind, optimizer, mesh, how in cases
    ]


MESHES = {2: [{"shard": 2}], 3: [{"shard": -1}], 4: [{"shard": 4}, {"replicate": 2, "shard": 2}]}


@pytest.mark.parametrize("world_size", MESHES)
def test_fsdp_and_hsdp_have_one_processs_curves(world_size: int) -> None:
    """MLP, BatchNorm net and transformer with uneven tokens, SGD to 1e-12 and AdamW to 1e-9 in float64, on two ranks over 50 steps."""
    cases = [(kind, opt, mesh, {}) for kind in MODELS for opt in OPTIMIZERS for mesh in MESHES[world_size]]
    options = {"num_steps": NUM_STEPS if world_size == 2 else FEW_STEPS}
    for found in run_ranks(fit_sharded, world_size, cases, options, timeout_s=300):
        for (kind, optimizer, mesh, _), ours in zip(cases, found, strict=True):
            expected = train_by_hand(kind, optimizer, **options)
            assert_same(ours, expected, TOLERANCE[optimizer], f"{mesh}, {kind}, {optimizer}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_accumulation_and_clipping_change_nothing(world_size: int) -> None:
    """Two micro-batches a step, some of no samples, gradients sent with each or with the last only, and clipped: one process's curve."""
    # 195 samples: the last step of an epoch has 3.
    options = {"clip_norm": 0.3, "num_samples": 195, "num_steps": FEW_STEPS}
    cases = [
        ("transformer", optimizer, mesh, {"defer_gradients": defers})
        for optimizer in OPTIMIZERS
        for mesh in MESHES[world_size]
        for defers in (False, True)
    ]
    for found in run_ranks(fit_sharded, world_size, cases, {**options, "num_micro": 2}, timeout_s=300):
        for (kind, optimizer, mesh, how), ours in zip(cases, found, strict=True):
            expected = train_by_hand(kind, optimizer, **options)
            assert_same(ours, expected, TOLERANCE[optimizer], f"{mesh}, {how}, {optimizer}")


def go_on(mesh: dict[str, int] | str | None, folder: Path, stop_after: int | None) -> Any:
    spread = functools.partial(shard, mesh=mesh) if isinstance(mesh, dict) else None
    options = {"num_steps": 24, "folder": folder, "stop_after": stop_after}
    return fit("batchnorm", "adamw", spread=spread, cut=mesh == "zero", **options)


def test_a_stop_and_another_composition_change_nothing(tmp_path: Path) -> None:
    """DDP on 2 ranks, then FSDP on 4, ZeRO-1 on 3, HSDP, ZeRO-1 on 2, one process, FSDP on 3: weights and AdamW's states go from each to the next, and the curve is one."""
    stages: list[tuple[int, dict[str, int] | str | None, int | None]] = [
        (2, None, 3), (4, {"shard": 4}, 6), (3, "zero", 9), (4, {"replicate": 2, "shard": 2}, 11), (2, "zero", 14), (1, None, 17),
        (3, {"shard": -1}, 20), (2, None, None),
    ]  # fmt: skip
    for world_size, mesh, stop_after in stages:
        found = run_ranks(go_on, world_size, mesh, tmp_path / "run", stop_after, timeout_s=120)
    for ours in found:
        expected = train_by_hand("batchnorm", "adamw", num_steps=24)
        assert_same(ours, expected, TOLERANCE["adamw"], "seven changes")


def fit_replicated(cut: bool) -> list[Any]:
    options = {"num_micro": 2, "clip_norm": 0.3, "num_samples": 195, "num_steps": FEW_STEPS, "cut": cut}
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
    # 195 samples: the last step of an epoch has 3, so that one of four shares has none.
    options = {"clip_norm": 0.3, "num_samples": 195, "num_steps": FEW_STEPS}
    if world_size == 8:
        try:
            view_groups((0, 8, 32), (0, 32))
        except IndexError:
            options["num_samples"] = 192  # DTensor can't reshape a share without samples before torch 2.13
    cases = [(kind, mesh, {"sequence_parallel": parts}) for kind, mesh, parts in SPLIT[world_size]]
    for found in run_ranks(fit_split, world_size, cases, {**options, "num_micro": 2}, timeout_s=400):
        for (optimizer, mesh, how), ours in zip(cases, found, strict=True):
            expected = train_by_hand("gpt", optimizer, **options)
            assert_same(ours, expected, TOLERANCE[optimizer], f"{mesh}, {how}, {optimizer}")


def go_on_split(mesh: dict[str, int] | None, folder: Path, stop_after: int | None) -> Any:
    spread = None
    if mesh is not None:
        spread = functools.partial(split if "tensor" in mesh else shard, mesh=mesh)
    return fit("gpt", "adamw", num_steps=18, folder=folder, stop_after=stop_after, spread=spread)


def test_checkpoints_go_from_split_layers_to_any_other_composition(tmp_path: Path) -> None:
    """Tensor 2 with FSDP, then DDP on 2 ranks, tensor 2 alone, FSDP on 3, copies with tensor 2, one process: one curve, AdamW's states too."""
    stages: list[tuple[int, dict[str, int] | None, int | None]] = [
        (4, {"shard": 2, "tensor": 2}, 3), (2, None, 8), (2, {"tensor": 2}, 10), (3, {"shard": 3}, 13), (4, {"replicate": 2, "tensor": 2}, 15), (1, None, None),
    ]  # fmt: skip
    for world_size, mesh, stop_after in stages:
        found = run_ranks(go_on_split, world_size, mesh, tmp_path / "run", stop_after, timeout_s=120)
    for ours in found:
        expected = train_by_hand("gpt", "adamw", num_steps=18)
        assert_same(ours, expected, TOLERANCE["adamw"], "five changes")


def freeze(kind: str) -> torch.nn.Module:
    """A GPT whose embedding is its head, of which a block and one weight of another are not trained."""
    model = Gpt(24, 8, tied=True).double()
    for one in (*model.blocks[0].parameters(), model.blocks[1].mlp.up.weight):
        one.requires_grad_(False)
    if kind == "alone":
        return model
    if "tensor" in kind:
        rankwise.apply_tensor_parallel(model, PLAN)
    if "shard" in kind:
        rankwise.apply_checkpointing(model, "selective")
        rankwise.apply_fsdp(model, defer_gradients="deferred" in kind)
    return model


def train_frozen(kind: str = "alone", mesh: dict[str, int] | None = None) -> tuple[list[float], list[torch.Tensor]]:
    """A plain loop: two micro-batches a step, clipped, an optimizer of the trained parameters that asks for ``foreach``."""
    torch.set_num_threads(1)
    size, place, norms = 1, 0, []
    with rankwise.init(device="cpu", mesh=mesh) if mesh else nullcontext() as ctx:
        if ctx is not None:
            size, place = ctx.data_size, ctx.mesh().data_rank
        torch.manual_seed(0)
        model = freeze(kind)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, foreach=ctx is not None)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            batch = torch.randint(24, (8, 9), generator=generator)[place::size]
            halves = batch.chunk(2)
            for tokens in halves if ctx is None else rankwise.accumulate(model, halves):
                logits = model(tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
                (loss * size / 64).backward()
            plain = ctx is None
            norm = torch.nn.utils.clip_grad_norm_(trained, 0.3) if plain else rankwise.clip_grad_norm_(model, 0.3)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(float(norm))
        return norms, [gather_whole(one).detach() for one in model.parameters()]


def train_frozen_in_turn(cases: list[tuple[str, dict[str, int]]]) -> list[Any]:
    return [train_frozen(kind, mesh) for kind, mesh in cases]


FROZEN: dict[int, list[tuple[str, dict[str, int]]]] = {
    2: [("shard", {"shard": 2}), ("shard deferred", {"shard": 2}), ("tensor", {"tensor": 2})],
    4: [("shard deferred", {"replicate": 2, "shard": 2}), ("shard tensor", {"shard": 2, "tensor": 2})],
}


@pytest.mark.parametrize("world_size", FROZEN)
def test_frozen_and_tied_parameters_train_as_in_one_process(world_size: int) -> None:
    """What is frozen stays, what is tied stays one, norms and weights are one process's; with accumulation, clipping, selective checkpointing, ``foreach``."""
    norms, weights = train_frozen()
    cases = FROZEN[world_size]
    for found in run_ranks(train_frozen_in_turn, world_size, cases):
        for (kind, _), (our_norms, ours) in zip(cases, found, strict=True):
            assert our_norms == pytest.approx(norms, rel=1e-12), kind
            for one, expected in zip(ours, weights, strict=True):
                torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)
