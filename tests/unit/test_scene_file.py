"""What was known of a job survives a file: the scene, the case and the folder that holds both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankwise.base.errors import UsageError
from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader import scene_file
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Child, Evidence, Group, Op, RankFacts, Scene
from rankwise.verdict import case_file, evidence_folder
from rankwise.verdict.case import Case, LostNode, RankEnd
from rankwise.verdict.finding import JobFinding, Waiting

if TYPE_CHECKING:
    from pathlib import Path

_STACK = Stack(frames=(Frame(file="/x/train.py", line=7, function="<module>"),))
_FAULT = FaultRecord(message="ValueError: boom", callstack="Traceback …", monotonic_s=3.5, where="train.py:7")
_EVIDENCE = Evidence(
    ops=(
        Op(group="default", seq=1, name="all_reduce", shapes=((2, 3), ()), dtypes=("float32", "int64"), reduce_op="sum",
           gives=(2, 4), gets=(3, 3)),
        Op(group="default", seq=2, name="send", peer=1, site="train.py:9", inside=("a", "b"), source="native", is_over=False),
    ),
    groups={"default": Group(name="default", ranks=(0, 1), backend="gloo")},
    has_joined=True, steps=3, step_s=2.5, stacks={"MainThread": _STACK}, stacks_s=4.0, handled={"MainThread": _FAULT}, missing=("no recorder",),
)  # fmt: skip
SCENE = Scene(
    ranks=(
        RankFacts(rank=0, pid=5, evidence=_EVIDENCE, stack=_STACK, still_s=2.0, cpu_share=0.5,
                  children=(Child(pid=9, name="pt_data_worker", state="Z"),), reads_terminal=True),
        RankFacts(rank=1, state="ended", code=-9, ended_s=3.0, fault=_FAULT),
    ),
    world_size=3, now_s=5.0, is_whole=False,
)  # fmt: skip
CASE = Case(
    ranks=(
        RankEnd(rank=0, local_rank=0, code=-15, ended_s=6.0, stopped_s=5.5, stack=_STACK),
        RankEnd(rank=1, local_rank=1, code=-9, ended_s=3.0, fault=_FAULT, crash=_STACK, last_words="Killed"),
    ),
    world_size=3, attempt=2, hung=True,
    findings=(JobFinding(kind="hang", certainty="proof", rule="left", culprits=(1,), message="rank 1 left", key="k",
                  waiting=(Waiting(rank=0, where="train.py:7", op="all_reduce"),)),),
)  # fmt: skip


def test_a_scene_survives_a_file() -> None:
    """All facts come back equal: records, groups, stacks, children, the fault."""
    assert scene_file.from_json(json.loads(json.dumps(scene_file.to_json(SCENE)))) == SCENE


def test_a_case_survives_a_file() -> None:
    """Ends, findings and who waited come back equal; the scene is a file of its own."""
    assert case_file.from_json(json.loads(json.dumps(case_file.to_json(CASE)))) == CASE


def test_a_case_with_lost_nodes_survives_a_file() -> None:
    """A node whose loss is known only after the ranks have failed is saved with their evidence."""
    case = replace(CASE, lost_nodes=(LostNode(node=1, host="b", base_rank=2, num_ranks=2, why="silent"),))
    assert case_file.from_json(json.loads(json.dumps(case_file.to_json(case)))) == case


def test_what_is_unknown_here_is_left_out_and_what_is_new_there_has_its_default() -> None:
    """A field that a later version added is no error, nor one that an earlier one did not write."""
    body = json.loads(json.dumps(scene_file.to_json(SCENE)))
    body["ranks"][0]["temperature"] = 451
    del body["ranks"][0]["still_s"]
    again = scene_file.from_json(body)
    assert again.ranks[0].still_s == 0.0
    assert again.ranks[1] == SCENE.ranks[1]


def test_a_case_of_version_0_2_is_read() -> None:
    """What it called the loss of the keeper is that of the supervisor."""
    body = json.loads(json.dumps(case_file.to_json(CASE)))
    del body["supervisor_lost"]
    assert case_file.from_json(body | {"keeper_lost": True}).supervisor_lost


@pytest.mark.parametrize(
    "body", [{}, {"version": 99, "ranks": []}, {"version": 1, "ranks": [{"pid": 3}]}, {"version": 1}]
)
def test_what_is_no_scene_is_refused(body: dict[str, object]) -> None:
    """Another version, or something else, is an error with words, and no crash."""
    with pytest.raises(ValueError, match="scene"):
        scene_file.from_json(body)


def test_the_last_attempts_folder_is_found_from_above(tmp_path: Path) -> None:
    """The folder of logs, of an attempt and of the evidence itself all lead to it; the tenth attempt comes after the second."""
    for attempt in (2, 10):
        evidence_folder.save(tmp_path / f"attempt_{attempt}" / "evidence", scene=SCENE, case=CASE)
    last = tmp_path / "attempt_10" / "evidence"
    assert {evidence_folder.find(path) for path in (tmp_path, last.parent, last, tmp_path.parent)} == {last}
    case = evidence_folder.load(last)
    assert (case.scene, case.ranks) == (SCENE, CASE.ranks)
    with pytest.raises(UsageError, match=r"there is no file or folder .*nowhere"):
        evidence_folder.find(tmp_path / "attempt_10" / "nowhere")


def test_a_job_that_still_ran_is_a_case_of_ranks_that_have_not_ended(tmp_path: Path) -> None:
    """With the scene alone the living ranks count as stopped at its moment, and the ended one as it ended."""
    evidence_folder.save(tmp_path, scene=SCENE)
    first, second = evidence_folder.load(tmp_path).ranks
    assert (first.code, first.stopped_s, first.stack) == (None, 5.0, _STACK)
    assert (second.code, second.stopped_s, second.fault) == (-9, None, _FAULT)


def test_damaged_evidence_is_told(tmp_path: Path) -> None:
    """Half a file is an error that names the folder."""
    evidence_folder.save(tmp_path, scene=SCENE)
    (tmp_path / "scene.json").write_text('{"version"')
    with pytest.raises(UsageError, match="can't be read"):
        evidence_folder.load(tmp_path)
