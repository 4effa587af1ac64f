"""What users get wrong with DDP is told by name, on every rank that it concerns, in one error."""

from __future__ import annotations

from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwise
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, ModelError, UsageError
from rankwise.parallel.accumulation import accumulate, loss_scale
from rankwise.parallel.checked_ddp import CheckedDDP
from rankwise.parallel.ddp import PowerSGD, Tuning, apply_ddp
from rankwise.parallel.model_check import check_replicas
from rankwise.testing import RankOutcome, try_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def wrap(
    build: Callable[[int], nn.Module], options: Callable[[int], dict[str, Any]] = lambda _rank: {}
) -> list[RankOutcome]:
    """Wrap what each of three ranks builds; return how they end."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            apply_ddp(build(ctx.rank), **options(ctx.rank))

    return try_ranks(body, 3)


def read_same_error(outcomes: list[RankOutcome], kind: type[BaseException] = ModelError) -> str:
    """Return the error's text, after a look whether all ranks have the same."""
    texts = {str(outcome.error) for outcome in outcomes}
    assert all(isinstance(outcome.error, kind) for outcome in outcomes), texts
    assert len(texts) == 1, texts
    return texts.pop()


def test_a_parameter_that_one_rank_lacks_is_named() -> None:
    """D12, number of parameters: all ranks read which parameter rank 1 lacks, and who has it."""
    text = read_same_error(wrap(lambda rank: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3, bias=rank != 1))))
    assert "rank 1 has no parameter '1.bias' (shape (3,), float32, requires_grad=True); ranks 0, 2 have it" in text
    assert "1 of 4" in text


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda rank: nn.Linear(2, 3 if rank == 2 else 4), "parameter 'weight': shape (4, 2), float32, requires_grad=True on ranks 0, 1; shape (3, 2)"),
        (lambda rank: nn.Linear(2, 3).to(torch.float64 if rank == 0 else torch.float32), "float64, requires_grad=True on rank 0; shape (3, 2), float32"),
        (lambda rank: nn.Linear(2, 3).requires_grad_(rank != 1), "on ranks 0, 2; shape (3, 2), float32, requires_grad=False on rank 1"),
        (lambda rank: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=rank > 0)), "rank 0 has no buffer '1.running_mean'"),
        (lambda rank: nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last if rank else torch.contiguous_format), "strides (18, 1, 6, 2)"),
    ],
    ids=["shape", "dtype", "requires_grad", "buffer", "strides"],
)  # fmt: skip
def test_what_differs_is_told_with_both_values(build: Callable[[int], nn.Module], told: str) -> None:
    """D12, all else that DDP or torch needs to be equal: the error has the name, both values and the ranks."""
    text = read_same_error(wrap(build))
    # A model that is frozen on one rank only is that rank's complaint, and all hear of it.
    assert told in text or ("requires_grad=False" in told and "rank 1: all 2 parameters are frozen" in text), text


def test_another_order_is_told() -> None:
    """D12: the same parameters in another order would be paired wrongly, without a word if their shapes agree."""

    def build(rank: int) -> nn.Module:
        names = ["a", "b"] if rank else ["b", "a"]
        return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})

    text = read_same_error(wrap(build))
    assert "rank 0: parameter b.weight; ranks 1, 2: parameter a.weight" in text


def test_different_options_are_told() -> None:
    """find_unused_parameters on one rank adds a collective there, which the others would never join."""
    text = read_same_error(wrap(lambda _rank: nn.Linear(2, 2), lambda rank: {"find_unused_parameters": rank == 2}))
    assert "find_unused_parameters is False on ranks 0, 1; True on rank 2" in text


def test_a_rank_that_does_not_wrap_is_named() -> None:
    """D13: the ranks that wrap read, after the time they asked for, which rank did not come."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            if ctx.rank != 1:
                apply_ddp(nn.Linear(2, 2), wait_s=1.5)
            else:
                ctx.store.wait(["never"], timedelta(seconds=2.5))

    outcomes = try_ranks(body, 3)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, CollectiveTimeoutError), outcomes[rank]
        assert "rank 1" in str(outcomes[rank].error)
        assert "wait_s" in str(outcomes[rank].error)


def test_a_rank_that_calls_something_else_is_named() -> None:
    """D13: a rank that is at another call of ours at the moment of the wrap is told from one that is absent."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            if ctx.rank == 1:
                ctx.control.compare("epoch 3", what="begin_epoch")
            else:
                apply_ddp(nn.Linear(2, 2))

    outcomes = try_ranks(body, 3)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, CollectiveError)
        assert "the ranks called different collectives: ranks 0, 2: apply_ddp at" in str(outcomes[rank].error)
        assert "rank 1: begin_epoch" in str(outcomes[rank].error)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda _rank: nn.Linear(2, 2).requires_grad_(False), "all 2 parameters are frozen"),
        (lambda _rank: nn.ReLU(), "the model has no parameters"),
        (
            lambda _rank: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)),
            "'1.weight', '1.bias' are not initialised yet",
        ),
        (lambda _rank: nn.Linear(2, 2, device="meta"), "'weight', 'bias' are on the meta device"),
        (
            lambda _rank: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            "torch.nn.SyncBatchNorm works on GPUs only",
        ),
    ],
    ids=["D11 frozen", "D11 empty", "lazy", "meta", "D20"],
)
def test_models_that_cannot_be_wrapped_are_told_why(build: Callable[[int], nn.Module], told: str) -> None:
    """D11, D20 and others: each rank reads what is wrong with the model, and what to do."""
    assert told in read_same_error(wrap(build))


def test_what_is_wrong_on_one_rank_is_told_on_all() -> None:
    """A model that is in order is not left waiting for one that is not."""
    text = read_same_error(wrap(lambda rank: nn.LazyLinear(2) if rank == 2 else nn.Linear(2, 2)))
    assert "rank 2: 'weight', 'bias' are not initialised yet" in text


def test_a_wrapped_model_is_not_wrapped_again() -> None:
    """Two wraps would average twice."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            apply_ddp(nn.Sequential(apply_ddp(nn.Linear(2, 2))))

    text = read_same_error(try_ranks(body, 2))
    assert "'0' is wrapped in DistributedDataParallel already" in text


def test_options_that_cannot_work_are_refused() -> None:
    """An unknown hook, PowerSGD before the buckets are final, and a bucket of no size."""
    with rankwise.init(device="cpu"):
        for options in (
            {"comm_hook": "int8"},
            {"comm_hook": PowerSGD(plain_steps=1)},
            {"tuning": Tuning(bucket_cap_mb=0)},
        ):
            with pytest.raises(UsageError):
                apply_ddp(nn.Linear(2, 2), **options)  # type: ignore[arg-type]


def test_powersgd_refuses_what_has_no_dim() -> None:
    """A scalar makes no matrix, on which torch would end in the first step that compresses: a thousand steps later."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.tensor(1.0))

    with rankwise.init(device="cpu"), pytest.raises(ModelError, match="'scale' has no dim"):
        apply_ddp(Scaled(), comm_hook="powersgd")


class Branches(nn.Module):
    """A model with a branch that only some calls take."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.aside, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, aside: bool) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.aside(x) if aside else x)


def take_steps(
    uses: Callable[[int, int], bool], options: Mapping[str, Any] = MappingProxyType({})
) -> list[torch.Tensor]:
    with rankwise.init(device="cpu") as ctx:
        ddp = apply_ddp(Branches(), **options)
        for step in range(3):
            ddp(torch.ones(2, 2), uses(ctx.rank, step)).sum().backward()
        return [parameter.grad.clone() for parameter in ddp.parameters()]


def test_unused_parameters_are_named() -> None:
    """D1: at the second forward every rank reads the names, its own rank and the remedies, not indices."""
    for rank, outcome in enumerate(try_ranks(take_steps, 2, lambda _rank, _step: False)):
        assert isinstance(outcome.error, ModelError)
        text = str(outcome.error)
        assert text.startswith(f"[rank {rank}] 'aside.weight', 'aside.bias' were not used in the last loss"), text
        assert "find_unused_parameters=True" in text


def test_parameters_unused_on_one_rank_are_named_there() -> None:
    """D2: the rank whose branch was not taken reads the names; its peer keeps torch's error about the lost connection."""
    outcomes = try_ranks(take_steps, 2, lambda rank, _step: rank == 0)
    assert "'aside.weight', 'aside.bias' were not used" in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, RuntimeError)
    assert not isinstance(outcomes[0].error, ModelError)


def test_a_static_graph_that_changes_is_told() -> None:
    """With static_graph=True the remedy is another one."""
    for outcome in try_ranks(take_steps, 2, lambda _rank, step: step == 0, {"static_graph": True}):
        assert isinstance(outcome.error, ModelError)
        assert "'aside.weight', 'aside.bias' were not used in this loss but in the first one" in str(outcome.error)


def test_find_unused_parameters_is_the_remedy() -> None:
    """What the error advises works: the branch that only rank 0 takes gets the average of its gradient and zero."""
    first, second = try_ranks(take_steps, 2, lambda rank, _step: rank == 0, {"find_unused_parameters": True})
    assert first.error is None, first.error
    for ours, theirs in zip(first.value, second.value, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert ours.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.stem.requires_grad_(True), "'stem.weight', 'stem.bias' were unfrozen"),
        (lambda model: model.head.requires_grad_(False), "'head.weight', 'head.bias' were frozen"),
        (
            lambda model: setattr(model, "head", nn.Linear(2, 1)),
            "'head.weight', 'head.bias' were added to the model",
        ),
    ],
    ids=["unfrozen", "frozen", "replaced"],
)
def test_parameters_changed_after_the_wrap_are_named(change: Callable[[Any], object], told: str) -> None:
    """D9: in torch the gradients of such layers stay on each rank, silently."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            model = Branches()
            model.stem.requires_grad_(False)
            ddp = apply_ddp(model)
            ddp(torch.ones(1, 2), True).sum().backward()
            change(ddp.module)
            ddp.train()
            ddp(torch.ones(1, 2), True).sum().backward()

    for outcome in try_ranks(body, 2):
        assert isinstance(outcome.error, ModelError), outcome
        assert told in str(outcome.error)


def test_a_model_frozen_as_a_whole_for_a_while_is_fine() -> None:
    """Adversarial training freezes one network while the other learns through it; torch allows it, and so do we."""
    with rankwise.init(device="cpu"):
        ddp = apply_ddp(nn.Linear(2, 1))
        for frozen in (False, True, False):
            ddp.requires_grad_(not frozen).train()
            ddp(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert isinstance(ddp, CheckedDDP)


def test_a_model_without_parameters_on_one_rank_is_told() -> None:
    """The ranks hold different models, and the error says that, also where one of them holds no parameter at all."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            check_replicas(nn.Linear(2, 1) if ctx.rank else nn.ReLU())

    assert "the ranks hold different parameters" in read_same_error(try_ranks(body, 2))


def test_weights_that_differ_after_the_wrap_are_named() -> None:
    """D26: weights loaded on rank 0 only are found by name, and who has which."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            ddp = apply_ddp(Branches())
            check_replicas(ddp)
            if ctx.rank == 0:
                nn.init.zeros_(ddp.module.head.weight)
            check_replicas(ddp)

    text = read_same_error(try_ranks(body, 3))
    assert "1 of 6" in text
    assert "'head.weight'" in text
    assert "rank 0; ranks 1, 2" in text


def test_an_accumulation_that_was_left_early_is_told() -> None:
    """D23, never synced: the gradients of an accumulation that was left by `break` don't go into a step unseen."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            ddp = apply_ddp(nn.Linear(2, 1))
            for _ in accumulate(ddp, [1, 2, 3]):
                ddp(torch.ones(1, 2)).sum().backward()
                break
            ddp(torch.ones(1, 2))

    for outcome in try_ranks(body, 2):
        assert isinstance(outcome.error, CollectiveError)
        assert "left after 1 micro-batch" in str(outcome.error)


def test_an_accumulation_of_nothing_is_refused() -> None:
    """A rank without micro-batches would leave the others waiting: it reads how to take part."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            list(accumulate(apply_ddp(nn.Linear(2, 1)), []))

    for outcome in try_ranks(body, 2):
        assert isinstance(outcome.error, UsageError)
        assert "inputs[:0]" in str(outcome.error)


def test_synced_batchnorm_with_uneven_micro_batches_is_told() -> None:
    """Each forward is a collective then: all ranks read who has how many, before anything is paired wrongly."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            ddp = apply_ddp(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), sync_batchnorm=True)
            assert isinstance(ddp, DistributedDataParallel)
            list(accumulate(ddp, [torch.ones(2, 2)] * (2 + ctx.rank)))

    for outcome in try_ranks(body, 2):
        assert isinstance(outcome.error, CollectiveError)
        assert "rank 0 2, rank 1 3" in str(outcome.error)


def test_no_samples_anywhere_is_refused() -> None:
    """A scale of infinity helps nobody."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            loss_scale(0)

    assert "all 2 ranks together hold 0 samples" in read_same_error(try_ranks(body, 2), UsageError)


def test_a_negative_number_of_samples_is_refused_on_all_ranks() -> None:
    """The ranks that counted well do not wait for the one that did not."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            loss_scale(4 - 5 * ctx.rank)

    assert "the number of samples is -1 on rank 1" in read_same_error(try_ranks(body, 2), UsageError)
