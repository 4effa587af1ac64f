"""Which line of a rank's last words says most."""

from __future__ import annotations

import pytest

from rankwise.verdict.case import RankEnd
from rankwise.verdict.error_origin import first_line

_OLD = "/env/lib/x.py:6: UserWarning: something old\n  warnings.warn('something old')"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"shard 7 is missing\n{_OLD}", "shard 7 is missing"),
        (_OLD, ""),
        (
            "shard 7 is missing\n/a/b.py:6: DeprecationWarning: one\ntwo\n  warn('''one",
            "shard 7 is missing",
        ),
        (f"{_OLD}\nshard 7 is missing", "shard 7 is missing"),
        ("loading\nWarning: the data set is empty, giving up", "Warning: the data set is empty, giving up"),
        (
            "ERROR:root:no data host\nINFO:root:cleaning up\nWARNING:root:still there",
            "ERROR:root:no data host",
        ),
        ("2026-11-23 06:57:41,003 ERROR no shard\nepoch 3\nwandb: WARNING Run not synced", "2026-11-23 06:57:41,003 ERROR no shard"),
        ("no shard\nW1123 06:57:41.583000 31583 torch/x.py:6] slow", "no shard"),
        ("no shard\n[rank0]:[W1123 06:57:41.583000 31583 x.cpp:6] slow", "no shard"),
        ("no shard\n[W1123 06:57:41.58 x.cpp:6] Warning: slow", "no shard"),
        ("no shard\nrankwise: warning: a worker did not end", "no shard"),
        ("ncclSystemError, run with NCCL_DEBUG=INFO for details", "ncclSystemError, run with NCCL_DEBUG=INFO for details"),
        ("terminate called\n  what():  no shard\nmore", "no shard"),
        ('F1127 9 train.py:2] no shard\nFatal Python error: Aborted\n\nCurrent thread 0x1:\n  File "train.py", line 3 in f', "F1127 9 train.py:2] no shard"),
        ("Fatal Python error: no codec", "Fatal Python error: no codec"),
        ("", ""),
    ],
)  # fmt: skip
def test_warnings_and_remarks_are_no_headline(words: str, told: str) -> None:
    """Python's warnings with their source, torch's, and what loggers say below an error tell of no end; an error comes first."""
    end = RankEnd(rank=0, local_rank=0, pid=1, code=1, ended_s=1.0, last_words=words)
    assert first_line(end) == told
