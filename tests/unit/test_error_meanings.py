"""What error texts mean: the real ones of torch, Gloo, NCCL and Python, as they were printed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from error_texts import REAL
from rankwise.verdict.error_meanings import MEANINGS, Blame, find_file_fix, find_meaning, find_missing

if TYPE_CHECKING:
    from pathlib import Path

#: Errors of a rank's own that share words with a lost peer's: a server, a subprocess or a file is not a rank.
OWN_ALIKE = [
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "subprocess.CalledProcessError: Command '['curl', 'x']' died: Connection closed by peer",
]


@pytest.mark.parametrize(("text", "blame", "class_id"), REAL, ids=[text.strip()[:70] for text, _, _ in REAL])
def test_a_real_text_is_understood(text: str, blame: Blame | None, class_id: str | None) -> None:
    """Every real text tells whose fault it is and, where that is sure, the failure class."""
    meaning = find_meaning(text)
    assert (meaning.blame if meaning else None, meaning.class_id if meaning else None) == (blame, class_id)


@pytest.mark.parametrize("text", OWN_ALIKE)
def test_a_lost_server_is_no_lost_rank(text: str) -> None:
    """A Python exception about a server or a pipe is the rank's own: it may be the first cause."""
    meaning = find_meaning(text)
    assert meaning is None or meaning.blame == "own"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//cpu//0/1", (1,)),
        ("wait timeout after 300000ms, keys: /default_pg/0//cpu//0/12", (12,)),
        ("wait timeout after 4000ms, keys: /default_pg/0//cpu//0/3\nException raised from doWait", (3,)),
        ("[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms", (2,)),
        ("[Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms", (2,)),
        ("[Rank 0]: Ranks 1, 2, 13 failed to pass monitoredBarrier in 2000 ms", (1, 2, 13)),
        ("Timed out waiting 4000ms for recv operation to complete", ()),
        ("ValueError: rank 3 failed to load", ()),
        ("", ()),
    ],
)
def test_the_ranks_that_a_timeout_names(text: str, missing: tuple[int, ...]) -> None:
    """A timeout's text names the ranks that never came, or none."""
    assert find_missing(text) == missing


def test_every_known_fault_has_a_fix() -> None:
    """Whoever reads what went wrong reads what to do; only a lost peer has nothing to do, and our own errors say it (None)."""
    assert [meaning.pattern.pattern for meaning in MEANINGS if meaning.fix == "" and meaning.blame != "peer"] == []


def test_a_file_that_is_not_there_has_its_advice(tmp_path: Path) -> None:
    """A misspelt file or module that all ranks lack is met with the file beside it; what only some lack was not written yet; an answer to such an error is none."""
    script, module, data = tmp_path / "main.py", tmp_path / "trainer.py", tmp_path / "tokens.bin"
    for path in (script, module, data):
        path.touch()
    lacks_module = "ModuleNotFoundError: No module named 'trainner'"
    lacks_file = f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path / 'token.bin'}'"
    for text, near in ((lacks_module, module), (lacks_file, data)):
        assert find_file_fix(text, f"{script}:3", is_on_all=True).startswith(f"{near} is there: ")
    assert "barrier" in find_file_fix(lacks_file, f"{script}:3", is_on_all=False)
    assert "exist_ok" in find_file_fix(
        "FileExistsError: [Errno 17] File exists: 'runs'", f"{script}:3", is_on_all=False
    )
    elsewhere = "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'"
    assert find_file_fix(elsewhere, f"{script}:3", is_on_all=True).startswith("correct the path")
    for text in (
        f"{lacks_file}\n\nDuring handling of the above exception, another exception occurred:\n\nValueError: no words",
        "No module named 'numpy'",
    ):
        assert find_file_fix(text.split("\n")[-1], f"{script}:3", is_on_all=True) == ""
    for text in (lacks_module, "ModuleNotFoundError: No module named 'numpy'"):
        assert find_file_fix(text, f"{script}:3", is_on_all=False) == ""


def test_no_meaning_in_plain_words() -> None:
    """Ordinary output means nothing."""
    for text in ("", "step 3 loss 0.25", "Traceback (most recent call last):", "ValueError: boom", "Killed"):
        assert find_meaning(text) is None


_PIECES = [
    "step 100 loss 0.25 | ", "Connection refused ", "Detected mismatch between collectives OpType=A ", "OpType=ALLREDUCE ",
    "DDP expects same model across all ranks ", "client socket has timed out ", "Error(s) in loading state_dict ",
    "wait timeout after 1ms, keys: ", "/", "1, ", "Ranks 1, 2 ", "Can't pickle ", "Peer ", "/1/", " \n",
]  # fmt: skip


@pytest.mark.parametrize("piece", ["step 100 loss 0.25 | ", "Traceback\n", "/", "1, ", " \n", "x"])
def test_a_megabyte_is_searched_quickly(piece: str) -> None:
    """A long text without a meaning costs a moment."""
    text, start = piece * ((1 << 20) // len(piece)), time.process_time()
    find_meaning(text)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("piece", _PIECES)
def test_the_longest_message_is_searched_quickly(piece: str) -> None:
    """No pattern runs wild on the longest message that the recorder keeps (20 000 letters), whatever stands in it."""
    text, start = piece * (20_000 // len(piece)), time.process_time()
    find_meaning(text)
    assert time.process_time() - start < 2


# The worst of them is tried above, on less.
@pytest.mark.parametrize("piece", [piece for piece in _PIECES if "mismatch" not in piece])
def test_the_longest_tail_is_searched_quickly(piece: str) -> None:
    """Nor on the longest tail of standard error that is kept (64 KiB)."""
    text, start = piece * (65_536 // len(piece)), time.process_time()
    find_meaning(text)
    assert time.process_time() - start < 2
