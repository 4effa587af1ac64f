"""Files of torch's flight recorder from jobs that ran without us: judged alike, and never trusted."""

from __future__ import annotations

import json
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from external_dumps import RECORDINGS, as_nccl, copy_recording, read_recording, write_dumps
from rankwise.base.errors import UsageError
from rankwise.cli.main import main
from rankwise.evidence.reader import external_dumps, flight_dump
from rankwise.verdict.judge_scene import judge_scene
from rankwise.verdict.run_rules import look

if TYPE_CHECKING:
    from pathlib import Path


def judge_json(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    assert main(["report", *map(str, paths), "--json"]) == 0
    verdict: dict[str, Any] = json.loads(capsys.readouterr().out)
    return verdict


def test_the_rank_that_left_out_a_bucket_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """DDP on Gloo: ranks 0, 1 and 3 wait in the fourth step's gradients at their line, for rank 2."""
    verdict = judge_json(capsys, RECORDINGS / "ddp")
    assert (verdict["kind"], verdict["culprits"]) == ("hang", [2])
    assert [(one["rank"], one["where"], one["op"]) for one in verdict["waiting"]] == [
        (rank, "/job/ddp.py:11", "all_reduce") for rank in (0, 1, 3)
    ]
    assert "DDP gradients" in verdict["message"]
    assert verdict["notes"][1].startswith("rank 2: its last was all_reduce #8")


def test_two_collectives_under_one_number_are_a_mismatch(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 broadcasts where the others reduce: proved by the numbers, with both lines."""
    verdict = judge_json(capsys, RECORDINGS / "mismatch")
    assert (verdict["kind"], verdict["culprits"], verdict["class"]) == ("mismatch", [1], "C8")
    assert verdict["where"] == "/job/mismatch.py:9"
    assert "mismatch.py:12" in verdict["message"]


@pytest.mark.parametrize("form", ["flight", "json"])
def test_pickle_and_json_give_the_same_culprit(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 has not reached the barrier; the JSON form has no lines, and none is invented."""
    verdict = judge_json(capsys, RECORDINGS / "absent" / form)
    assert (verdict["kind"], verdict["culprits"]) == ("hang", [1])
    assert [one["op"] for one in verdict["waiting"]] == ["barrier", "barrier"]
    assert verdict["where"] == ("/job/absent.py:13" if form == "flight" else None)
    assert "unknown:0" not in json.dumps(verdict)


def test_nccls_states_tell_what_is_over(tmp_path: Path) -> None:
    """With NCCL an entry that has timed out is retired and yet not over: its state counts."""
    bodies = {rank: as_nccl(read_recording("ddp", rank), 4) for rank in range(4)}
    found = external_dumps.read([write_dumps(tmp_path / "dumps", bodies)])
    assert [facts.evidence.ops[-1].is_over for facts in found.scene.ranks if facts.evidence] == [
        False, False, True, False,
    ]  # fmt: skip
    verdict = judge_scene(found.scene, has_hung=True)
    assert (verdict.kind, verdict.culprits) == ("hang", (2,))
    assert {one.where for one in verdict.waiting} == {"/job/ddp.py:11"}


def test_a_mismatch_on_nccl_is_proved(tmp_path: Path) -> None:
    """The numbers tell it there as well."""
    bodies = {rank: as_nccl(read_recording("mismatch", rank), 3) for rank in range(3)}
    (finding,) = look(external_dumps.read([write_dumps(tmp_path / "dumps", bodies)]).scene)
    assert (finding.rule, finding.culprits, finding.is_proof) == ("other_op", (1,), True)


def test_a_rank_without_a_file_is_told_and_not_accused(tmp_path: Path) -> None:
    """Of four ranks one has left no file: it is the one to look for, and no rule says what it did."""
    bodies = {rank: as_nccl(read_recording("ddp", rank), 4) for rank in (0, 1, 3)}
    found = external_dumps.read([write_dumps(tmp_path / "dumps", bodies)])
    assert (found.scene.is_whole, found.scene.world_size) == (False, 4)
    assert found.notes[0].startswith("no file of rank 2: ")
    verdict = judge_scene(found.scene, found.notes, has_hung=True)
    assert verdict.culprits == ()


def test_a_job_in_step_is_not_accused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks have made the same, and nothing is open: no hang."""
    body = read_recording("ddp", 2)
    verdict = judge_json(capsys, write_dumps(tmp_path / "dumps", dict.fromkeys(range(4), body)))
    assert (verdict["kind"], verdict["culprits"]) == ("ok", [])


def test_files_of_different_moments_prove_nothing_by_standing_still(tmp_path: Path) -> None:
    """A rank moved after another had written its file: none of them counts as still."""
    folder = copy_recording("ddp", tmp_path / "dumps")
    for rank in range(4):
        last_s = read_recording("ddp", rank)["entries"][-1]["time_created_ns"] / 1e9
        os.utime(folder / f"nccl_trace_rank_{rank}", (last_s, last_s + (0.0 if rank == 2 else 60.0)))
    assert {facts.still_s for facts in external_dumps.read([folder]).scene.ranks} == {0.0}
    still = [facts.still_s for facts in external_dumps.read([RECORDINGS / "ddp"]).scene.ranks]
    assert min(still) > 1.0


class _Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_harmful_pickle_is_refused_by_name_and_not_run(
    tmp_path: Path, protocol: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that names a function is an error that says which; the function is not called."""
    body = {**read_recording("ddp", 0), "harm": _Harmful(tmp_path / "made")}
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(pickle.dumps(body, protocol=protocol))
    assert main(["report", str(file)]) == 2
    said = capsys.readouterr().err
    assert "mkdir" in said
    assert "nccl_trace_rank_0" in said
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02c__builtin__\neval\n.",
        b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02(S'true'\nios\nsystem\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02Pname\n.",
        b"\x80\x02]q\x00.",
        b"\x80\x02]r\xff\xff\xff\x7f.",
        b"\x80\x02]p2147483647\n.",
        b"\x80\x02}(X\x07\x00\x00\x00versionK\x01X\x07\x00\x00\x00entries](K\x01e\x75.",
        b'{"version": "2.10", "pg_config": 3, "entries": [{}]}',
        b'{"pg_config": ' + b"[" * 100000,
        b"\x80\x02}q\x00(X\x07",
        b"\x80",
    ],
)  # fmt: skip
def test_what_is_no_flight_recorder_is_one_error(data: bytes) -> None:
    """Globals by every opcode, damaged files and other values: always a ValueError, whatever the reader stumbles over."""
    with pytest.raises(ValueError):
        flight_dump.parse(data)


def test_every_cut_of_a_file_is_one_error(tmp_path: Path) -> None:
    """A file that a dying rank has not finished writing is told by name."""
    whole = (RECORDINGS / "mismatch" / "nccl_trace_rank_0").read_bytes()
    file = tmp_path / "nccl_trace_rank_0"
    for size in range(1, len(whole), 97):
        file.write_bytes(whole[:size])
        with pytest.raises(UsageError, match="nccl_trace_rank_0"):
            external_dumps.read([file])


def test_entries_that_only_look_right_are_one_error(tmp_path: Path) -> None:
    """Each field of an entry by a value of another kind: read, or told, and never a stumble."""
    body = read_recording("mismatch", 0)
    for name in body["entries"][0]:
        for value in (None, "x", -1, [1], {}, 1.5):
            entry = {**body["entries"][0], name: value}
            try:
                found = flight_dump.parse(pickle.dumps({**body, "entries": [entry]}, protocol=2))
            except ValueError:
                continue
            found.to_evidence(world_size=2, mixed=(), dumped_s=0.0)


def test_messages_are_counted_with_each_peer(tmp_path: Path) -> None:
    """NCCL tells of messages by the places in the group; where the first ones are lost they have no numbers."""
    pattern = as_nccl(read_recording("absent/flight", 0), 2)
    base = {**pattern["entries"][-1], "is_p2p": True, "collective_seq_id": 0, "state": "started", "time_discovered_completed_ns": None}  # fmt: skip
    bodies: dict[int, Any] = {}
    for rank in range(2):
        sent = {**base, "profiling_name": f"nccl:send {rank}->{1 - rank}", "record_id": 0, "p2p_seq_id": 1}
        bodies[rank] = {**pattern, "entries": [sent]}
    evidence = [one.evidence for one in external_dumps.read([write_dumps(tmp_path / "dumps", bodies)]).scene.ranks]
    assert [(op.name, op.seq, op.peer) for one in evidence if one for op in one.ops] == [("send", 1, 1), ("send", 1, 0)]  # fmt: skip
    for body in bodies.values():
        body["entries"][0]["record_id"] = 2000
    evidence = [one.evidence for one in external_dumps.read([write_dumps(tmp_path / "dumps", bodies)]).scene.ranks]
    assert [one.ops for one in evidence if one] == [(), ()], "what was before is lost: no number can be trusted"


def test_a_folder_without_dumps_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with neither is still told as such, and a missing file by its name."""
    (tmp_path / "notes.txt").write_text("nothing of ours")
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no evidence" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nosuch")]) == 2
    assert f"there is no file or folder {tmp_path / 'nosuch'}" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "rank0"), str(tmp_path / "rank1")]) == 2
    assert "rank0 can't be read" in capsys.readouterr().err


def test_the_rank_is_told_by_the_name(tmp_path: Path) -> None:
    """By the number behind "rank", or the last one; two files of a rank, or a name without a number, are errors."""
    data = (RECORDINGS / "mismatch" / "nccl_trace_rank_0").read_bytes()
    names = {"nccl_trace_rank_11": 11, "rank3_of_node7.pkl": 3, "dump-5": 5}
    for name, rank in names.items():
        (tmp_path / name).write_bytes(data)
        assert [facts.rank for facts in external_dumps.read([tmp_path / name]).scene.ranks] == [rank]
    (tmp_path / "trace").write_bytes(data)
    with pytest.raises(UsageError, match="does not show its rank"):
        external_dumps.read([tmp_path / "trace"])
    (tmp_path / "rank_5").write_bytes(data)
    with pytest.raises(UsageError, match="second file of rank 5"):
        external_dumps.read([tmp_path / "dump-5", tmp_path / "rank_5"])
