"""How a rank's end is noted: who ended by itself must not look stopped, or nobody is found who left the others."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from rankwise.launcher.rank_end import Rank


@pytest.mark.parametrize(
    ("stopped_s", "ended_s", "kept"), [(None, 5.0, None), (4.0, 5.0, 4.0), (5.5, 5.0, None)]
)
def test_a_stop_that_came_after_the_end_is_none(
    stopped_s: float | None, ended_s: float, kept: float | None
) -> None:
    """A busy launcher hears of an end late, and tells the rank to stop meanwhile: it had left by itself."""
    rank = Rank(rank=2, local_rank=1, tag="2", streams=Mock(), notes_fd=-1, stacks_fd=-1, stopped_s=stopped_s)
    rank.note_end(0, ended_s)
    assert (rank.code, rank.ended_s, rank.stopped_s, rank.is_alive) == (0, ended_s, kept, False)
