"""Stages of a pipeline that wait: told by stage and micro-batch, and the one that the others wait for is to blame."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankwise.evidence.in_rank import pipeline_stages
from rankwise.evidence.in_rank.pipeline_stages import Flow, PipelineStages, read_flow, write_flow
from rankwise.verdict.run_rules import look
from rankwise.verdict.wording import name_op
from scenes import elsewhere, op, rank, scene, stack

if TYPE_CHECKING:
    import pytest

    from rankwise.evidence.reader.notes import Stack
    from rankwise.evidence.reader.scene import Op

_SCHEDULES = "/env/lib/python3.11/site-packages/torch/distributed/pipelining/schedules.py"


def _message(name: str, peer: int, flow: Flow, at: int = 6, **facts: Any) -> Op:
    return op(name, at=at, peer=peer, module=write_flow(flow), inside=("step", "_batch_p2p"), **facts)


def _in_schedule(flow: Flow, at: int = 6) -> Stack:
    waits = stack((_SCHEDULES, 678, "_wait_batch_p2p"), (_SCHEDULES, 900, "step"), at=at)
    return replace(waits, module=write_flow(flow))


def test_the_message_is_told_whose_wait_the_rank_stands_in() -> None:
    """Of three that a schedule has under way neither the first nor the newest is told; a rank with several stages is named with them."""
    awaited = Flow(2, "gradients", 0, 3)
    ops = [
        _message("irecv", 1, Flow(2, "activations", 2, 1), is_over=False),
        _message("irecv", 1, awaited, is_over=False),
        _message("isend", 1, Flow(0, "activations", 3, 1), is_over=False),
    ]
    found = look(
        scene(
            rank(0, *ops, at=_in_schedule(awaited)),
            rank(1, _message("irecv", 0, Flow(1, "activations", 0, 0)), at=elsewhere()),
        )
    )[0]
    assert found.culprits == (1,)
    assert "rank 1 (stages 1, 3) is asleep at train.py:9" in found.message
    assert "stage 2 (rank 0) waits for gradients of micro-batch 0 from stage 3 at train.py:6" in found.message
    assert found.class_id is None


def test_a_message_without_its_stages_is_told_as_before() -> None:
    """A text that says no flow is none, and a message of the user's own keeps its words."""
    assert read_flow(None) is read_flow("layers.3") is read_flow("stage|1|activations|x|2") is None
    assert read_flow(write_flow(Flow(1, "activations", 3, 2))) == Flow(1, "activations", 3, 2)
    assert name_op(op("irecv", seq=3, peer=1)) == "irecv from rank 1 ([4] float32)"
    told = name_op(_message("isend", 1, Flow(0, "activations", 3, 1), seq=9))
    assert told == "isend of activations of micro-batch 3 to stage 1 (rank 1, [4] float32)"


def test_what_a_stage_lists_is_found_by_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the schedule does with the list: the very tensor tells the flow, a later one at its address does not, and a value that passes over a stage keeps its end."""

    class Tensor:
        pass

    class Base:
        stage_index, stage_index_to_group_rank = 2, {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}

        def get_fwd_recv_ops(self, chunk: int) -> list[Any]:
            return [types.SimpleNamespace(tensor=held[peer], group_peer=peer) for peer in (1, 0)]

    held = [Tensor(), Tensor()]
    monkeypatch.setitem(pipeline_stages.sys.modules, "torch.distributed.pipelining.stage", types.SimpleNamespace(_PipelineStageBase=Base))  # fmt: skip
    one = PipelineStages()
    assert one.find([held[0]]) == ""
    assert len(Base().get_fwd_recv_ops(7)) == 2
    assert [read_flow(one.find([each])) for each in held] == [Flow(2, "activations", 7, 0), Flow(2, "activations", 7, 1)]  # fmt: skip
    assert one.find([Tensor()]) == one.find(None) == ""
