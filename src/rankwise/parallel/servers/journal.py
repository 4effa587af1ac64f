"""What scheduled functions have returned, kept in the host's memory, so that a coordinator that is started again does not repeat them.

Its script runs again from the top and schedules the same functions in the same order. Those that are in the journal are done at once, with
the value that they had returned; the first one that is not the same function as before ends the replay.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.log import get_logger
from rankwise.base.roles import note_needed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LOGGER = get_logger(__name__)


@final
class Journal:
    """A file of results, in the order in which functions ended.

    Args:
        path: The file; None: nothing is kept, and the death of this process ends the attempt.
        rank: Our rank, for messages.

    Attributes:
        is_resumed: Whether a former process of this rank has begun it.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._rank, self._path = rank, path
        self._results = dict[int, tuple[str, int, bytes]]()
        self.is_resumed = path is not None and path.exists()
        if path is None:
            note_needed()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        end = 0
        if self.is_resumed:
            with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
                while True:  # the last one may be cut
                    number, *result = pickle.load(file)  # noqa: S301 - written by this rank
                    self._results[number] = (result[0], result[1], result[2])
                    end = file.tell()
        self._file = path.open("r+b" if self.is_resumed else "wb", buffering=0)
        self._file.truncate(end)
        self._file.seek(end)

    def __len__(self) -> int:
        return len(self._results)

    def find(self, number: int, call: str) -> tuple[int, bytes] | None:
        """Return who has done a function and what it returned, pickled; None if it was not done yet."""
        found = self._results.get(number)
        if found is None:
            return None
        if found[0] != call:
            self._forget_from(number)
            _LOGGER.warning(
                f"[rank {self._rank}] scheduled function {number} is {call} and was {found[0]} before the coordinator was started again: "
                "results from here on are not used, and these functions run again"
            )
            return None
        return found[1:]

    def _forget_from(self, number: int) -> None:
        """Drop what the script does not repeat, from the file too: the next process must not take it for results of this one."""
        self._results = {one: result for one, result in self._results.items() if one < number}
        self._file.truncate(0)
        self._file.seek(0)
        for one, result in self._results.items():
            self._file.write(pickle.dumps((one, *result)))

    def add(self, number: int, call: str, worker: int, value: bytes) -> None:
        """Keep what a function has returned."""
        if self._path is None:
            return
        try:
            self._file.write(pickle.dumps((number, call, worker, value)))
        except OSError as error:  # no space: what is in it is not enough any more
            self._path = None
            self._file.close()
            note_needed()
            _LOGGER.warning(
                f"[rank {self._rank}] results of scheduled functions can't be kept ({error.strerror}): "
                "if the coordinator dies, all ranks start again"
            )

    def close(self) -> None:
        """Close the file, which goes with the job."""
        if self._path is not None:
            self._path = None
            self._file.close()


def describe_call(function: Any, args: Sequence[Any]) -> str:
    """Return a function and its arguments in words that are the same in another process; of large arguments their kind only."""
    return f"{_describe(function)}({', '.join(map(_describe, args))})"


def _describe(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__name__
