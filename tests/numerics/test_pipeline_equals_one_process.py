"""Models cut into the stages of a pipeline train as one process does: every schedule, uneven batches, and what stands beside it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.pipelining
from torch import Tensor, nn
from torch.distributed.tensor._ops._view_ops import view_groups
from torch.nn.functional import cross_entropy

import rankwise
from one_process import (
    FEW_STEPS,
    TOLERANCE as TOLERANCES,
    Curve,
    assert_same,
    fit,
    gather_whole,
    train_by_hand,
)
from rankwise.parallel.dtensors import scale_to
from rankwise.testing import run_ranks
from small_gpt import Gpt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WIDTH, CLASSES = 6, 3
#: Float64: sums in another order.
TOLERANCE = 1e-12


def build(num_blocks: int = 8) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES)).double()


#: The last batch is smaller, and can't be cut into equal micro-batches; one has fewer samples than there are stages.
SIZES = (8, 8, 7, 3)


def batches(sizes: Sequence[int] = SIZES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, WIDTH, generator=generator, dtype=torch.float64), torch.randint(CLASSES, (size,), generator=generator))
        for size in sizes
    ]  # fmt: skip


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def train_alone() -> tuple[list[float], dict[str, Tensor], Tensor]:
    torch.set_num_threads(1)
    model, losses = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches():
        loss = compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, model.state_dict(), model(batches()[0][0])


def train_staged(schedule: str, microbatches: int) -> tuple[list[float], dict[str, Tensor], Tensor]:
    torch.set_num_threads(1)
    with rankwise.init(device="cpu") as ctx:
        model = build()
        with torch.no_grad():
            for one in model.parameters():
                one.add_(ctx.rank)
        pipe = rankwise.apply_pipeline(model, schedule=schedule, microbatches=microbatches, loss=compute_loss)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for batch in batches():
            loss = pipe.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        pipe.eval()
        return losses, {name: one.clone() for name, one in pipe.state_dict().items()}, pipe(batches()[0][0])


def train_by_each(cases: Sequence[tuple[str, int]]) -> list[Any]:
    return [train_staged(*case) for case in cases]


#: torch 2.8 does not have it.
HAS_DUAL = hasattr(torch.distributed.pipelining, "ScheduleDualPipeV")
CASES = {
    2: [("gpipe", 3), ("1f1b", 4), ("interleaved_1f1b", 4), ("looped_bfs", 3), ("interleaved_zero_bubble", 4), ("zbv", 4), ("zbv", 3), *[("dualpipev", 4)] * HAS_DUAL],
    4: [("gpipe", 4), ("1f1b", 5), ("interleaved_1f1b", 4), ("looped_bfs", 4), ("interleaved_zero_bubble", 8), ("zbv", 8), *[("dualpipev", 8)] * HAS_DUAL],
}  # fmt: skip


@pytest.mark.parametrize("world_size", CASES)
def test_every_schedule_has_one_processs_losses_and_weights(world_size: int) -> None:
    """Each schedule on 2 and 4 ranks, with batches of four sizes, begins with rank 0's weights, and all ranks are told the loss."""
    losses, state, output = train_alone()
    found = run_ranks(train_by_each, world_size, CASES[world_size], timeout_s=120)
    for number, case in enumerate(CASES[world_size]):
        held = {}
        for ours, own_state, own_output in (rank[number] for rank in found):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=0, atol=TOLERANCE, msg=str(case))  # fmt: skip
            torch.testing.assert_close(own_output, output, rtol=0, atol=TOLERANCE)
            held |= own_state
        assert held.keys() == state.keys(), case
        for name, value in state.items():
            torch.testing.assert_close(held[name], value, rtol=0, atol=TOLERANCE, msg=f"{case}: {name}")


def cut(model: nn.Module, mesh: dict[str, int], **options: Any) -> nn.Module:
    degrees = rankwise.current().mesh(mesh).degrees
    if degrees["tensor"] > 1:
        rankwise.apply_tensor_parallel(model, PLAN)
    pipe = rankwise.apply_pipeline(model, **{"microbatches": 4, **options})
    if degrees["shard"] > 1:
        rankwise.apply_checkpointing(pipe, blocks="blocks.*")
        rankwise.apply_fsdp(pipe)
    return pipe


def fit_cut(cases: list[tuple[str, str, dict[str, int], dict[str, Any]]], options: dict[str, Any]) -> list[Any]:
    return [fit(kind, optimizer, spread=functools.partial(cut, mesh=mesh, **how), **options) for kind, optimizer, mesh, how in cases]  # fmt: skip


def assert_same_stages(found: list[Any], number: int, expected: Any, tolerance: float, what: str) -> None:
    """The losses of every rank, and the weights of all stages together."""
    whole: dict[str, Tensor] = {}
    for rank in found:
        whole |= rank[number][1]
    for rank in found:
        assert_same((rank[number][0], whole), expected, tolerance, what)


def test_a_trainer_has_one_processs_curve() -> None:
    """An MLP by 1F1B, and a GPT of uneven tokens by GPipe: SGD and AdamW, two micro-batches a step, clipped."""
    cases = [("mlp", "sgd", {"pipeline": 2}, {"schedule": "1f1b", "cut": [2, 2]}), ("gpt", "adamw", {"pipeline": 2}, {"schedule": "gpipe"})]  # fmt: skip
    options = {"clip_norm": 0.3, "num_samples": 195, "num_steps": FEW_STEPS}
    found = run_ranks(fit_cut, 2, cases, {**options, "num_micro": 2}, timeout_s=120)
    for number, (kind, optimizer, _, _) in enumerate(cases):
        expected = train_by_hand(kind, optimizer, **options)
        assert_same_stages(found, number, expected, TOLERANCES[optimizer], kind)


#: The vocabulary is too odd to be split: embedding and head stay whole.
PLAN = {
    "blocks.*.attention.[qkv]": "colwise", "blocks.*.attention.out": "rowwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise",
}  # fmt: skip
COMPOSED: dict[int, list[tuple[dict[str, int], dict[str, Any]]]] = {
    4: [
        ({"pipeline": 2, "replicate": 2}, {"schedule": "1f1b"}),
        ({"pipeline": 2, "shard": 2}, {"schedule": "1f1b"}),
        ({"pipeline": 2, "shard": 2}, {"schedule": "interleaved_zero_bubble"}),
        ({"pipeline": 2, "tensor": 2}, {"schedule": "gpipe"}),
    ],
    8: [({"pipeline": 2, "shard": 2, "tensor": 2}, {"schedule": "1f1b"})],
}


def build_gpt() -> nn.Module:
    torch.manual_seed(0)
    model = Gpt(5, 6, tied=True)
    model.blocks.extend(Gpt(5, 6).blocks)
    return model.double()


def language_loss(model: nn.Module, tokens: Tensor) -> Any:
    losses = cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:], ignore_index=0, reduction="sum")
    return losses, (tokens[:, 1:] != 0).sum()


def take_tokens(number: int, fewer: int = 3) -> Tensor:
    # The second batch has 5 samples: shares of 3 and 2, cut into micro-batches of 1, one of which has none.
    return torch.randint(5, (8 - fewer * (number % 2), 6), generator=torch.Generator().manual_seed(number))


def step_by_hand(model: Any, fewer: int = 3, max_norm: float = 0.5) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    is_staged, told = isinstance(model, rankwise.Pipeline), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        tokens = take_tokens(number, fewer)
        if is_staged:
            ctx = rankwise.current()
            loss = model.step(tokens.tensor_split(ctx.data_size)[ctx.data_rank], language_loss)
            strategy = model.make_strategy(None)
            gradients = [one.grad for one in model.parameters()]
            norm = strategy.total_norm(gradients)
            scale_to(gradients, max_norm, norm)
        else:
            total, count = language_loss(model, tokens)
            loss = total / count
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.item(), norm.item()]
    return told, {name: gather_whole(one.detach()) for name, one in model.state_dict().items()}


def step_composed(mesh: dict[str, int], how: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    with rankwise.init(device="cpu"):
        return step_by_hand(cut(build_gpt(), mesh, **how), _find_fewer(mesh))


def _find_fewer(mesh: dict[str, int]) -> int:
    """Return how many samples less the second batch has: in torch 2.8 a DTensor without elements can't be seen in another shape."""
    try:
        view_groups((0, 6, 8), (0, 8))
    except IndexError:
        return 0 if "tensor" in mesh else 3
    return 3


def step_each(cases: Sequence[tuple[dict[str, int], dict[str, Any]]]) -> list[Any]:
    return [step_composed(*case) for case in cases]


@pytest.mark.parametrize("world_size", COMPOSED)
def test_what_stands_beside_a_pipeline_changes_nothing(world_size: int) -> None:
    """Copies, FSDP with checkpointing, tensor parallelism, and both: losses, norms and weights of a GPT with tied weights are one process's."""
    alone = {fewer: step_by_hand(build_gpt(), fewer) for fewer in (0, 3)}
    found = run_ranks(step_each, world_size, COMPOSED[world_size], timeout_s=120)
    for number, case in enumerate(COMPOSED[world_size]):
        held: dict[str, Tensor] = {}
        expected, expected_state = alone[_find_fewer(case[0])]
        for told, state in (rank[number] for rank in found):
            assert told == pytest.approx(expected, rel=TOLERANCE), case
            held |= state
        assert held.keys() == expected_state.keys()
        for name, value in expected_state.items():
            torch.testing.assert_close(held[name], value, rtol=0, atol=TOLERANCE, msg=f"{case}: {name}")


def test_a_trainer_has_one_processs_curve_with_fsdp_beside_it() -> None:
    """Two stages by two shards of a GPT, AdamW, two micro-batches a step, clipped."""
    cases = [("gpt", "adamw", {"pipeline": 2, "shard": 2}, {"schedule": "gpipe", "microbatches": 2})]
    options = {"clip_norm": 0.3, "num_samples": 195, "num_steps": FEW_STEPS}
    found = run_ranks(fit_cut, 4, cases, {**options, "num_micro": 2}, timeout_s=120)
    expected = train_by_hand("gpt", "adamw", **options)
    assert_same_stages(found, 0, expected, TOLERANCES["adamw"], "pipeline 2 x shard 2")


def go_on(mesh: dict[str, int] | None, how: dict[str, Any], folder: Path, stop_after: int | None) -> Any:
    spread = None if mesh is None else functools.partial(cut, mesh=mesh, **how)
    return fit("gpt", "adamw", num_steps=18, folder=folder, stop_after=stop_after, spread=spread)


def test_a_stop_and_another_number_of_stages_change_nothing(tmp_path: Path) -> None:
    """Two stages, one process, two stages with copies, DDP, two stages with FSDP: weights and AdamW's states go from each to the next."""
    two = {"pipeline": 2}
    stages: list[tuple[int, dict[str, int] | None, dict[str, Any], int | None]] = [
        (2, two, {"schedule": "1f1b"}, 3), (1, None, {}, 6), (4, {**two, "replicate": 2}, {"schedule": "gpipe"}, 9),
        (2, None, {}, 12), (4, {**two, "shard": 2}, {"schedule": "gpipe"}, 15), (2, two, {"schedule": "1f1b"}, None),
    ]  # fmt: skip
    for world_size, mesh, how, stop_after in stages:
        found = run_ranks(go_on, world_size, mesh, how, tmp_path / "run", stop_after, timeout_s=120)
    expected = train_by_hand("gpt", "adamw", num_steps=18)
    assert_same_stages([[one] for one in found], 0, expected, TOLERANCES["adamw"], "five changes")


def small_loss(model: nn.Module, batch: tuple[Tensor]) -> Any:
    """So small that no gradient overflows in fp16: the halves of a batch overflow later than the whole."""
    total, count = language_loss(model, batch[0])
    return total * 0.01, count


def fit_precisely(precision: str, is_staged: bool, is_sharded: bool) -> list[float]:
    torch.set_num_threads(1)
    with rankwise.init(device="cpu", mesh={"pipeline": 2, "shard": -1} if is_staged else None):
        model = build_gpt().float()
        if is_staged:
            model = rankwise.apply_pipeline(model, schedule="1f1b", microbatches=2)
        if is_sharded:
            rankwise.apply_fsdp(model, precision=precision)
        data = torch.utils.data.TensorDataset(torch.cat([take_tokens(number) for number in range(0, 8, 2)]))
        trainer = rankwise.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), rankwise.DataLoader(data, global_batch=8),
            small_loss, callbacks=[curve := Curve()],
            config=rankwise.TrainerConfig(steps=6, precision="fp32" if is_sharded else precision, progress=False, clip_norm=1.0),
        )  # fmt: skip
        trainer.fit()
        return curve.losses


@pytest.mark.parametrize(("precision", "is_sharded"), [("bf16", False), ("fp16", False), ("bf16", True)])
def test_mixed_precision_is_that_of_one_process(precision: str, is_sharded: bool) -> None:
    """Autocast, a GradScaler, and FSDP that casts: activations are sent in the dtype in which they are computed, and losses differ by rounding."""
    (expected,) = run_ranks(fit_precisely, 1, precision, False, False)
    for losses in run_ranks(fit_precisely, 4 if is_sharded else 2, precision, True, is_sharded, timeout_s=60):
        # bf16 has 8 bits. One process rounds the same products of matrices, FSDP also what is between them.
        assert losses == pytest.approx(expected, rel=2e-2 if is_sharded else 2e-3)
        assert losses[-1] < losses[0]
