"""Ranks of a sharded model that part: the modules are named, and what differs between ranks by design is not taken for a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.evidence.reader import scene_file
from rankwise.verdict.run_rules import look
from rankwise.verdict.wording import is_gradient, name_briefly, name_op
from scenes import elsewhere, ended, in_call, op, rank, scene

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op, RankFacts

_OPEN = {"is_over": False}
_FORWARD = ("_pre_forward", "pre_forward", "unshard", "foreach_all_gather", "__call__", "all_gather_single")
_BACKWARD = ("backward", "_engine_run_backward", "_pre_backward", "unshard", "foreach_all_gather")
_REDUCES = ("backward", "_engine_run_backward", "post_backward", "foreach_reduce", "reduce_scatter_single")


def gather(module: str, at: int = 6, *, inside: tuple[str, ...] = _FORWARD, **facts: Any) -> Op:
    """Return FSDP's all_gather of a module."""
    return op("all_gather_into_tensor", at=at, shape=(10,), module=module, inside=inside, **facts)


def reduce(module: str, at: int = 8, **facts: Any) -> Op:
    """Return FSDP's reduce_scatter of a module's gradients."""
    return op("reduce_scatter_tensor", at=at, shape=(20,), module=module, inside=_REDUCES, **facts)


def _first(*ranks: RankFacts, **facts: Any) -> Any:
    return look(scene(*ranks, **facts))[0]


def test_a_collective_of_fsdp_is_named_by_its_module() -> None:
    """The name is the family's, whatever function of torch it came by; the outermost module is called so; what has no module is as before."""
    assert name_op(gather("layers.3", seq=7)) == "all_gather of layers.3 (#7, [10] float32, FSDP parameters)"
    assert name_op(gather(".", seq=7), number=False) == "all_gather of the root module ([10] float32, FSDP parameters)"  # fmt: skip
    assert name_briefly(gather("0.1")) == "all_gather of module 0.1"
    assert name_op(reduce("layers.3", seq=8)) == "reduce_scatter of layers.3 (#8, [20] float32, FSDP gradients)"  # fmt: skip
    assert name_op(op("all_gather_into_tensor", seq=7)) == "all_gather_into_tensor #7 ([4] float32)"


def test_tensor_parallels_all_reduce_in_backward_is_no_bucket_of_ddp() -> None:
    """A DTensor that changes its layout in a backward pass is C++'s own collective there, and no gradient of DDP."""
    inside = ("backward", "_engine_run_backward", "backward", "redistribute_local_tensor", "all_reduce")
    one = op("all_reduce", seq=3, source="native", inside=inside)
    assert not is_gradient(one)
    assert name_op(one) == "all_reduce #3 ([4] float32, tensor parallel)"


def _skipped_backward(*, world: int = 3) -> list[RankFacts]:
    """Rank 1 is in its next forward, the others in the backward of this one."""
    forward = [gather("layers.0"), gather("layers.1")]
    others = [*forward, gather("layers.1", 8, inside=_BACKWARD), reduce("layers.1", **_OPEN)]
    skips = [*forward, gather("layers.0"), gather("layers.1", **_OPEN)]
    return [
        rank(one, *skips, at=in_call("all_gather_single", 6), world=world)
        if one == 1
        else rank(one, *others, at=in_call("reduce_scatter_single", 8), world=world)
        for one in range(world)
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_skips_its_backward_is_named_where_the_modules_part(world: int) -> None:
    """D15: the mismatch is told at the first pair of different modules, which went through with wrong values; also where no side is the minority."""
    finding = _first(*_skipped_backward(world=world))
    assert (finding.rule, finding.class_id, finding.culprits) == ("other_module", "D15", (1,))
    assert (finding.certainty, finding.is_stuck) == ("proof", True)
    assert "#3" in finding.message
    assert "all_gather of layers.0" in finding.message
    assert "at #4" in finding.message
    assert "/job/train.py:6" in finding.where


def test_the_continue_that_skips_the_backward_is_named() -> None:
    """D15: the script shows one `continue` between forward and backward, and the rank that took it is in the same loop again."""
    lines = ["import torch", "", "", "", "for x in data:", "    loss = model(x)"]
    lines += ["    if torch.isnan(loss): continue", "    loss.backward()"]
    finding = _first(*_skipped_backward(), sources={"/job/train.py": "\n".join(lines)})
    assert (finding.rule, finding.class_id) == ("other_module", "D15")
    assert "the continue at train.py:7" in finding.fix


def test_modules_dropped_on_some_ranks_are_told_although_nothing_hangs() -> None:
    """Rank 1 drops layers.0 in one forward pass and layers.1 in the next: each was computed with parts of the other's weights."""
    both = [gather("layers.0"), gather("layers.1")]
    finding = _first(
        rank(0, *both, gather("layers.0"), at=elsewhere()), rank(1, *both, gather("layers.1"), at=elsewhere())
    )
    assert (finding.rule, finding.class_id, finding.is_stuck) == ("other_module", None, False)
    assert "wrong results" in finding.message


def test_ranks_that_call_their_modules_otherwise_are_not_compared() -> None:
    """A rank that has wrapped its model in another module has other names for the same ones: that is no fault."""
    ranks = [
        rank(0, gather("layers.0"), gather("layers.1"), at=elsewhere()),
        rank(1, gather("net.layers.0"), gather("net.layers.1"), at=elsewhere()),
    ]
    assert look(scene(*ranks)) == ()


def test_a_wait_that_torch_calls_otherwise_is_found_in_the_records() -> None:
    """Torch 2.13 calls all_gather_into_tensor all_gather_single on the stack: the open record is it, with its module."""
    finding = _first(
        rank(0, gather("layers.0"), gather("layers.1", **_OPEN), at=in_call("all_gather_single", 6)),
        rank(1, gather("layers.0"), at=elsewhere(4)),
    )
    assert (finding.rule, finding.culprits, finding.where) == ("kept_waiting", (1,), "/job/train.py:4")
    assert "rank 0 waits in all_gather of layers.1 (#2" in finding.message
    assert [one.op for one in finding.waiting] == ["all_gather of layers.1"]


def test_a_wait_without_a_name_of_its_own_is_named_by_the_module_that_runs() -> None:
    """A collective of the user's, or of tensor parallel, in a module's forward: the stack tells the module, if it is of that very line."""
    waits = replace(in_call("all_reduce", 7), module="layers.2.mlp")
    ranks = [rank(0, op(**_OPEN), at=waits), rank(1, at=elsewhere(4))]
    assert "rank 0 waits in all_reduce of layers.2.mlp (#1" in _first(*ranks).message
    ranks[0] = rank(0, op(at=9, **_OPEN), at=waits)
    assert "rank 0 waits in all_reduce #1" in _first(*ranks).message


def test_a_rank_that_ended_after_fewer_passes_of_fsdp_made_fewer_steps() -> None:
    """D14, as with DDP: the others wait in an all_gather that it has made before from the same line."""
    step = [gather("layers.0"), reduce("layers.0")]
    finding = _first(
        rank(0, *step, gather("layers.0", **_OPEN), at=in_call("all_gather_single", 6)),
        ended(1, *step, steps=1),
    )
    assert (finding.rule, finding.class_id, finding.culprits) == ("fewer_steps", "D14", (1,))
    assert "all_gather of layers.0" in finding.message


def test_a_backward_of_fsdp_that_a_rank_does_not_come_to_is_a_step_less() -> None:
    """D14: a rank that sleeps while the others reduce the gradients of a module, as with DDP's buckets."""
    step = [gather("layers.0"), reduce("layers.0")]
    finding = _first(
        rank(0, *step, gather("layers.0"), reduce("layers.0", **_OPEN), at=in_call("reduce_scatter_single", 8)),
        rank(1, *step, gather("layers.0"), at=elsewhere(7), steps=1),
    )
    assert (finding.rule, finding.class_id, finding.culprits) == ("fewer_steps", "D14", (1,))
    assert "join" not in finding.fix


def test_names_of_modules_outlive_the_job() -> None:
    """A scene that was written down and read again names the same modules."""
    kept = scene(*_skipped_backward(), rank(3, at=replace(in_call(), module="head"), world=4))
    again = scene_file.from_json(scene_file.to_json(kept))
    assert again == kept
    assert name_briefly(again.ranks[1].evidence.ops[-1]) == "all_gather of layers.1"  # type: ignore[union-attr]
