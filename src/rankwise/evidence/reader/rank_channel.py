"""The parent's end of what a rank records of itself: a memory file to read, and a pipe by which to ask for more."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, final

from rankwise.base.os_calls import IS_LINUX, count_allowed_files, make_memory_file
from rankwise.evidence.in_rank.ring import HEADER_BYTES, SIZE_BYTES, read_asked, read_mark
from rankwise.evidence.reader.merge_records import Merger

if TYPE_CHECKING:
    from rankwise.base.clock import Clock
    from rankwise.evidence.reader.scene import Evidence

_QUESTION = _PASSED = struct.Struct("<Q")
_LOOK_EVERY_S = 0.004
_FILES_OF_A_RANK, _OTHER_FILES = 8, 64


@final
class RankChannel:
    """Where one rank of one attempt records its collectives.

    Attributes:
        num_asked: The number of the last question.
        passed_at: Where it says, behind the records, how many marks in the rank's standard error have been passed.
    """

    passed_at = SIZE_BYTES

    def __init__(self, file_fd: int, rank_end: int, our_end: int) -> None:
        self._file, self._rank_end, self._our_end = file_fd, rank_end, our_end
        self.num_asked = 0
        self._last: tuple[bytes, Evidence] | None = None
        self._merger = Merger()

    @staticmethod
    def is_affordable(num_ranks: int) -> bool:
        """Tell whether the limit of open files has room for all ranks: the supervisor holds what they get until they are forked."""
        return num_ranks * _FILES_OF_A_RANK + _OTHER_FILES <= count_allowed_files()

    @classmethod
    def open(cls) -> RankChannel | None:
        """Make a place for a rank that will be started; None where ranks get no descriptors of ours."""
        if not IS_LINUX:
            return None
        file = make_memory_file("evidence")
        rank_end, our_end = os.pipe()
        try:
            os.ftruncate(file, cls.passed_at + _PASSED.size)  # takes memory only where it is written
        except OSError:
            for fd in (file, rank_end, our_end):
                os.close(fd)
            return None
        os.set_blocking(our_end, False)
        return cls(file, rank_end, our_end)

    @property
    def rank_fds(self) -> tuple[int, int]:
        """What the rank is given: the memory file, and its end of the pipe."""
        return self._file, self._rank_end

    @property
    def mark(self) -> bytes:
        """A few bytes that differ whenever the rank has recorded anything since; costs two microseconds."""
        return read_mark(self._read(HEADER_BYTES))

    @property
    def is_answered(self) -> bool:
        """Whether the rank has answered all that it was asked."""
        return read_asked(self._read(HEADER_BYTES)) >= self.num_asked

    def ask(self) -> None:
        """Have the rank write down the stacks of all threads and its flight recorder; never waits.

        A rank that has not reached init_process_group yet answers when it has; one that is stopped, or whose
        interpreter is held by C code, when it goes on.
        """
        self.num_asked += 1
        # A pipe that is full holds enough questions; one without a reader belongs to a rank that has ended.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._our_end, _QUESTION.pack(self.num_asked))

    def wait_answer(self, clock: Clock, timeout_s: float) -> bool:
        """Wait until all questions are answered; False if they were not in time."""
        end = clock.monotonic() + timeout_s
        while not self.is_answered:
            if clock.monotonic() >= end:
                return False
            clock.sleep(_LOOK_EVERY_S)
        return True

    def read(self) -> Evidence | None:
        """Return what the rank has recorded, also after its end; None if it has recorded nothing at all.

        What has not changed since the last call is not read again.
        """
        mark = self.mark
        if self._last is not None and self._last[0] == mark:
            return self._last[1]
        if (evidence := self._merger.read(self._read(SIZE_BYTES))) is not None:
            self._last = (mark, evidence)
        return evidence

    def tell_passed(self, num_marks: int) -> None:
        """Tell the rank that all before so many marks in its standard error has been passed on."""
        os.pwrite(self._file, _PASSED.pack(num_marks), self.passed_at)

    def close_rank_end(self) -> None:
        """Let go of the rank's end of the pipe, once the rank has been started with it."""
        if self._rank_end >= 0:
            os.close(self._rank_end)
            self._rank_end = -1

    def close(self) -> None:
        """Let go of everything; what was read stays."""
        self.close_rank_end()
        os.close(self._file)
        os.close(self._our_end)

    def _read(self, size: int) -> bytes:
        return os.pread(self._file, size, 0)
