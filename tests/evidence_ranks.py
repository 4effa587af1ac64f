"""Ranks that record what they do, started by hand: a test sees what their parent would see, and nobody judges them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from gloo_words import without_gloo
from python_forks import PLAIN, ForkedPython, can_fork
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.os_calls import ASK_FD, EVIDENCE_FD, NOTES_FD, STACKS_FD, make_memory_file
from rankwise.evidence.reader.rank_channel import RankChannel
from rankwise.launcher.rank_command import hook_env
from support import free_port, make_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rankwise.evidence.reader.scene import Evidence

_LIMIT_S = 90.0


@final
class RecordedRank:
    """One rank, and its parent's end of what it records."""

    def __init__(
        self,
        program: list[str],
        env: dict[str, str],
        *,
        is_watched: bool,
        folder: Path | None,
        modules: Sequence[str],
    ) -> None:
        place = RankChannel.open()
        assert place is not None
        self.place = place
        self._files = [make_memory_file(name) for name in ("notes", "stacks")]
        numbers, ours = (NOTES_FD, STACKS_FD, EVIDENCE_FD, ASK_FD), (*self._files, *place.rank_fds)
        is_forked = bool(modules) and can_fork(modules)
        notes, stacks, file, asks = numbers if is_forked else ours
        told = {"file": file, "asks": asks, "identities": _identify(place.rank_fds)}
        hook = hook_env(notes, stacks, _identify(tuple(self._files)), told if is_watched else None)
        full_env = make_env({**env, **hook})
        self.process: ForkedPython | subprocess.Popen[str]
        if is_forked:
            fds = dict(zip(numbers, ours, strict=True))
            self.process = ForkedPython(program, full_env, folder, fds, modules=modules)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *program],
                env=full_env,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=ours,
            )
        place.close_rank_end()

    def read(self) -> Evidence:
        """Return what it has recorded; something must be."""
        evidence = self.place.read()
        assert evidence is not None, "nothing was recorded"
        return evidence

    def wait_until(self, condition: Callable[[Evidence], bool]) -> Evidence:
        """Return what it has recorded as soon as that meets a condition."""
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            evidence = self.place.read()
            if evidence is not None and condition(evidence):
                return evidence
            assert self.process.poll() is None or evidence is not None, self.process.communicate()
            time.sleep(0.01)
        raise AssertionError(f"it did not reach this state: {self.place.read()}")

    def ask(self) -> Evidence:
        """Return what it has recorded and what it answers."""
        self.place.ask()
        assert self.place.wait_answer(SYSTEM_CLOCK, _LIMIT_S)
        return self.read()

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end, and return its exit code, its output and its errors."""
        out, err = self.process.communicate(timeout=_LIMIT_S)
        return self.process.returncode, without_gloo(out), err

    def close(self) -> None:
        """End it if it lives, and close all."""
        self.process.kill()
        self.process.communicate()
        for fd in self._files:
            os.close(fd)
        self.place.close()


@contextmanager
def recorded_ranks(
    script: Path,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    *,
    is_watched: bool = True,
    folder: Path | None = None,
    arguments: Sequence[str] = (),
    modules: Sequence[str] = PLAIN,
) -> Iterator[list[RecordedRank]]:
    """Start the ranks of a job that run a script; they are ended with the block.

    Args:
        script: What they run.
        num_ranks: How many.
        env: What they have in their environment beside a rank's variables.
        is_watched: Whether they record.
        folder: Where they stand.
        arguments: The script's.
        modules: What is loaded already in the Python that they are forked off; none: each starts anew.
    """
    port = free_port()
    shared = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "2000", **(env or {})}  # fmt: skip
    ranks = [
        RecordedRank(
            [str(script), *arguments],
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            is_watched=is_watched,
            folder=folder,
            modules=modules,
        )
        for rank in range(num_ranks)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def _identify(fds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(number for fd in fds for number in (os.fstat(fd).st_dev, os.fstat(fd).st_ino))
