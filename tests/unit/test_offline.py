"""What ranks have left in folders, read: which run is meant, what became of whom, and times of hosts whose clocks differ."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from clocks import FakeClock
from rankwise.base.errors import UsageError
from rankwise.base.identity import Identity
from rankwise.evidence import offline_setup
from rankwise.evidence.in_rank import ring
from rankwise.evidence.reader import offline, offline_layout
from rankwise.verdict.judge_offline import judge_offline_run

if TYPE_CHECKING:
    from pathlib import Path

#: What the clock on the wall shows when that of the first host says 100.
WALL_S = 1_000_000.0
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:23723"


def write_rank(folder: Path, rank: int, *, step_s: float, saved_s: float = 100.0, **told: Any) -> Path:
    """Write what a rank leaves that has met the others, and made a step."""
    memory = bytearray(ring.SIZE_BYTES)
    writer = ring.RingWriter(memoryview(memory), 1)
    writer.begin_world(step_s - 1)
    writer.count_step(step_s)
    head = {
        "version": offline_layout.VERSION, "run": "a", "attempt": 0, "rank": rank, "world_size": 3, "host": f"host{rank}",
        "kernel": "another", "pid": 1, "born": 1, "began_s": saved_s - 50, "began_time_s": WALL_S - 50, "saved_s": saved_s,
        "time_s": WALL_S, "ring": "", "ring_id": [0, 0], "asks_id": 0, "every_s": 30.0, "why": "stall", "moved_s": step_s,
        "busy_s": step_s, "cpu_share": 0.0, "children": [],
    }  # fmt: skip
    path = folder / f"attempt_{told.get('attempt', 0)}" / f"rank{rank}.evidence"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json.dumps(head | told).encode() + b"\n" + zlib.compress(bytes(memory)))
    return path


def write_fault(path: Path, message: str, at_s: float) -> None:
    """Write a rank's note of the exception that ended it."""
    note = {"note": "exception", "message": message, "traceback": "", "time_s": WALL_S, "monotonic_s": at_s, "where": "train.py:3"}  # fmt: skip
    (path.parent / f"{path.stem}.notes.jsonl").write_text(json.dumps(note) + "\n")


def read(*folders: Path) -> offline.OfflineRun:
    return offline.read(folders, FakeClock())


def test_hosts_clocks_are_brought_together_by_the_wall(tmp_path: Path) -> None:
    """Steps made at one moment, on hosts that were booted 5000 s apart and have a folder each, are told as of one moment."""
    write_rank(tmp_path / "one", 0, step_s=90.0)
    write_rank(tmp_path / "two", 1, step_s=5090.0, saved_s=5100.0)
    found = read(tmp_path / "one", tmp_path / "two")
    times = [facts.evidence.step_s for facts in found.scene.ranks if facts.evidence]
    assert times == pytest.approx([90.0, 90.0])
    assert [facts.still_s for facts in found.scene.ranks] == pytest.approx([10.0, 10.0])
    assert found.absent == (2,)


def test_the_newest_run_and_its_last_attempt_are_meant(tmp_path: Path) -> None:
    """Of several runs in a folder the one that was written last is read, of that its last attempt, and the reader is told."""
    write_rank(tmp_path / "a", 0, step_s=90.0, time_s=WALL_S - 500)
    for attempt in range(2):
        write_rank(tmp_path / "b", 0, step_s=90.0, run="b", attempt=attempt)
    found = read(tmp_path)
    assert (found.folder, found.ranks[0].file.parent.name) == (tmp_path / "b", "attempt_1")
    assert len(found.notes) == 2


@pytest.mark.parametrize(("told_to_end", "gone"), [((0, 2), [1]), ((0,), []), ((0, 1, 2), [])])
def test_of_ranks_that_were_all_told_to_end_the_silent_one_was_gone_before(
    told_to_end: tuple[int, ...], gone: list[int], tmp_path: Path
) -> None:
    """Read on another host: one rank without a stack beside others that have one was gone before; of two it may be another launcher's doing."""
    for rank in range(3):
        path = write_rank(tmp_path, rank, step_s=90.0, host="one")
        if rank in told_to_end:
            (path.parent / f"rank{rank}.stacks.txt").write_text(
                'Current thread 0x00007f0000000000 (most recent call first):\n  File "train.py", line 3 in <module>\n'
            )
    assert [one.facts.rank for one in read(tmp_path).ranks if one.how == "vanished"] == gone


def test_what_an_earlier_job_left_under_the_same_name_is_no_rank(tmp_path: Path) -> None:
    """A file of rank 2 that was last written long before the others began belongs to a run of yesterday."""
    write_rank(tmp_path, 0, step_s=90.0)
    write_rank(tmp_path, 2, step_s=90.0, time_s=WALL_S - 5000, began_time_s=WALL_S - 9000)
    assert read(tmp_path).absent == (1, 2)


def test_a_rank_that_writes_no_more_is_told(tmp_path: Path) -> None:
    """A host that froze: its rank has written nothing for minutes while the others have; where it stands is not known."""
    write_rank(tmp_path, 0, step_s=90.0, began_time_s=WALL_S - 350)
    write_rank(tmp_path, 1, step_s=990.0, saved_s=1000.0, time_s=WALL_S - 300, began_time_s=WALL_S - 350)
    found = read(tmp_path)
    assert any("rank 1" in note and "has written nothing for 300 s" in note for note in found.notes)
    assert found.scene.ranks[1].stack is None


def test_who_left_no_end_is_the_cause_when_all_others_lost_a_peer(tmp_path: Path) -> None:
    """Two ranks raise that their peer is gone, the third left no end: it is named, and not one that complains."""
    for rank in range(2):
        write_fault(write_rank(tmp_path, rank, step_s=90.0), PEER, 99.0 + rank)
    write_rank(tmp_path, 2, step_s=90.0)
    verdict = judge_offline_run(read(tmp_path))
    assert (verdict.kind, verdict.culprits) == ("failure", (2,))


def test_an_own_error_is_the_cause_whoever_left_no_end(tmp_path: Path) -> None:
    """A rank with an error of its own is named; one of which no end is known is not."""
    write_fault(write_rank(tmp_path, 0, step_s=90.0), "ValueError: boom", 99.0)
    write_fault(write_rank(tmp_path, 1, step_s=90.0), PEER, 100.0)
    write_rank(tmp_path, 2, step_s=90.0)
    assert judge_offline_run(read(tmp_path)).culprits == (0,)


def test_ranks_that_were_killed_at_one_stroke_are_not_to_blame(tmp_path: Path) -> None:
    """All ranks gone without a word, as when a scheduler ends a job: nobody is accused of having been killed."""
    for rank in range(3):
        write_rank(tmp_path, rank, step_s=90.0, state="ended", why="rescue", seen_s=100.0)
    verdict = judge_offline_run(read(tmp_path))
    assert (verdict.kind, verdict.culprits) == ("ok", ())
    assert "ranks 0-2 ended without their end being recorded (kill -9, os._exit or exec)" in verdict.notes


def test_of_a_rank_that_called_os_exit_the_line_is_told(tmp_path: Path) -> None:
    """Its note stands in the folder: alone it is the cause, at that line; where all ended so, each one's line is told."""
    note = '{"note": "left", "frames": [["/job/train.py", 12, "f"]]}\n'
    for rank in range(3):
        path = write_rank(tmp_path / "one", rank, step_s=90.0, state="ended", why="rescue", seen_s=100.0)
        if rank < 2:
            write_fault(path, PEER, 99.0 + rank)
        else:
            (path.parent / "rank2.notes.jsonl").write_text(note)
        other = write_rank(tmp_path / "all", rank, step_s=90.0, state="ended", why="rescue", seen_s=100.0)
        (other.parent / f"rank{rank}.notes.jsonl").write_text(note)
    verdict = judge_offline_run(read(tmp_path / "one"))
    assert (verdict.culprits, verdict.where) == ((2,), "/job/train.py:12")
    assert "it ended silently: by os._exit at train.py:12; its launcher's log" in verdict.message
    assert "ranks 0-2 ended by os._exit at train.py:12" in judge_offline_run(read(tmp_path / "all")).notes


def test_a_signal_from_outside_is_told_by_the_stack_that_it_leaves(tmp_path: Path) -> None:
    """A rank that was told to end has written its stack: only then a SIGTERM is told."""
    for rank in range(3):
        path = write_rank(tmp_path, rank, step_s=90.0, state="ended", why="rescue", seen_s=100.0)
        stack = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 3 in <module>\n'
        (path.parent / f"rank{rank}.stacks.txt").write_text(stack)
    assert any("by SIGTERM" in note for note in judge_offline_run(read(tmp_path)).notes)


def test_a_process_that_another_program_has_taken_over_is_no_rank() -> None:
    """Number and birth stay the same over an exec; whoever has the file of its records no more has ended."""
    pid = os.getpid()
    with tempfile.TemporaryFile() as file:
        status = os.fstat(file.fileno())
        head = {"kernel": offline_layout.name_kernel(), "pid": pid, "born": offline_layout.read_birth(pid)}
        assert offline_layout.is_alive({**head, "ring_id": [status.st_dev, status.st_ino]})
        assert not offline_layout.is_alive({**head, "ring_id": [status.st_dev, status.st_ino + 10**12]})


def test_an_end_without_a_note_is_an_end(tmp_path: Path) -> None:
    """A script that closes all descriptors writes no last note; its last copy tells that it ended, and by which error."""
    write_rank(tmp_path, 0, step_s=90.0, why="end", world_size=2)
    write_rank(tmp_path, 1, step_s=90.0, why="end", world_size=2)
    assert {one.how for one in read(tmp_path).ranks} == {"finished"}
    write_rank(tmp_path, 1, step_s=90.0, why="end", world_size=2, error="ValueError: boom")
    verdict = judge_offline_run(read(tmp_path))
    assert (verdict.kind, verdict.culprits) == ("failure", (1,))


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    """A folder without a rank's file is an error that says what is wanted."""
    assert not offline.has_any([tmp_path])
    with pytest.raises(UsageError, match="left no evidence"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "job/7"}, "run-job-7"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/tmp/e_x/none_y1/attempt_0/1/error.json"}, "run-none_y1"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, "slurm-12-3"),
        ({"PMIX_NAMESPACE": "prterun-a-1"}, "mpi-prterun-a-1"),
        ({}, "rendezvous-10.0.0.1-29500"),
    ],
)  # fmt: skip
def test_all_ranks_of_a_run_find_one_name(env: dict[str, str], name: str) -> None:
    """The name comes from what all ranks of a run are told alike, by whichever launcher, and differs between runs where it can."""
    identity = Identity(rank=1, world_size=2, local_world_size=2, master_addr="10.0.0.1", master_port=29500, source="")
    assert offline_setup.find_run(env, identity) == name


@pytest.mark.parametrize("kind", ["another file", "a link", "another user's name"])
def test_a_folder_names_no_file_of_the_readers(kind: str, tmp_path: Path) -> None:
    """Who made a folder chose what stands in it: a file that it names is neither read nor removed, unless it is a rank's own records."""
    secret = tmp_path / "id_rsa"
    secret.write_bytes(b"secret" * ring.SIZE_BYTES)
    status, named = secret.stat(), secret
    if kind != "another file":
        user = os.getuid() + (kind == "another user's name")
        named = offline_layout.MEMORY / f"rankwise.{user}.0badc0de.0.{os.getpid()}"
        named.unlink(missing_ok=True)
        if kind == "a link":
            named.symlink_to(secret)
        else:
            named.write_bytes(b"secret")
            status = named.stat()
    told = {
        "kernel": offline_layout.name_kernel(),
        "ring": str(named),
        "ring_id": [status.st_dev, status.st_ino],
    }
    path = write_rank(tmp_path / "run", 0, step_s=90.0, **told)
    try:
        read(tmp_path / "run")
        assert named.exists()
        assert b"secret" not in zlib.decompress(path.read_bytes().partition(b"\n")[2])
    finally:
        if named != secret:
            named.unlink()
    assert secret.exists()


def test_records_that_grow_without_a_bound_are_refused(tmp_path: Path) -> None:
    """A small file of zeros may fill the memory when it is unpacked: one line says so, and which file."""
    path = write_rank(tmp_path, 0, step_s=90.0)
    head = path.read_bytes().partition(b"\n")[0]
    path.write_bytes(head + b"\n" + zlib.compress(bytes(ring.SIZE_BYTES + 1)))
    with pytest.raises(UsageError, match=rf"rank0.evidence can't be read: it holds more than {ring.SIZE_BYTES} bytes"):
        read(tmp_path)
    path.write_bytes(head + b"\n" + zlib.compress(bytes(99))[:-3])
    with pytest.raises(UsageError, match="it is cut short"):
        read(tmp_path)


def test_a_world_that_no_job_has_is_refused(tmp_path: Path) -> None:
    """A header with 10^12 ranks would fill the memory with the names of the absent: one line says so."""
    path = write_rank(tmp_path, 0, step_s=90.0)
    head, _, copy = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps({**json.loads(head), "world_size": 10**12}).encode() + b"\n" + copy)
    with pytest.raises(UsageError, match="a job of 1000000000000 ranks"):
        read(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_among_the_evidence_is_not_waited_for(tmp_path: Path) -> None:
    """Opening a named pipe would wait for a writer for ever: beside a rank's records it is passed over."""
    path = write_rank(tmp_path, 0, step_s=90.0)
    for name in ("rank1.evidence", "rank0.notes.jsonl"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    assert path.exists()
    assert len(read(tmp_path).scene.ranks) == 1
