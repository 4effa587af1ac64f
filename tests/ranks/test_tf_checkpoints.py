"""Checkpoints in tf's words: what a notice interrupts goes on where it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise import tf
from rankwise.testing import run_ranks

NUM_STEPS = 60


class LeftError(Exception):
    """In place of the end of the process."""


def leave() -> None:
    raise LeftError


def train(folder: str, notice_at: int | None, way: str) -> Any:
    torch.set_num_threads(1)
    strategy = tf.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.weight.data.fill_(1.0)

    def step(number: int) -> None:
        if number == notice_at and strategy.replica_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if notice_at is not None and number >= notice_at:
            time.sleep(0.05)  # steps that take nothing would be over before the ranks have agreed on one
        optimizer.zero_grad()
        tf.compute_average_loss(model(torch.tensor([[float(number + strategy.replica_id)]]))[:, 0]).backward()
        optimizer.step()

    checkpoint, first = tf.Checkpoint(model=model, optimizer=optimizer), -1
    try:
        if way == "backup":
            for number in tf.BackupAndRestore(folder, save_freq=25).steps(checkpoint, NUM_STEPS):
                first = number if first < 0 else first
                strategy.run(step, args=(number,))
            return first, model.weight.item(), Path(folder).exists()
        manager = tf.CheckpointManager(checkpoint, folder, max_to_keep=1)
        handler = tf.PreemptionCheckpointHandler(
            strategy.cluster_resolver, manager, termination_config=tf.TerminationConfig(exit_fn=leave)
        )
        first = handler.total_run_calls
        for number in range(first, NUM_STEPS):
            handler.run(strategy.run, step, args=(number,))
    except (LeftError, SystemExit) as error:
        return first, type(error).__name__, getattr(error, "code", None)
    assert manager.latest_checkpoint is not None
    return first, model.weight.item(), manager.latest_checkpoint.name


def test_a_notice_is_survived(tmp_path: Path) -> None:
    """Both ways: all ranks leave at one step after a SIGTERM to one of them; started again they go on there, and end as if nothing had been."""
    (_, whole, exists), _ = run_ranks(train, 2, str(tmp_path / "whole"), None, "backup")
    assert not exists
    for way in ("backup", "handler"):
        folder = str(tmp_path / way)
        stopped = run_ranks(train, 2, folder, 30, way)
        assert stopped == [(0, "SystemExit", 75)] * 2 if way == "backup" else [(0, "LeftError", None)] * 2
        again = run_ranks(train, 2, folder, None, way)
        assert again[0][0] == again[1][0] >= 30
        assert [one[1] for one in again] == [whole] * 2
        assert Path(folder).exists() == (way == "handler")


def restore(folder: str) -> list[Any]:
    strategy = tf.MultiWorkerMirroredStrategy()
    kept, found = tf.train.Checkpoint(epoch=0), []
    manager = tf.train.CheckpointManager(kept, folder, max_to_keep=2)
    kept.restore(manager.latest_checkpoint)
    for epoch in range(kept.parts["epoch"], kept.parts["epoch"] + 2):
        kept.parts["epoch"] = epoch + 1
        found.append(manager.save().name)
    return [*found, strategy.num_replicas_in_sync, keep_without_manager(f"{folder}/alone")]


def keep_without_manager(folder: str) -> list[Any]:
    """As tf's tutorial on custom loops: a prefix in a folder, and the latest of the folder."""
    kept = tf.train.Checkpoint(epoch=0)
    kept.restore(tf.train.latest_checkpoint(folder))
    kept.parts["epoch"] += 1
    for _ in range(2):
        written = kept.write(f"{folder}/once")
    names = [kept.save(f"{folder}/ckpt").name, kept.save(f"{folder}/ckpt").name]
    kept.parts["epoch"] = 100
    kept.read(written)
    return [written.parent.name, *names, kept.save_counter, kept.parts["epoch"]]


def test_a_loop_of_tfs_guide_goes_on_where_it_was(tmp_path: Path) -> None:
    """`checkpoint.restore(manager.latest_checkpoint)`: nothing at first, then the last one, from whose number the next are counted; the same without a manager."""
    assert run_ranks(restore, 2, str(tmp_path)) == [["step-1", "step-2", 2, ["once", "step-1", "step-2", 2, 1]]] * 2
    assert run_ranks(restore, 2, str(tmp_path)) == [["step-3", "step-4", 2, ["once", "step-3", "step-4", 4, 2]]] * 2
