"""The report as people read it, compared with golden files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankwise.verdict.case import Casualty, Verdict
from rankwise.verdict.finding import Waiting
from rankwise.verdict.report import render

if TYPE_CHECKING:
    from collections.abc import Callable

_TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
  File "train.py", line 7, in main
    raise ValueError("boom")
ValueError: boom
"""
_FAILURE = Verdict(
    kind="failure",
    culprits=(2,),
    where="train.py:7",
    waiting=(Waiting(rank=0, where="train.py:9", op="all_reduce"), Waiting(rank=1, where="train.py:4", op=None)),
    message="rank 2: ValueError: boom",
    reason="exit code 1",
    traceback=_TRACEBACK,
    last_words="[rank2]: Traceback (most recent call last):\n\x1b[31mloading\x1b[0m\n[rank2]: ValueError: boom\n    ^^^^^\n",
    casualties=(Casualty(rank=0, fate="lost its peer"), Casualty(rank=1, fate="lost its peer"), Casualty(rank=3, fate="terminated by rankwise")),
    exits={0: 1, 1: 1, 2: 1, 3: -15},
    logs={0: "logs/0/stderr.log", 2: "logs/2/stderr.log"},
    exit_code=1,
)  # fmt: skip
_VERDICTS = {
    "report_failure": _FAILURE,
    "report_hang": Verdict(
        kind="hang",
        culprits=(1,),
        class_id="L12",
        where="train.py:3",
        message="rank 0 timed out waiting for rank 1, which was at train.py:3: DistStoreError: wait timeout",
        fix="don't set MASTER_PORT in the script",
        casualties=(Casualty(rank=0, fate="timed out", detail="DistStoreError: wait timeout"),),
        exit_code=1,
    ),
    "report_mismatch": Verdict(
        kind="mismatch",
        culprits=(0,),
        class_id="C5",
        where="train.py:6",
        message="rank 0: killed by SIGABRT: what():  op.preamble.length <= op.nbytes. 52 vs 4",
        reason="killed by SIGABRT (-6): native code aborted: the last lines of its stderr say why",
        fix="all ranks must give the same shapes in the same order",
        last_words="terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        exit_code=134,
    ),
    "report_interrupted": Verdict(
        kind="failure",
        message="the launcher received SIGTERM",
        stopped_by="SIGTERM",
        casualties=tuple(Casualty(rank=rank, fate="terminated by rankwise") for rank in range(12)),
        exit_code=143,
    ),
    "report_killed": Verdict(
        kind="failure",
        culprits=(1,),
        class_id="R3",
        message="rank 1: killed by SIGKILL",
        reason="killed by SIGKILL (-9): the kernel ran out of memory for this job (oom_kill count went up by 1)",
        last_words="\n".join(f"step {step}" for step in range(30)),
        casualties=(Casualty(rank=0, fate="failed later", detail="KeyError: 'x'"),),
        exit_code=137,
        notes=("torch aborted rank 2 at exit, after the script had finished: counted as success",),
    ),
    "report_long_traceback": replace(
        _FAILURE,
        traceback="Traceback:\n" + "\n".join(f"  frame {number}" for number in range(100)) + "\nRecursionError: deep",
        last_words="",
        casualties=(),
        waiting=(),
    ),
}


@pytest.mark.parametrize("name", _VERDICTS)
def test_a_report_reads_as_agreed(name: str, golden: Callable[[str, str], None]) -> None:
    """The text of a report changes only on purpose."""
    golden(name, render(_VERDICTS[name]))


def test_a_later_attempt_is_named() -> None:
    """Of a job that was started again the report says which attempt it tells of."""
    assert render(_FAILURE, attempt=2).splitlines()[0] == "rankwise: the job failed, after 3 attempts"
    assert render(_FAILURE, attempt=0, allowed=4).splitlines()[0] == "rankwise: attempt 1 of 4 failed"
    assert "attempt" not in render(_FAILURE).splitlines()[0]


def test_colours_add_nothing_but_colours() -> None:
    """Without its escapes the coloured report is the plain one."""
    painted = render(_FAILURE, colour=True)
    assert "\x1b[1;31m" in painted
    for code in ("1;31", "1", "32", "2", "0"):
        painted = painted.replace(f"\x1b[{code}m", "")
    assert painted == render(_FAILURE)


def test_no_escape_of_a_rank_reaches_the_plain_report() -> None:
    """What a rank painted red on its terminal is plain text in the report, wherever it stands."""
    text = render(replace(_FAILURE, message="rank 2: \x1b[31mboom\x1b[0m", last_words="\x1b[2K\x1b[1mx\x1b[0m"))
    assert "\x1b" not in text


def test_the_tail_does_not_repeat_the_traceback() -> None:
    """Lines of the traceback stand in the report once."""
    text = render(replace(_FAILURE, last_words="before\n" + _TRACEBACK))
    assert text.count("ValueError: boom\n") == 1 + text.count("first    rank 2: ValueError: boom\n")
    assert "| before" in text


def test_a_report_stays_short() -> None:
    """A hundred casualties and a megabyte of last words fit on a screen or two."""
    many = tuple(Casualty(rank=rank, fate="lost its peer") for rank in range(1000))
    text = render(replace(_FAILURE, casualties=many, last_words="y\n" * 500_000, traceback="z\n" * 10_000, waiting=()))
    assert len(text.splitlines()) < 80
    assert "ranks 0-999 lost their peer" in text


def test_a_thousand_waiting_ranks_stay_short() -> None:
    """Ranks that waited at the same place are told together: a report of 512 ranks is no wall of lines."""
    waiting = tuple(Waiting(rank=rank, where="train.py:9", op="all_reduce") for rank in range(512))
    assert len(render(replace(_FAILURE, waiting=waiting)).splitlines()) < 80


def test_long_sentences_are_broken_on_a_terminal_only() -> None:
    """Behind their label, between words; without a terminal a sentence stays in its line, and the words are the same."""
    long = replace(_FAILURE, message="word " * 60 + "end", notes=("note " * 40,), traceback="", last_words="")
    wide, narrow = render(long), render(long, width=72)
    assert max(map(len, wide.splitlines())) > 300
    assert max(map(len, narrow.splitlines())) <= 72
    assert narrow.split() == wide.split()
    after = narrow.splitlines()[2]
    assert after.startswith(" " * 11 + "word")
    assert render(long, width=72, colour=True).count("\x1b[1mword") == len(
        [line for line in narrow.splitlines() if "word" in line]
    )


def test_who_waited_is_labelled_where_nobody_else_is_told() -> None:
    """Not as if it belonged to the row above."""
    text = render(replace(_FAILURE, casualties=()))
    assert "  waited   rank 0 was in all_reduce at train.py:9\n           rank 1 was at train.py:4" in text


def test_a_word_that_is_cut_is_seen_to_be() -> None:
    """What another rank failed of is told in a line, with dots where it was longer."""
    told = render(replace(_FAILURE, casualties=(Casualty(rank=1, fate="failed later", detail="x" * 200),)))
    assert f"rank 1 failed later ({'x' * 120} …)" in told
