"""Dumps of py-spy from jobs that ran without us, alone and together with flight recorders."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from external_dumps import RECORDINGS
from rankwise.base.errors import UsageError
from rankwise.cli.main import main
from rankwise.evidence.reader import external_dumps, pyspy
from rankwise.verdict.judge_scene import judge_scene

if TYPE_CHECKING:
    from pathlib import Path

DUMP = """Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} ({state}): "MainThread"
{frames}
Thread {other} (idle): "Thread-1"
    wait (threading.py:331)
    run (watch.py:9)
"""
IN_BARRIER = """    barrier (torch/distributed/distributed_c10d.py:5356)
    wrapper (torch/distributed/c10d_logger.py:83)
    main (train.py:{line})
    <module> (train.py:40)"""
IN_READ = """    read (socket.py:706)
    fetch (pipeline/download.py:17)
    main (train.py:20)
    <module> (train.py:40)"""


def write(folder: Path, rank: int, frames: str, state: str = "idle") -> None:
    """Write a dump of a rank."""
    text = DUMP.format(pid=100 + rank, other=900 + rank, state=state, frames=frames)
    (folder / f"rank{rank}.txt").write_text(text)


@pytest.mark.parametrize("form", ["stacks", "stacks_json"])
def test_text_and_json_are_read_alike(form: str) -> None:
    """The same threads, functions and lines; torch's frames are torch's, and the script's the user's."""
    found = external_dumps.read([RECORDINGS / "absent" / form])
    stacks = [facts.stack for facts in found.scene.ranks]
    assert [[(frame.function, frame.line) for frame in stack.frames] for stack in stacks if stack] == [
        [("barrier", 5356), ("wrapper", 83), ("<module>", 13)],
        [("<module>", 12)],
        [("barrier", 5356), ("wrapper", 83), ("<module>", 13)],
    ]
    assert [stack.op for stack in stacks if stack] == ["barrier", None, "barrier"]
    verdict = judge_scene(found.scene, has_hung=True)
    assert (verdict.kind, verdict.culprits) == ("hang", (1,))
    assert (verdict.where or "").endswith("absent.py:12")


def test_ranks_at_one_place_are_one_line_and_the_odd_one_is_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 64 ranks 63 are in a barrier: two lines, rank 17's first, with its own file and what it does there."""
    for rank in range(64):
        write(tmp_path, rank, IN_READ if rank == 17 else IN_BARRIER.format(line=30))
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    places = [line.strip() for line in lines if line.startswith("  rank")]
    assert places == ["rank 17: at download.py:17, in read", "ranks 0-16, 18-63: in barrier from train.py:30"]
    assert "rank 17" in lines[1]


def test_all_ranks_in_different_collectives_are_a_hang(tmp_path: Path) -> None:
    """Two ranks wait at two lines: which of them is wrong can't be told, and none is accused."""
    write(tmp_path, 0, IN_BARRIER.format(line=30))
    write(tmp_path, 1, IN_BARRIER.format(line=31))
    scene = external_dumps.read([tmp_path]).scene
    verdict = judge_scene(scene, has_hung=True)
    assert (verdict.kind, verdict.culprits) == ("hang", ())
    assert verdict.notes[:2] == ("rank 0: in barrier from train.py:30", "rank 1: in barrier from train.py:31")
    assert judge_scene(scene).kind == "ok", "of ranks that may move on, one moment tells nothing"


def test_all_ranks_in_one_collective_are_no_hang_by_their_stacks(tmp_path: Path) -> None:
    """They may be about to come out of it."""
    for rank in range(3):
        write(tmp_path, rank, IN_BARRIER.format(line=30))
    assert judge_scene(external_dumps.read([tmp_path]).scene, has_hung=True).kind == "ok"


def test_recorders_and_stacks_together_tell_number_and_place(tmp_path: Path) -> None:
    """The number of the barrier is the recorder's, the line that rank 1 sleeps at is py-spy's."""
    shutil.copytree(RECORDINGS / "absent" / "flight", tmp_path / "both")
    shutil.copytree(RECORDINGS / "absent" / "stacks", tmp_path / "both", dirs_exist_ok=True)
    (tmp_path / "both" / "README.md").write_text("of Tuesday")
    found = external_dumps.read([tmp_path / "both"])
    verdict = judge_scene(found.scene, found.notes, has_hung=True)
    assert (verdict.culprits, verdict.where) == ((1,), "absent.py:12")
    assert "barrier #2" in verdict.message
    assert "not read, as they are not dumps: README.md" in verdict.notes


def test_a_rank_still_in_init_has_made_no_group() -> None:
    """One elsewhere has joined if another is in a collective, and nobody waits in init_process_group."""
    init = IN_BARRIER.format(line=5).replace("    barrier (", "    init_process_group (")
    dumps = {
        name: pyspy.parse(DUMP.format(pid=1, other=2, state="idle", frames=frames).encode()).stack
        for name, frames in (("init", init), ("barrier", IN_BARRIER.format(line=30)), ("read", IN_READ))
    }
    assert pyspy.have_joined({0: dumps["barrier"], 1: dumps["read"]}) == {0, 1}
    assert pyspy.have_joined({0: dumps["init"], 1: dumps["read"]}) == set()
    assert pyspy.have_joined({0: dumps["init"], 1: dumps["barrier"], 2: dumps["read"]}) == {1}


def test_of_a_process_with_children_the_process_itself_counts() -> None:
    """``--subprocesses`` appends loader workers: their main threads are not the rank's; native frames are left out."""
    frames = "    syscall (libc.so.6)\n    accept (libtorch.so:0)\n" + IN_READ
    text = DUMP.format(pid=7, other=8, state="active+gil", frames=frames)
    text += DUMP.format(pid=9, other=10, state="idle", frames="    work (worker.py:3)")
    found = pyspy.parse(text.encode())
    assert (found.pid, [thread.name for thread in found.threads], found.is_idle) == (7, ["MainThread", "Thread-1"], False)  # fmt: skip
    assert (found.stack.where, found.stack.frames[0].function) == ("pipeline/download.py:17", "read")


@pytest.mark.parametrize("text", ["Process 3: python x.py\nPython v3.11\n", '[{"thread_id": 1}]', '[{"thread_id": 1'])
def test_a_dump_without_threads_is_one_error(text: str, tmp_path: Path) -> None:
    """It is named, and so is what was expected."""
    (tmp_path / "rank0.txt").write_text(text)
    with pytest.raises(UsageError, match=r"rank0\.txt is neither"):
        external_dumps.read([tmp_path])
