"""Checkpoints in tf's words, over ``rankwise.checkpoint`` and ``ctx.should_stop()``."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import CheckpointError, UsageError
from rankwise.checkpoint.folder import latest, open_checkpoint
from rankwise.checkpoint.loading import load
from rankwise.checkpoint.retention import Keep
from rankwise.checkpoint.saving import save
from rankwise.runtime.collectives import barrier
from rankwise.runtime.context import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@final
class Checkpoint:
    """Parts of a training that are saved together.

    Args:
        **parts: Models, optimizers, loaders, numbers.

    Attributes:
        save_counter: The step of the last checkpoint that was saved or restored.
    """

    def __init__(self, **parts: Any) -> None:
        self.parts, self.save_counter = parts, 0

    def save(self, file_prefix: str | Path) -> Path:
        """Save as ``file_prefix/step-N``, where N is one more than the last.

        Args:
            file_prefix: A folder of these checkpoints; shared by all hosts, the same on all ranks. None is deleted:
                ``CheckpointManager`` does that.

        Returns:
            The checkpoint's folder, for ``restore``.

        Collective: every rank.
        """
        self.save_counter += 1
        return save(file_prefix, self.parts, step=self.save_counter).wait()

    def write(self, file_prefix: str | Path) -> Path:
        """Save as ``file_prefix/step-0``, in place of what was written there; nothing is counted.

        Args:
            file_prefix: As for ``save``.

        Returns:
            The checkpoint's folder, for ``read``.

        Collective: every rank.
        """
        return save(file_prefix, self.parts, step=0).wait()

    def read(self, save_path: str | Path) -> None:
        """Load a checkpoint; nothing is counted.

        Args:
            save_path: What ``write`` was given, or has returned.

        Raises:
            CheckpointError: There is none.

        Collective: every rank.
        """
        if load(save_path, self.parts) is None:
            raise CheckpointError(f"{save_path} holds no checkpoint", hint="pass what write() has returned")

    def restore(self, save_path: str | Path | None) -> None:
        """Load a checkpoint.

        Args:
            save_path: Its folder, as ``latest_checkpoint`` gives it; None: nothing is loaded.

        Raises:
            CollectiveError: The ranks ask for different ones: a host does not see what another one sees.

        Collective: every rank.
        """
        current().agree(None if save_path is None else Path(save_path).name, "the checkpoint to restore")
        if save_path is not None:
            found = open_checkpoint(save_path)
            load(Path(save_path).parent, self.parts, step=found.step)
            self.save_counter = found.step


def latest_checkpoint(checkpoint_dir: str | Path) -> Path | None:
    """Return the folder of the checkpoint that was saved last in a folder or in one below it, as by ``Checkpoint.save("folder/ckpt")``.

    Args:
        checkpoint_dir: It need not exist.

    Returns:
        The checkpoint's folder, for ``restore``, which sees that all ranks mean the same; None if there is none.
    """
    top = Path(checkpoint_dir)
    places = [top, *(one for one in top.glob("*") if one.is_dir())]
    found = [one for one in map(latest, places) if one is not None]
    return max(found, key=lambda one: one.stat().st_mtime_ns, default=None)


@final
class CheckpointManager:
    """Saves a ``Checkpoint`` in a folder, completely or not at all.

    Args:
        checkpoint: What.
        directory: Where; shared by all hosts, the same on all ranks. All ranks save, into one folder.
        max_to_keep: How many are kept; None: all.

    Attributes:
        checkpoint: As given.
        directory: As given.
    """

    def __init__(self, checkpoint: Checkpoint, directory: str | Path, max_to_keep: int | None = None) -> None:
        self.checkpoint, self.directory = checkpoint, Path(directory)
        self._keep = None if max_to_keep is None else Keep(last=max_to_keep)

    def save(self, checkpoint_number: int | None = None) -> Path:
        """Save.

        Args:
            checkpoint_number: The step; None: one more than the last.

        Returns:
            The checkpoint's folder.

        Collective: every rank.
        """
        step = self.checkpoint.save_counter + 1 if checkpoint_number is None else checkpoint_number
        self.checkpoint.save_counter = step
        return save(self.directory, self.checkpoint.parts, step=step, keep=self._keep).wait()

    def restore_or_initialize(self) -> int | None:
        """Load the latest complete checkpoint, if there is one.

        Returns:
            Its step, or None.

        Collective: every rank.
        """
        step = load(self.directory, self.checkpoint.parts)
        if step is not None:
            self.checkpoint.save_counter = step
        return step

    @property
    def latest_checkpoint(self) -> Path | None:
        """The folder of the latest complete checkpoint; None if there is none."""
        return latest(self.directory)


@final
@dataclass(frozen=True, slots=True)
class TerminationConfig:
    """What happens at a scheduler's notice.

    Attributes:
        exit_fn: Called after the save; None: the job leaves with exit code 75 (``rankwise.REQUEUE``): to be started
            again.
        grace_period: Seconds that agreeing and saving take; see ``margin_s`` of ``ctx.listen_for_stop``.
    """

    exit_fn: Callable[[], Any] | None = None
    grace_period: float = 120.0


@final
class PreemptionCheckpointHandler:
    """Saves at a scheduler's notice, on all ranks at one agreed step, and continues there when the job is started again.

    Args:
        cluster_resolver: Of no effect: a notice on any rank reaches all.
        checkpoint_or_checkpoint_manager: What is saved.
        checkpoint_dir: Where, if a ``Checkpoint`` is given.
        termination_config: What happens afterwards.

    Attributes:
        total_run_calls: How many steps are done, those of earlier starts among them.

    Raises:
        UsageError: A ``Checkpoint`` without a folder.

    Collective: every rank.
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | Path | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        del cluster_resolver
        given = checkpoint_or_checkpoint_manager
        if isinstance(given, Checkpoint):
            if checkpoint_dir is None:
                raise UsageError(
                    "PreemptionCheckpointHandler of a Checkpoint without checkpoint_dir",
                    hint="pass where it is saved, or a CheckpointManager",
                )
            given = CheckpointManager(given, checkpoint_dir, max_to_keep=1)
        self._manager, self._termination = given, termination_config or TerminationConfig()
        ctx = current()
        if not ctx.listens_for_stop:
            ctx.listen_for_stop(margin_s=self._termination.grace_period)
        self.total_run_calls = given.restore_or_initialize() or 0

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one step of the training, then save and leave if there was a notice.

        Args:
            distributed_train_function: The step.
            *args: Its arguments.
            **kwargs: The same, by name.

        Returns:
            What it returned.

        Collective: every rank.
        """
        result = distributed_train_function(*args, **kwargs)
        self.total_run_calls += 1
        self.save_checkpoint_if_preempted()
        return result

    def save_checkpoint_if_preempted(self) -> None:
        """Save and leave if there was a notice; ``run`` does it after each step.

        Collective: every rank.
        """
        ctx = current()
        if not ctx.should_stop():
            return
        self._manager.save(self.total_run_calls)
        if self._termination.exit_fn is None:
            ctx.leave_for_requeue()
        self._termination.exit_fn()


@final
class BackupAndRestore:
    """Counts the steps of a training, continues after the last one that was saved, and removes the backup at its end.

    Keras's is a callback of ``fit``; a ``Trainer`` with a folder does the same without one. This is for loops of one's
    own: ``for step in BackupAndRestore("backup", save_freq=100).steps(checkpoint, 10_000)``.

    Args:
        backup_dir: Where; shared by all hosts.
        save_freq: Steps between two saves.
        delete_checkpoint: Whether the folder is removed when the training has ended.
    """

    def __init__(
        self,
        backup_dir: str | Path,
        save_freq: int = 100,
        delete_checkpoint: bool = True,  # noqa: FBT001 - Keras's signature
    ) -> None:
        if type(save_freq) is not int or save_freq < 1:
            raise UsageError(
                f"BackupAndRestore(save_freq={save_freq!r})",
                hint='a number of steps; "epoch" is one of a Trainer with a folder: TrainerConfig(save_every="epoch")',
            )
        self._folder, self._every, self._deletes = Path(backup_dir), save_freq, delete_checkpoint

    def steps(self, checkpoint: Checkpoint, num_steps: int) -> Iterator[int]:
        """Yield the steps that are left, from 0 or from after the last save.

        Args:
            checkpoint: What is saved, the loader too if the order of the data matters.
            num_steps: Steps of the whole training.

        Yields:
            The number of the step.

        Collective: every rank.
        """
        manager = CheckpointManager(checkpoint, self._folder, max_to_keep=1)
        handler = PreemptionCheckpointHandler(None, manager)
        while handler.total_run_calls < num_steps:
            yield handler.total_run_calls
            handler.total_run_calls += 1
            handler.save_checkpoint_if_preempted()
            if handler.total_run_calls % self._every == 0:
                manager.save(handler.total_run_calls)
        barrier("the backup is not needed any more")
        if self._deletes and current().is_main:
            shutil.rmtree(self._folder, ignore_errors=True)
