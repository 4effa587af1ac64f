"""apply_pipeline: what a rank holds, weights that stages share, plain loops, and each likely mistake as one clear error."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed.pipelining
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rankwise
from rankwise.data.metrics import Mean
from rankwise.parallel.dtensors import scale_to
from rankwise.parallel.pipeline_layout import find_layout, list_bounds
from rankwise.testing import run_ranks
from small_gpt import Gpt

VOCABULARY, SEQUENCE = 7, 5


def language_loss(model: nn.Module, tokens: Tensor) -> Any:
    outputs = model(tokens)
    return cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), tokens[:, 1:].numel()


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def build_gpt() -> Gpt:
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, SEQUENCE, tied=True)
    model.blocks.extend(Gpt(VOCABULARY, SEQUENCE).blocks)
    return model.double()


def take_tokens(number: int, size: int = 6) -> Tensor:
    return torch.randint(VOCABULARY, (size, SEQUENCE), generator=torch.Generator().manual_seed(number))


def train_tied(schedule: str | None, max_norm: float = 0.5) -> dict[str, Any]:
    torch.set_num_threads(1)
    model: Any = build_gpt()
    if schedule is not None:
        model = rankwise.apply_pipeline(model, schedule=schedule, microbatches=4, loss=language_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for number in range(3):
        if schedule is not None:
            model.step(take_tokens(number))
            strategy = model.make_strategy(None)
            gradients = [one.grad for one in model.parameters()]
            norm = strategy.total_norm(gradients)
            scale_to(gradients, max_norm, norm)
        else:
            total, count = language_loss(model, take_tokens(number))
            (total / count).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
    state = {name: one.clone() for name, one in model.state_dict().items()}
    return {"norms": norms, "state": state, "number": sum(one.numel() for one in model.parameters())}


def train_all_tied(schedules: list[str]) -> list[Any]:
    with rankwise.init(device="cpu"):
        return [train_tied(schedule) for schedule in schedules]


def test_stages_that_share_a_weight_keep_it_equal() -> None:
    """Embedding and head with one weight, on two ranks (1F1B, interleaved) and on one (ZBV): norms and weights are one process's, and a rank holds its stages only."""
    expected, schedules = train_tied(None), ["1f1b", "interleaved_1f1b", "zbv"]
    found = run_ranks(train_all_tied, 2, schedules, timeout_s=60)
    for number, schedule in enumerate(schedules):
        for ours in (rank[number] for rank in found):
            assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-12), schedule
            assert 0 < ours["number"] < expected["number"]
            for name, value in ours["state"].items():
                torch.testing.assert_close(value, expected["state"][name], rtol=0, atol=1e-12, msg=f"{schedule}: {name}")  # fmt: skip
        held = set().union(*(rank[number]["state"] for rank in found))
        assert held == expected["state"].keys(), schedule


def train_shares(accumulates: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    with rankwise.init(device="cpu", mesh={"pipeline": 2, "replicate": 2}) as ctx:
        model = rankwise.apply_pipeline(build_chain(), schedule="1f1b", microbatches=2)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x, y in BATCHES:
            # The shares have different sizes: 3 and 2 samples, or 1 and none.
            own = [one.tensor_split(2)[ctx.data_rank] for one in (x, y)]
            parts = [[one[:1] for one in own], [one[1:] for one in own]] if accumulates else [own]
            told = [model.step(part, mean_loss, is_last=part is parts[-1]) for part in parts]
            losses.append(sum(map(float, told)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, {name: one.clone() for name, one in model.state_dict().items()}


def build_chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


_GENERATOR = torch.Generator().manual_seed(2)
BATCHES = [tuple(torch.randn(size, width, generator=_GENERATOR, dtype=torch.float64) for width in (3, 2)) for size in (5, 5, 1)]  # fmt: skip


@pytest.mark.parametrize("accumulates", [False, True])
def test_shares_of_different_sizes_are_weighed_by_samples(accumulates: bool) -> None:
    """Two pipelines with 3 and 2 samples, or 1 and none, in one step or two: the gradient is that of the mean over all samples."""
    torch.set_num_threads(1)
    model, losses = build_chain(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in BATCHES:
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for ours, state in run_ranks(train_shares, 4, accumulates, timeout_s=60):
        if not accumulates:
            assert ours == pytest.approx(losses, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-12)


def watch_evaluation() -> tuple[dict[str, float], Tensor]:
    torch.set_num_threads(1)
    with rankwise.init(device="cpu", mesh={"pipeline": 2, "replicate": 2}):
        pipe = rankwise.apply_pipeline(build_chain(), schedule="gpipe")
        data = torch.utils.data.TensorDataset(*BATCHES[0])
        metrics = rankwise.evaluate(pipe, data, {"square": Mean(square)}, batch_size=2)
        assert pipe.training
        return metrics, rankwise.predict(pipe, data, batch_size=2)


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


def drop_a_step() -> dict[str, Tensor]:
    with rankwise.init(device="cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        pipe = rankwise.apply_pipeline(model, loss=lambda model, x: model(x).square().mean())
        pipe.step(torch.randn(8, 3), is_last=False)
        pipe.zero_grad()
        pipe.step(torch.ones(4, 3))
        return {name: one.grad for name, one in pipe.named_parameters()}


def test_a_step_that_was_dropped_does_not_count() -> None:
    """After zero_grad() the gradients are those of the next batch alone, and its mean is over its own samples."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model(torch.ones(4, 3)).square().mean().backward()
    found = {name: one for held in run_ranks(drop_a_step, 2) for name, one in held.items()}
    for name, one in model.named_parameters():
        torch.testing.assert_close(found[name], one.grad)


class Spare(nn.Module):
    """A layer, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def step_beside_copies() -> bool:
    with rankwise.init(device="cpu", mesh={"pipeline": 2, "replicate": 2}):
        model = nn.Sequential(*(Spare() for _ in range(2)))
        pipe = rankwise.apply_pipeline(model, loss=lambda model, x: model(x).square().mean())
        before = {name: one.detach().clone() for name, one in pipe.named_parameters()}
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.1)
        pipe.step(torch.ones(8, 3))
        optimizer.step()
        return all(torch.equal(one, before[name]) == ("spare" in name) for name, one in pipe.named_parameters())


def test_what_no_copy_uses_is_not_trained() -> None:
    """It has no gradient, as in one process, and not one of zeros, by which AdamW would let it decay."""
    assert all(run_ranks(step_beside_copies, 4))


def test_an_evaluation_has_the_outputs_on_all_stages() -> None:
    """evaluate() and predict() over two pipelines, one of which runs out of samples: the metrics of one process on every rank, and its outputs."""
    model = build_chain()
    with torch.no_grad():
        outputs = model(BATCHES[0][0])
    found = run_ranks(watch_evaluation, 4, timeout_s=60)
    torch.testing.assert_close(found[0][1], outputs, rtol=0, atol=1e-12)
    for metrics, _ in found:
        assert metrics["square"] == pytest.approx(square(outputs, BATCHES[0][1]).mean().item(), rel=1e-12)


# ---------------------------------------------------------------------- mistakes


class Net(nn.Module):
    """Blocks that are called from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def step_net() -> None:
    rankwise.apply_pipeline(Net(), microbatches=2, loss=mean_loss).step((torch.randn(4, 3), torch.randn(4, 3)))


def step_with(batch: Any, **options: Any) -> None:
    pipe = rankwise.apply_pipeline(build_chain().float(), microbatches=2, loss=mean_loss)
    pipe.step(batch(rankwise.current().rank) if callable(batch) else batch, **options)


def cut_chain(model: nn.Module | None = None, **options: Any) -> None:
    rankwise.apply_pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))) if model is None else model, **options)  # fmt: skip


def cut_half_on_meta() -> None:
    with torch.device("meta" if rankwise.current().rank else "cpu"):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    cut_chain(model)


def call_in_training() -> None:
    rankwise.apply_pipeline(build_chain())(BATCHES[0][0])


def accumulate_by_hand() -> None:
    next(rankwise.accumulate(rankwise.apply_pipeline(build_chain()), [X]))


X, Y = torch.zeros(4, 3), torch.zeros(4, 2)
#: torch 2.8 does not have that schedule.
NO_DUAL = "3 for 4" if hasattr(torch.distributed.pipelining, "ScheduleDualPipeV") else "which this torch does not have"
MISTAKES: dict[str, tuple[Any, str]] = {
    "unknown": (lambda: cut_chain(schedule="2f2b"), "schedule='2f2b'"),
    "1f1b": (lambda: cut_chain(schedule="1f1b", microbatches=1), "1f1b needs at least as many micro-batches as stages: 1 for 2"),
    "dualpipev": (lambda: cut_chain(schedule="dualpipev", microbatches=3), NO_DUAL),
    "zbv": (lambda: cut_chain(schedule="zbv", stages_per_rank=3), "zbv has 2 stages on each rank, and not 3"),
    "rounds": (lambda: cut_chain(schedule="interleaved_1f1b", microbatches=5), "5 don't make 2 equal ones"),
    "two on one": (lambda: cut_chain(schedule="gpipe", stages_per_rank=2), "gpipe has 1 stage on each rank"),
    "microbatches": (lambda: cut_chain(microbatches=0), "microbatches=0"),
    "too few blocks": (lambda: cut_chain(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), schedule="zbv"), "2 blocks can't be cut into 4 stages"),
    "no parameters": (lambda: cut_chain(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), "stage 1 (1) has no parameters"),
    "cut": (lambda: cut_chain(cut=["9"]), "there is no block '9'"),
    "cut sizes": (lambda: cut_chain(cut=[1, 1]), "does not make 2 stages of 4 blocks"),
    "backwards": (step_net, "'blocks.0' of stage 0 is called after 'blocks.1' of stage 1\n  -> give apply_pipeline(..., example=batch)"),
    "wrong width": (lambda: step_with((torch.zeros(4, 5), Y)), "can't be followed without values"),
    "other sizes": (lambda: step_with((X, Y[:3])), "the tensors of a batch have 3 and 4 samples"),
    "other stage's": (lambda: step_with(lambda rank: (X + rank, Y)), "other values on rank 0 than on rank 1"),
    "other shapes": (lambda: step_with(lambda rank: (X[rank:], Y[rank:])), "the stages of a pipeline have different batches"),
    "none": (lambda: step_with(lambda rank: None if rank else (X, Y)), "a NoneType without tensors"),
    "no loss": (lambda: step_with((X, Y), loss=lambda _, batch: batch[0].sum()), "doesn't call the model"),
    "forward": (call_in_training, "a pipeline's forward has no gradients"),
    "accumulate": (accumulate_by_hand, "pipe.step"),
    "half on meta, last as it draws random numbers on rank 0 only": (cut_half_on_meta, "the number of tensors on the meta device is 0 on rank 0; 8 on rank 1"),
}  # fmt: skip


def make_mistakes() -> dict[str, str]:
    torch.set_num_threads(1)
    told = {}
    with rankwise.init(device="cpu") as ctx:
        ctx.mesh(pipeline=2)
        for name, (mistake, _) in MISTAKES.items():
            try:
                mistake()
            except rankwise.RankwiseError as error:
                told[name] = str(error)
        cut_chain(microbatches=2)  # the ranks are still in step
    return told


def test_each_mistake_is_one_clear_error_on_every_rank() -> None:
    """Schedules that don't fit, models that can't be cut, and batches that can't flow: said before anything is sent, and the job goes on."""
    for told in run_ranks(make_mistakes, 2, timeout_s=60):
        for name, (_, part) in MISTAKES.items():
            assert part in told.get(name, "nothing was raised"), name


def cut_by_costs() -> tuple[list[str], str]:
    torch.set_num_threads(1)
    with rankwise.init(device="cpu"):
        wide = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256))
        model = nn.Sequential(wide, *(nn.Linear(256, 256) for _ in range(4)))
        pipe = rankwise.apply_pipeline(model, example=[torch.randn(64, 256)])
        try:
            rankwise.apply_pipeline(nn.Sequential(wide, nn.Linear(256, 8)), example=torch.randn(64, 3))
        except rankwise.RankwiseError as error:
            return sorted({name.partition(".")[0] for name, _ in pipe.named_parameters()}), str(error)
        return [], ""


def test_stages_are_cut_by_what_blocks_take() -> None:
    """One block takes eight times as long as each of the other four: it is a stage of its own, on every rank; a list is the model's arguments, and a wrong example is one error."""
    first, second = run_ranks(cut_by_costs, 2, timeout_s=60)
    assert (first[0], second[0]) == (["0"], ["1", "2", "3", "4"])
    assert all("can't be followed without values" in error for _, error in (first, second))


class Decoder(nn.Module):
    """As models of transformers do: arguments by name, positions and a mask for every block, blocks that return tuples, a dict in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = (
            nn.Embedding(VOCABULARY, 8),
            nn.Embedding(SEQUENCE, 8),
            nn.Dropout(0.0),
        )
        self.h = nn.ModuleList([Layer() for _ in range(4)])
        self.ln_f = nn.LayerNorm(8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.wte(input_ids) + self.wpe(positions))
        mask = attention_mask[:, :, None].to(hidden.dtype)
        for layer in self.h:
            hidden = layer(hidden, mask=mask, position_ids=positions)[0]
        return {"last_hidden_state": self.ln_f(hidden), "length": input_ids.shape[1]}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, *, mask: Tensor, position_ids: Tensor) -> tuple[Tensor, None]:
        return hidden + self.mlp(hidden).tanh() * mask * (1 + position_ids[:, None]), None


class ForLanguage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5))
        self.transformer, self.lm_head = Decoder(), nn.Linear(8, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = self.transformer(input_ids=input_ids, attention_mask=attention_mask)
        return self.lm_head(found["last_hidden_state"]) * self.scale


def named_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    mask = batch["attention_mask"][:, 1:]
    return {"loss": ((losses * mask).sum(), mask.sum()), "largest": logits.detach().abs().max()}


def build_named() -> nn.Module:
    torch.manual_seed(0)
    return ForLanguage().double()


def take_named(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    mask = torch.rand(size, SEQUENCE, generator=generator) > 0.3
    return {"input_ids": take_tokens(size, size), "attention_mask": mask.double()}


def train_named(pipe: Any) -> tuple[list[float], dict[str, Tensor], Tensor]:
    torch.set_num_threads(1)
    optimizer, losses = torch.optim.SGD(pipe.parameters(), lr=0.1), []
    for size in (8, 5):
        if isinstance(pipe, rankwise.Pipeline):
            losses.append(pipe.step(take_named(size), named_loss).item())
        else:
            total, count = named_loss(pipe, take_named(size))["loss"]
            (total / count).backward()
            losses.append((total / count).item())
        optimizer.step()
        optimizer.zero_grad()
    pipe.eval()
    with torch.no_grad():
        return losses, {name: one.clone() for name, one in pipe.state_dict().items()}, pipe(**take_named(3))


def train_named_stages(schedule: str) -> tuple[list[float], dict[str, Tensor], Tensor]:
    with rankwise.init(device="cpu"):
        return train_named(rankwise.apply_pipeline(build_named(), schedule=schedule, microbatches=4, blocks="transformer.h.*"))  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_model_like_those_of_transformers_is_cut_by_its_blocks(schedule: str) -> None:
    """Nested blocks with a mask and positions by name, tuples, tied weights, a scale of the logits, counted losses: one process's losses, weights and outputs."""
    losses, state, output = train_named(build_named())
    found = run_ranks(train_named_stages, 2, schedule, timeout_s=60)
    assert set().union(*(own for _, own, _ in found)) == state.keys()
    for ours, own, own_output in found:
        assert ours == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(own_output, output, rtol=0, atol=1e-12)
        for name, value in own.items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-12, msg=name)


def profile_steps(schedules: list[str]) -> list[Any]:
    torch.set_num_threads(1)
    found = []
    with rankwise.init(device="cpu"):
        for schedule in schedules:
            model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
            pipe = rankwise.apply_pipeline(
                model, schedule=schedule, microbatches=4, loss=lambda model, x: model(x).sum()
            )
            with pipe.profile() as profile:
                for size in (8, 3):
                    pipe.step(torch.randn(size, 3))
            pipe.step(torch.randn(8, 3))
            found.append((profile.steps, str(profile), profile.schedule_bubble))
    return found


def test_a_profile_has_the_work_of_all_stages() -> None:
    """Every micro-batch of each stage, one after the other on each rank; the same on both ranks, and off behind the block."""
    schedules = ["1f1b", "zbv"]
    first, second = run_ranks(profile_steps, 2, schedules, timeout_s=60)
    assert first == second
    for (steps, text, bubble), num_stages in zip(first, (2, 4), strict=True):
        assert len(steps) == 2
        for step, number in zip(steps, (4, 3), strict=True):
            spans = [one for row in step for one in row]
            made = {(one.stage, one.work, one.micro_batch) for one in spans}
            assert {(stage, "forward", one) for stage in range(num_stages) for one in range(number)} < made
            assert all(one.end_s <= two.start_s for row in step for one, two in pairwise(row))
        assert f"{num_stages - 1}     " in text
        assert 0 < bubble < 0.5


def test_cuts_by_hand() -> None:
    """Equal parts, the blocks that begin a stage, or how many each has."""
    names = [str(number) for number in range(5)]
    assert list_bounds(names, 2, None) == [0, 2, 5]
    assert list_bounds(names, 2, ["3"]) == [0, 3, 5]
    assert list_bounds(names, 3, [1, 3, 1]) == [0, 1, 4, 5]
    layout = find_layout(Gpt(VOCABULARY, SEQUENCE))
    assert layout.around == {"tokens": 0, "positions": 0, "norm": 2, "head": 2}
    assert layout.blocks == ("blocks.0", "blocks.1")


def step_frozen(is_staged: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    batches = [torch.ones(2, 3).double(), torch.full((6, 3), 2.0).double()]
    if not is_staged:
        model[1].requires_grad_(False)
        model(torch.cat(batches)).square().mean().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    with rankwise.init(device="cpu"):
        pipe = rankwise.apply_pipeline(model, loss=lambda model, x: model(x).square().mean())
        for name, one in pipe.named_parameters():
            one.requires_grad_(not name.startswith("1."))
        pipe.step(batches[0], is_last=False)
        pipe.step(batches[1])
        return {name: one.grad for name, one in pipe.named_parameters() if one.grad is not None}


def test_a_frozen_stage_forgets_no_batch() -> None:
    """A stage that has no gradients doesn't take the step for one that was dropped: gradients are one process's."""
    expected, held = step_frozen(False), {}
    for own in run_ranks(step_frozen, 2, True, timeout_s=60):
        held |= own
    assert held.keys() == expected.keys()
    for name, value in held.items():
        torch.testing.assert_close(value, expected[name])
