"""The Trainer in the hands of a user: what it does by itself, what it refuses, and that all ranks do it alike."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import signal
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset

import rankwise
from rankwise import checkpoint
from rankwise.checkpoint import agreeing, lock
from rankwise.data import metrics
from rankwise.testing import run_ranks
from rankwise.train import Callback, Evaluation
from rankwise.train.loggers.curves import Curves

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_SAMPLES, GLOBAL_BATCH = 40, 8  # five steps an epoch


def build_data() -> TensorDataset:
    inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


class Diary(Callback):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_start(self, trainer: Any, started: Any) -> None:
        self.heard.append(("start", started.step))

    def on_step(self, trainer: Any, step: int) -> None:
        self.heard.append(("step", step))

    def on_report(self, trainer: Any, report: Any) -> None:
        self.heard.append(("report", report.step, round(report.loss, 6)))

    def on_evaluation(self, trainer: Any, evaluated: Any) -> None:
        self.heard.append(("evaluation", evaluated.step, evaluated.is_best))

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        self.heard.append(("epoch", epoch))

    def on_checkpoint(self, trainer: Any, step: int) -> None:
        self.heard.append(("checkpoint", step))

    def on_end(self, trainer: Any, ended: Any) -> None:
        self.heard.append(("end", ended.step, ended.reason))


def build(
    *, loss: Any = mean_loss, folder: Any = None, callbacks: Any = (), loggers: Any = (), evaluates: bool = False,
    scheduler: Any = None, model: nn.Module | None = None, optimizer: Any = None, data: Any = None, micro_batch: int | None = None, **config: Any,
) -> rankwise.Trainer:  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Curves._draw = lambda _: None  # the picture of a run takes matplotlib longer than all else here
    model = model or nn.Linear(4, 1)
    optimizer = (optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05)))(model.parameters())
    evaluation = Evaluation(build_data(), {"loss": metrics.MeanSquaredError()}, batch_size=8) if evaluates else None
    return rankwise.Trainer(
        model, optimizer, rankwise.DataLoader(data or build_data(), global_batch=GLOBAL_BATCH, micro_batch=micro_batch), loss,
        folder=folder, callbacks=callbacks, loggers=loggers, evaluation=evaluation,
        scheduler=scheduler(optimizer) if scheduler else None,
        config=rankwise.TrainerConfig(**{"progress": False, "log_every": 2, **config}),
    )  # fmt: skip


def hear(folder: Any, **config: Any) -> list[Any]:
    with rankwise.init(device="cpu"):
        diary = Diary()
        build(folder=folder, callbacks=[diary], evaluates=True, monitor="loss", **config).fit()
        return diary.heard


def test_callbacks_hear_the_same_on_all_ranks_in_order(tmp_path: Path) -> None:
    """Reports come with the steps that they tell of, before the evaluation that follows; the end comes once."""
    first, second = run_ranks(_hear_two_epochs, 2, tmp_path)
    assert first == second
    kinds = [one[:2] for one in first if one[0] != "step"]
    assert kinds == [
        ("start", 0), ("report", 2), ("report", 4), ("report", 5), ("epoch", 0), ("evaluation", 5), ("checkpoint", 5),
        ("report", 6), ("report", 8), ("report", 10), ("epoch", 1), ("evaluation", 10), ("checkpoint", 10), ("end", 10),
    ]  # fmt: skip
    assert [one[1] for one in first if one[0] == "step"] == list(range(1, 11))


def _hear_two_epochs(folder: Any) -> list[Any]:
    return hear(folder, epochs=2)


# ------------------------------------------------------------------------------ numbers that are not


def spoil(at_step: int, rank: int = 1) -> Any:
    """Return a loss function that is NaN on one rank at one step."""
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        value = mean_loss(model, batch)
        return value * math.nan if calls[0] == at_step and rankwise.current().rank == rank else value

    return loss


def meet_nan(folder: Any, non_finite: str) -> Any:
    with rankwise.init(device="cpu"):
        trainer = build(loss=spoil(7), folder=folder, epochs=3, non_finite=non_finite, save_every=2, log_every=10)
        try:
            trainer.fit()
        except rankwise.NumericsError as error:
            return str(error)
        weights = [value.tolist() for value in trainer.model.parameters()]
        return trainer.step, weights


def test_nan_on_one_rank_stops_all_and_names_step_and_rank(tmp_path: Path) -> None:
    """Both ranks raise the same error, which tells the step and the guilty rank; the newest checkpoint is from before."""
    for rank, told in enumerate(run_ranks(meet_nan, 2, tmp_path, "stop")):
        assert told.startswith(f"[rank {rank}] the loss of step 7 is nan (on rank 1); the step before it had 3.72"), (
            told
        )
    assert checkpoint.latest(tmp_path).name == "step-6"


def test_a_skipped_step_is_skipped_on_all_ranks() -> None:
    """With "skip" the weights stay finite and equal on all ranks, and the training goes to its end."""
    first, second = run_ranks(meet_nan, 2, None, "skip")
    assert first == second
    assert first[0] == 15
    assert all(math.isfinite(value) for row in first[1] for value in torch.tensor(row).flatten().tolist())


def skip_for_ever() -> str:
    with rankwise.init(device="cpu"):
        trainer = build(loss=lambda model, batch: mean_loss(model, batch) * math.nan, epochs=9, non_finite="skip")
        with pytest.raises(rankwise.NumericsError) as caught:
            trainer.fit()
        return str(caught.value)


def test_ten_skipped_steps_in_a_row_are_an_error() -> None:
    """A training in which nothing is finite any more does not go on in silence."""
    for told in run_ranks(skip_for_ever, 2):
        assert "the gradient's norm was nan at step 10, and not finite at the 9 steps before it" in told


# ------------------------------------------------------------------------------- early, best, wished


def stop_early(folder: Any) -> Any:
    with rankwise.init(device="cpu"):
        diary = Diary()
        # A learning rate that makes it worse at each step.
        trainer = build(
            folder=folder, epochs=50, evaluates=True, monitor="loss", patience=2, callbacks=[diary],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.2), evaluate_every=1, save_every=1,
        )  # fmt: skip
        ended = trainer.fit()
        again = build(folder=folder, epochs=50, evaluates=True, monitor="loss", patience=2, callbacks=[Diary()])
        return ended.reason, ended.step, trainer.best.step, again.fit().step


def test_early_stop_is_agreed_and_remembered(tmp_path: Path) -> None:
    """All ranks stop after the same evaluation, the best checkpoint is kept, and a second start does not train on."""
    found = run_ranks(stop_early, 3, tmp_path)
    assert found == [("no better loss in 2 evaluations", 3, 1, 3)] * 3
    assert [one.step for one in checkpoint.list_checkpoints(tmp_path)] == [3, 2, 1]


class Requested(Callback):
    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step(self, trainer: Any, step: int) -> None:
        if trainer.ctx.rank == self.rank and step == self.step:
            trainer.stop("seen enough")


def wish() -> Any:
    with rankwise.init(device="cpu"):
        ended = build(epochs=400, callbacks=[Requested(2, 3)]).fit()
        return ended.step, ended.reason, ended.is_over


def test_the_wish_of_one_rank_ends_all_at_the_same_step() -> None:
    """``trainer.stop()`` on rank 2 only: all ranks end after the same step, for the reason that rank 2 gave."""
    found = set(run_ranks(wish, 3))
    assert len(found) == 1
    step, reason, is_over = found.pop()
    assert 3 <= step < 2000
    assert (reason, is_over) == ("asked for: seen enough, on rank 2", True)


class Notice(Callback):
    """Sends SIGTERM to its own process, as a scheduler would."""

    def on_step(self, trainer: Any, step: int) -> None:
        if trainer.ctx.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def be_preempted(folder: Any) -> Any:
    with rankwise.init(device="cpu"):
        trainer = build(folder=folder, epochs=4000, callbacks=[Notice()], save_every=None)
        try:
            trainer.fit()
        except SystemExit as ended:
            return ended.code, trainer.step
    return None


def go_on(folder: Any, num_steps: int) -> Any:
    with rankwise.init(device="cpu"):
        trainer = build(folder=folder, steps=num_steps, callbacks=[Callback()])
        trainer.fit()
        return trainer.step, trainer.epoch


def test_a_notice_saves_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """SIGTERM to one of two ranks: both save at one step and leave with 75; three ranks go on from there."""
    first, second = run_ranks(be_preempted, 2, tmp_path)
    assert first == second
    assert first[0] == rankwise.REQUEUE
    assert checkpoint.latest(tmp_path).name == f"step-{first[1]}"
    assert run_ranks(go_on, 3, tmp_path, first[1] + 4) == [(first[1] + 4, (first[1] + 4) // 5)] * 3
    rows = (tmp_path / "steps.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows[1:]] == list(range(1, first[1] + 5))


# ---------------------------------------------------------------------------------- resume in an epoch


def hear_interrupted(folder: Any, steps: int | None) -> Any:
    with rankwise.init(device="cpu"):
        diary = Diary()
        trainer = build(folder=folder, callbacks=[diary], evaluates=True, monitor="loss", epochs=2, steps=steps,
                        scheduler=lambda optimizer: MultiStepLR(optimizer, [1, 2]), scheduler_every="epoch")  # fmt: skip
        trainer.fit()
        return diary.heard, trainer.optimizer.param_groups[0]["lr"]


def test_an_epochs_end_is_dealt_with_once(tmp_path: Path) -> None:
    """A training that is stopped right at an epoch's end does its evaluation and schedule once, then or later."""
    heard, _ = run_ranks(hear_interrupted, 2, tmp_path, 5)[0]
    assert [one for one in heard if one[0] in {"epoch", "evaluation"}] == [
        ("epoch", 0),
        ("evaluation", 5, True),
    ]
    heard, lr = run_ranks(hear_interrupted, 2, tmp_path, None)[0]
    assert [one for one in heard if one[0] in {"epoch", "evaluation"}] == [
        ("epoch", 1),
        ("evaluation", 10, True),
    ]
    assert lr == pytest.approx(0.05 * 0.01)
    assert run_ranks(hear_interrupted, 1, tmp_path, None)[0][0] == [("start", 10), ("end", 10, "done")]


# ------------------------------------------------------------------------------- precision, schedules


def meet_another_job(folder: Any) -> str:
    agreeing._LEASE_S = 0.1
    said = io.StringIO()
    with (
        rankwise.init(device="cpu"),
        contextlib.redirect_stderr(said),
        pytest.raises(rankwise.CheckpointError) as caught,
    ):
        build(folder=folder, epochs=1).fit()
    return f"{caught.value} {said.getvalue()}"


def test_a_second_job_in_a_folder_is_refused_at_its_start(tmp_path: Path) -> None:
    """Before it has cut or written anything of the running one's, and on every rank."""
    table = tmp_path / "steps.csv"
    table.write_text("step,epoch,samples,loss,lr,grad_norm\n1,0,8,0.5,0.1,0.2\n")
    before = table.read_bytes()
    lock.take(tmp_path)
    try:
        told = run_ranks(meet_another_job, 2, tmp_path)
        # A file server keeps the lock of a host that has crashed for a minute or two.
        (tmp_path / lock.LOCK).write_text(json.dumps({"host": "crashed", "pid": 7}))
        waited = run_ranks(meet_another_job, 2, tmp_path)
    finally:
        lock.let_go(tmp_path)
    assert [f"process {os.getpid()} on host" in text and "waiting for" not in text for text in told] == [
        True,
        True,
    ]
    assert ["process 7 on host crashed" in text for text in waited] == [True, True]
    assert ["as a crashed host's lock is kept for some time" in text for text in waited] == [True, False]
    assert table.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer", "steps.csv"]


def learn(options: dict[str, Any]) -> Any:
    with rankwise.init(device="cpu"):
        diary = Diary()
        trainer = build(epochs=8, callbacks=[diary], **options)
        trainer.fit()
        losses = [one[2] for one in diary.heard if one[0] == "report"]
        dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
        return losses[0], losses[-1], dtypes, trainer.optimizer.param_groups[0]["lr"]


class WhichType(nn.Module):
    """A linear layer that remembers in which type it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        assert outputs.dtype == torch.get_autocast_dtype("cpu")
        return outputs


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_with_whole_weights(precision: str) -> None:
    """Forward passes run in 16 bits, weights stay in 32, and the loss falls."""
    for first, last, dtypes, _ in run_ranks(_learn_mixed, 2, precision):
        assert last < first / 2
        assert dtypes == {"torch.float32"}


def _learn_mixed(precision: str) -> Any:
    return learn({"precision": precision, "model": WhichType(), "clip_norm": 5.0})


def learn_on_plateau() -> Any:
    return learn({
        "evaluates": True, "monitor": "loss", "mode": "max", "evaluate_every": 5,
        "scheduler": lambda optimizer: ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5),
    })  # fmt: skip


def test_a_plateau_is_judged_by_the_monitor() -> None:
    """The loss falls, and the schedule waits for it to rise: it halves the rate after each evaluation but the first."""
    assert [found[3] for found in run_ranks(learn_on_plateau, 2)] == [0.05 / 2**7] * 2


def compile_it() -> Any:
    with rankwise.init(device="cpu"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        trainer = build(epochs=2, model=model, compile={"backend": "aot_eager"}, evaluates=True)
        trainer.fit()
        copy.deepcopy(trainer.model)(torch.ones(2, 4))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return graphs, sorted(trainer.model.state_dict())


def test_a_compiled_model_is_compiled_and_keeps_its_names() -> None:
    """A Sequential, whose forward is torch's own, is compiled all the same; parameters have the names of the plain model."""
    for graphs, names in run_ranks(compile_it, 2):
        assert graphs > 0
        assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]


# ------------------------------------------------------------------------------------ losses and metrics


def measure_both() -> Any:
    """Five classes; ranks and micro-batches of different sizes; the mean of means would be another number."""
    with rankwise.init(device="cpu"):
        inputs = torch.randn(21, 4, generator=torch.Generator().manual_seed(0))
        targets = torch.arange(21) % 5
        model = nn.Linear(4, 5)

        def loss(model: nn.Module, batch: Any) -> Any:
            outputs = model(batch[0])
            right = outputs.argmax(dim=1) == batch[1]
            return {
                "loss": cross_entropy(outputs, batch[1]),
                "right": (right.sum(), len(right)),
                "mean": right.float().mean(),
            }

        reports: list[Any] = []

        class Keep(Callback):
            def on_report(self, trainer: Any, report: Any) -> None:
                reports.append(report)

        trainer = build(data=TensorDataset(inputs, targets), model=model, loss=loss, callbacks=[Keep()], epochs=1,
                        log_every=10, micro_batch=3, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))  # fmt: skip
        trainer.fit()
        outputs = trainer.model(inputs)
        expected = (
            cross_entropy(outputs, targets).item(),
            (outputs.argmax(dim=1) == targets).float().mean().item(),
        )
        return reports[0], expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_the_loss_function_returns_is_averaged_over_samples(world_size: int) -> None:
    """Loss and metrics of an epoch at a rate of 0 are those of the whole data set, for uneven shares and micro-batches of none."""
    for report, (loss, right) in run_ranks(measure_both, world_size):
        assert report.loss == pytest.approx(loss, rel=1e-6)
        assert report.metrics == pytest.approx({"right": right, "mean": right}, rel=1e-6)
        assert report.samples == 21


def return_wrong(what: str) -> str:
    with rankwise.init(device="cpu"):
        wrong: dict[str, Any] = {
            "vector": lambda model, batch: (model(batch[0]) - batch[1]).flatten(),
            "number": lambda model, batch: mean_loss(model, batch).item(),
            "detached": lambda model, batch: mean_loss(model, batch).detach(),
            "nothing": lambda *_: None,
            "no loss": lambda model, batch: {"total": mean_loss(model, batch)},
            "outputs": lambda model, batch: (mean_loss(model, batch), model(batch[0])),
            "more outputs": lambda model, batch: {"loss": mean_loss(model, batch), "logits": model(batch[0])},
        }
        with pytest.raises(rankwise.UsageError) as caught:
            build(loss=wrong[what], epochs=1).fit()
        return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("vector", "returned a Tensor of shape (4,) as 'loss'"),
        ("number", "returned a float as 'loss'"),
        ("detached", "returned a tensor without a gradient"),
        ("nothing", "returned a NoneType as 'loss'"),
        ("no loss", "returned a dict with ['total']"),
        ("outputs", "a pair whose second part is a Tensor of shape (4, 1), and not a count"),
        ("more outputs", "returned a Tensor of shape (4, 1) as 'logits', and not a number"),
    ],
)
def test_a_loss_function_that_returns_something_else_is_told(what: str, said: str) -> None:
    """The error says what was returned, and what to return."""
    for told in run_ranks(return_wrong, 2, what):
        assert said in told
        assert "->" in told


# --------------------------------------------------------------------------------------- what is refused


def attempt(what: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = rankwise.DataLoader(build_data(), global_batch=8)
    config = rankwise.TrainerConfig(epochs=1, progress=False)
    if what == "torch loader":
        rankwise.Trainer(model, optimizer, TorchDataLoader(build_data(), batch_size=4), mean_loss, config=config)
    elif what == "foreign optimizer":
        other = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
        rankwise.Trainer(model, other, loader, mean_loss, config=config)
    elif what == "monitor":
        build(epochs=1, monitor="loss")
    elif what == "unknown monitor":
        build(epochs=1, evaluates=True, monitor="accuracy", mode="max").fit()
    elif what == "plateau":
        build(epochs=1, scheduler=ReduceLROnPlateau)
    elif what == "plateau's mode":
        build(epochs=1, evaluates=True, monitor="loss", scheduler=lambda one: ReduceLROnPlateau(one, mode="max"))
    elif what == "another's schedule":
        build(epochs=1, scheduler=lambda _: MultiStepLR(optimizer, [1]))
    elif what == "criterion":
        build(epochs=1, loss=nn.MSELoss())
    elif what == "callback class":
        build(epochs=1, callbacks=[Diary])
    elif what == "callback's method":
        build(epochs=1, callbacks=[type("Own", (Callback,), {"on_epoch_start": lambda *_: None})()])
    elif what == "logger":
        build(epochs=1, loggers=[Diary()])
    elif what == "config":
        rankwise.Trainer(model, optimizer, loader, mean_loss, config={"epochs": 1})
    elif what == "optimizer class":
        rankwise.Trainer(model, torch.optim.SGD, loader, mean_loss, config=config)
    elif what == "schedule class":
        build(epochs=1, scheduler=lambda _: MultiStepLR)
    elif what == "configurations":
        rank = rankwise.current().rank
        build(epochs=1 + rank, seed=rank, progress=rank == 0).fit()
    elif what == "the model's attribute":
        build(epochs=1, loss=lambda model, _: model.in_features if not hasattr(model, "bogus") else 0).fit()
    elif what == "nothing to evaluate":
        rankwise.Trainer(model, optimizer, loader, mean_loss, config=config).evaluate()


def refuse(what: str) -> str:
    with rankwise.init(device="cpu"):
        with pytest.raises(rankwise.RankwiseError) as caught:
            attempt(what)
        return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("torch loader", "rankwise.DataLoader(dataset, global_batch=8)"),
        ("foreign optimizer", "2 of them are not the model's"),
        ("monitor", "monitor='loss', but there is nothing to evaluate"),
        ("unknown monitor", "monitor='accuracy', but the evaluation has 'loss'"),
        ("plateau", "ReduceLROnPlateau waits for a metric"),
        ("plateau's mode", "in opposite ways"),
        ("another's schedule", "the learning rate of another optimizer"),
        ("criterion", "loss is a MSELoss, which does not know the model"),
        ("callback class", "the class Diary is not a rankwise.train.Callback"),
        ("callback's method", "Own.on_epoch_start would never be called"),
        ("logger", "a Diary is not a logger"),
        ("config", "config is a dict"),
        ("optimizer class", "the optimizer is the class SGD"),
        ("schedule class", "the scheduler is the class MultiStepLR"),
        (
            "configurations",
            "rank 0: the TrainerConfig={'epochs': 1, 'log_every': 2}; rank 1: the TrainerConfig={'epochs': 2, 'log_every': 2}",
        ),
        ("the model's attribute", "model.module.in_features (trainer.model.in_features)"),
        ("nothing to evaluate", "this Trainer has nothing to evaluate"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_to_do(what: str, said: str) -> None:
    """Each on all ranks, before anything hangs."""
    for told in run_ranks(refuse, 2, what):
        assert said in told
        assert "->" in told


# ------------------------------------------------------------------------------------- replicas, loggers


class Drift(Callback):
    def on_step(self, trainer: Any, step: int) -> None:
        if step == 3 and trainer.ctx.rank == 1:
            with torch.no_grad():
                trainer.model.weight.add_(1e-3)


def drift() -> str:
    with rankwise.init(device="cpu"), pytest.raises(rankwise.ModelError) as caught:
        build(epochs=4, callbacks=[Drift()], check_replicas_every=4).fit()
    return str(caught.value)


def test_weights_that_drift_apart_are_found() -> None:
    """A weight changed on one rank by a thousandth is named at the next check, on all ranks."""
    for told in run_ranks(drift, 2):
        assert "'weight'" in told


class Broken:
    """A logger whose dashboard is away."""

    def __init__(self) -> None:
        self.num_calls = 0

    def on_start(self, started: Any) -> None:
        pass

    def on_step(self, step: int) -> None:
        pass

    def on_report(self, report: Any) -> None:
        self.num_calls += 1
        raise ConnectionError("no route to the dashboard")

    def on_evaluation(self, evaluated: Any) -> None:
        pass

    def on_end(self, ended: Any) -> None:
        self.num_calls += 1


def log_badly(folder: Any) -> Any:
    with rankwise.init(device="cpu"):
        logger = Broken()
        ended = build(epochs=2, loggers=[logger], folder=folder).fit()
        return ended.reason, logger.num_calls


def test_a_logger_that_fails_ends_no_training(tmp_path: Path) -> None:
    """It is called on rank 0 only, once, and left out from then on; the others go on to write."""
    assert run_ranks(log_badly, 2, tmp_path) == [("done", 1), ("done", 0)]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert kinds == ["started", *["report"] * 6, "ended"]


def compile_nothing() -> Any:
    with rankwise.init(device="cpu"), contextlib.redirect_stderr(io.StringIO()) as told:
        model = nn.Linear(4, 1)
        model.forward = torch.compiler.disable(model.forward)
        build(epochs=1, model=model, compile={"backend": "aot_eager"}).fit()
        return told.getvalue()


def test_a_model_that_is_not_compiled_is_told() -> None:
    """compile=True on a model that torch leaves alone: rank 0 says so, once, and the training goes on."""
    first, second = run_ranks(compile_nothing, 2)
    assert first.count("torch has compiled no part of the model") == 1
    assert "compiled" not in second


def save_often(folder: Any) -> Any:
    with rankwise.init(device="cpu"):
        build(folder=folder, epochs=2, evaluates=True, monitor="loss", save_every=5).fit()
        return [(one.step, sorted(one.manifest.metrics)) for one in checkpoint.list_checkpoints(folder)]


def test_a_checkpoint_at_an_epochs_end_has_the_evaluation(tmp_path: Path) -> None:
    """A save that is due at the last step of an epoch waits for the epoch's evaluation, by which the best one is found."""
    assert run_ranks(save_often, 2, tmp_path)[0] == [(10, ["loss"]), (5, ["loss"])]


class Spoil(torch.autograd.Function):
    """A finite value with a gradient that is none."""

    @staticmethod
    def forward(_context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


def spoil_gradient(folder: Any) -> str:
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        value = mean_loss(model, batch)
        return Spoil.apply(value) if calls[0] == 6 else value

    with rankwise.init(device="cpu"), pytest.raises(rankwise.NumericsError) as caught:
        build(loss=loss, folder=folder, epochs=3, save_every=2).fit()
    return str(caught.value)


def test_weights_that_a_gradient_has_spoilt_are_not_saved(tmp_path: Path) -> None:
    """The loss is finite and its gradient is not: the save that is due after this step is refused, with the parameters' names."""
    for told in run_ranks(spoil_gradient, 2, tmp_path):
        assert "after step 6 weights are NaN or infinite: 'weight', 'bias'; they are not saved" in told
    assert checkpoint.latest(tmp_path).name == "step-4"


def overflow_for_ever() -> str:
    with rankwise.init(device="cpu"), pytest.raises(rankwise.NumericsError) as caught:
        build(loss=lambda model, batch: mean_loss(model, batch) * math.nan, epochs=9, non_finite="skip", precision="fp16").fit()  # fmt: skip
    return str(caught.value)


def test_a_scaler_that_skips_for_ever_is_an_error() -> None:
    """With fp16 the scaler skips steps by itself; thirty in a row are no overflow any more."""
    for told in run_ranks(overflow_for_ever, 2):
        assert "at step 30, and not finite at the 29 steps before it" in told


# ------------------------------------------------------------------------------------- what reviews have found


def be_preempted_with_monitor(folder: Any) -> Any:
    with rankwise.init(device="cpu"):
        try:
            build(
                folder=folder,
                epochs=4000,
                callbacks=[Notice()],
                evaluates=True,
                monitor="loss",
                evaluate_every=100,
            ).fit()
        except SystemExit as ended:
            return ended.code
    return None


def test_a_notice_between_two_evaluations_saves_what_nobody_has_judged(tmp_path: Path) -> None:
    """With a monitor a checkpoint without an evaluation is kept all the same."""
    assert run_ranks(be_preempted_with_monitor, 2, tmp_path) == [rankwise.REQUEUE] * 2
    latest = checkpoint.latest(tmp_path)
    assert latest is not None
    assert not checkpoint.list_checkpoints(tmp_path)[0].manifest.metrics


def stop_twice() -> list[int]:
    with rankwise.init(device="cpu"):
        first = build(epochs=400, callbacks=[Requested(1, 2)])
        first.fit()
        second = build(epochs=2)
        second.fit()
        return [first.step < 2000, second.step]


def test_a_wish_ends_one_training_and_not_the_next() -> None:
    """After a training that a rank has stopped, the next one in the same process goes to its end."""
    assert run_ranks(stop_twice, 2) == [[True, 10]] * 2


class Uncertain(nn.Module):
    """A loss with a weight of its own: the mean of no samples, NaN, must not reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.log_variance = nn.Linear(4, 1), nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


def weigh_nothing(data: TensorDataset) -> list[float]:
    with rankwise.init(device="cpu"):

        def loss(model: nn.Module, batch: Any) -> Tensor:
            log_variance = getattr(model, "module", model).log_variance
            return mse_loss(model(batch[0]), batch[1]) * (-log_variance).exp() + log_variance

        trainer = build(model=Uncertain(), loss=loss, data=data, epochs=1)
        trainer.fit()
        return [float(value) for parameter in trainer.model.parameters() for value in parameter.flatten()]


def test_a_rank_without_samples_adds_nothing_to_any_gradient() -> None:
    """The last step has one sample for two ranks; a factor that is learned stays finite, and equal to one process's."""
    inputs, targets = (tensor[:9] for tensor in build_data().tensors)
    data = TensorDataset(inputs, targets)
    alone = run_ranks(weigh_nothing, 1, data)[0]
    for found in run_ranks(weigh_nothing, 2, data):
        assert found == pytest.approx(alone, rel=1e-5)


def evaluate_with_statistics() -> Any:
    with rankwise.init(device="cpu") as ctx, _plain_norms():
        torch.manual_seed(0)
        trainer = build(model=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), evaluates=True, epochs=1)
        trainer.fit()
        own = mse_loss(trainer.model.eval()(build_data().tensors[0]), build_data().tensors[1]).item()
        return ctx.rank, trainer.metrics["loss"], own


def test_an_evaluation_is_that_of_one_model() -> None:
    """BatchNorm that is not synced keeps other statistics on each rank: all evaluate with those of rank 0, which are saved."""
    for _, measured, own in run_ranks(evaluate_with_statistics, 2):
        assert measured == pytest.approx(own, rel=1e-5)


@contextlib.contextmanager
def _plain_norms() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the losses of 2 ranks")
        yield


def skip_spoilt_statistics() -> list[float]:
    with rankwise.init(device="cpu"), _plain_norms():
        inputs, targets = (tensor.clone() for tensor in build_data().tensors)
        inputs[7] = math.nan
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        trainer = build(model=model, data=TensorDataset(inputs, targets), epochs=1, non_finite="skip")
        trainer.fit()
        return [float(value) for buffer in trainer.model.buffers() for value in buffer.flatten()]


def test_a_skipped_step_leaves_no_trace_in_running_statistics() -> None:
    """A sample that is NaN spoils neither weights nor BatchNorm's statistics."""
    for found in run_ranks(skip_spoilt_statistics, 2):
        assert all(math.isfinite(value) for value in found)


def fit_with_warnings(layers: dict[str, nn.Module], **config: Any) -> list[str]:
    with rankwise.init(device="cpu"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(model=nn.Sequential(OrderedDict(layers)), epochs=1, **config).fit()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_layers_that_know_one_rank_only_are_warned_of_once() -> None:
    """Plain dropout and BatchNorm on two ranks are named at the user's line, with the ways out; one rank, and layers that are exact, bring no word."""
    plain = {"drop": nn.Dropout(0.5), "norm": nn.BatchNorm1d(4), "out": nn.Linear(4, 1)}
    (told,), silent = run_ranks(fit_with_warnings, 2, plain)
    assert told.startswith("the losses of 2 ranks will differ from those of one process: drop drops by")
    assert "replace_dropout(model)" in told
    assert "norm normalises by the samples of one rank (TrainerConfig(sync_batchnorm=True)" in told
    assert silent == []
    assert run_ranks(fit_with_warnings, 1, plain) == [[]]
    assert run_ranks(fit_exact_layers, 2) == [[], []]


def fit_exact_layers() -> list[str]:
    layers = {"drop": rankwise.train.GlobalDropout(0.5), "off": nn.Dropout(0.0), "norm": nn.BatchNorm1d(4)}
    return fit_with_warnings({**layers, "out": nn.Linear(4, 1)}, sync_batchnorm=True)


class Doubled(Callback):
    """Doubles the gradients, and writes down their norm."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any) -> None:
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())
        for gradient in gradients:
            gradient.mul_(2)


def fit_doubled(clip_norm: float | None) -> Any:
    with rankwise.init(device="cpu"):
        callback = Doubled()
        trainer = build(callbacks=[callback], epochs=1, clip_norm=clip_norm, micro_batch=2)
        trainer.fit()
        return callback.norms, [parameter.detach() for parameter in trainer.model.parameters()]


def test_gradients_are_shown_whole_before_they_are_clipped() -> None:
    """Averaged over ranks and micro-batches, once a step, equal on all ranks and to those of one process; what a callback changes there counts."""
    (alone, weights), *_ = run_ranks(fit_doubled, 1, None)
    for norms, found in run_ranks(fit_doubled, 2, None):
        assert norms == pytest.approx(alone, rel=1e-5)
        torch.testing.assert_close(found, weights)
    assert len(alone) == 5
    # The norm that is shown is not the clipped one.
    (clipped, _), *_ = run_ranks(fit_doubled, 1, 1e-3)
    assert clipped[0] == pytest.approx(alone[0])


class Replaced(Callback):
    """Puts other, much greater tensors in the place of the gradients, and writes down the norm that is reported."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any) -> None:
        for parameter in trainer.model.parameters():
            parameter.grad = parameter.grad * 1000

    def on_report(self, trainer: Any, report: Any) -> None:
        self.norms += report.grad_norms


def fit_replaced() -> Any:
    with rankwise.init(device="cpu"):
        callback = Replaced()
        trainer = build(callbacks=[callback], steps=1, clip_norm=0.1)
        before = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
        trainer.fit()
        after = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
        return float((after - before).norm()), callback.norms


def test_gradients_that_a_callback_has_replaced_are_clipped() -> None:
    """Clipping and the reported norm are of the tensors that stand in parameter.grad afterwards, and not of those before."""
    for moved, (norm,) in run_ranks(fit_replaced, 2):
        assert moved == pytest.approx(0.05 * 0.1, rel=1e-3)  # learning rate times clip_norm
        assert norm > 100


def train_with_rates(folder: Any) -> Any:
    with rankwise.init(device="cpu"), contextlib.redirect_stderr(io.StringIO()) as told:
        for epochs, rate in ((1, 0.05), (2, 0.05), (3, 0.2), (4, 0.2)):
            # A schedule moves the rate after the optimizer was made; that is no change of the user's.
            optimizer, scheduler = (
                lambda given, rate=rate: torch.optim.SGD(given, lr=rate),
                lambda one: MultiStepLR(one, [3]),
            )
            build(folder=folder, epochs=epochs, optimizer=optimizer, scheduler=scheduler).fit()
            print(f"after {epochs}", file=told)
        return told.getvalue()


def test_a_learning_rate_that_a_checkpoint_replaces_is_told(tmp_path: Path) -> None:
    """Edited in the script, and without effect: rank 0 says so at each start, with both values; an unchanged one brings no word."""
    first, second = run_ranks(train_with_rates, 2, tmp_path / "a")
    quiet, *loud = first.split("after 2")
    assert "is not used" not in quiet + second
    assert loud[0].count("lr=0.2 is not used: the optimizer continues with 0.05, as the checkpoint has it") == 2


class Interrupt(Callback):
    def __init__(self) -> None:
        self.is_armed = True

    def on_step(self, trainer: Any, step: int) -> None:
        if step == 3 and self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt


def fit_again(folder: Any) -> Any:
    with rankwise.init(device="cpu"):
        trainer = build(folder=folder, epochs=2, callbacks=[Interrupt()], save_every=2, micro_batch=2, log_every=50)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        return trainer.fit().step


def test_fit_after_an_interrupt_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """In a notebook: the second call loads step 2, and every step stands in the table once, with one process's numbers."""
    assert run_ranks(fit_again, 2, tmp_path / "a") == [10, 10]
    rows = (tmp_path / "a" / "steps.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, 11))
    run_ranks(go_on, 1, tmp_path / "b", 10)
    expected = (tmp_path / "b" / "steps.csv").read_text().splitlines()[1:]
    for ours, theirs in zip(rows, expected, strict=True):
        assert float(ours.split(",")[3]) == pytest.approx(float(theirs.split(",")[3]), rel=1e-5)


class Once(torch.utils.data.IterableDataset):
    """Gives the same generator again."""

    def __init__(self) -> None:
        self.samples = ((torch.ones(4), torch.ones(1)) for _ in range(20))

    def __iter__(self) -> Any:
        return self.samples


def exhaust() -> str:
    with rankwise.init(device="cpu"):
        model = nn.Linear(4, 1)
        trainer = rankwise.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), rankwise.DataLoader(Once(), global_batch=8), mean_loss,
            config=rankwise.TrainerConfig(steps=50, progress=False),
        )  # fmt: skip
        with pytest.raises(rankwise.DataError) as caught:
            trainer.fit()
        return str(caught.value)


def test_data_that_gives_nothing_any_more_is_an_error() -> None:
    """A stream that is empty from its second epoch on does not spin for ever."""
    for told in run_ranks(exhaust, 1):
        assert "epochs 1 and 2 had no samples" in told


def mix() -> str:
    with rankwise.init(device="cpu") as ctx:

        def loss(model: nn.Module, batch: Any) -> Any:
            value = mean_loss(model, batch)
            return (value * 4, 4) if ctx.rank == 0 else value

        with pytest.raises(rankwise.CollectiveError) as caught:
            build(epochs=1, loss=loss).fit()
        return str(caught.value)


def test_ranks_that_return_different_kinds_of_losses_are_told() -> None:
    """A sum with a count on one rank, a mean on the other: an error on both, and no abort in Gloo."""
    for told in run_ranks(mix, 2):
        assert "do not agree on what the loss function returns" in told


class EarlyNotice(Callback):
    def on_start(self, trainer: Any, started: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def be_preempted_early(folder: Any) -> Any:
    with rankwise.init(device="cpu"), pytest.raises(SystemExit) as ended:
        build(folder=folder, epochs=4000, callbacks=[EarlyNotice()]).fit()
    return ended.value.code


def test_a_notice_before_the_first_step_is_heard(tmp_path: Path) -> None:
    """A scheduler that wants the host back at once gets a checkpoint and 75; without a folder, 143: to start again would help nobody."""
    assert run_ranks(be_preempted_early, 2, tmp_path) == [rankwise.REQUEUE] * 2
    assert checkpoint.latest(tmp_path) is not None
    assert run_ranks(be_preempted_early, 2, None) == [143] * 2
