"""Names what a pipeline's message carries: activations or gradients, of which micro-batch, between which stages (torch.distributed.pipelining).

A stage of torch's lists the messages of a micro-batch by four methods, and the schedule sends them, at once or later. So the tensors are
remembered when they are listed, and found again when the message is recorded; in scripts that use torch's classes themselves, too.
This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULE, _STAGE = "torch.distributed.pipelining.stage", "_PipelineStageBase"
ACTIVATIONS, GRADIENTS = "activations", "gradients"
#: The methods that list messages, what they carry, and whether the other stage is the next one (1) or the one before
#: (-1).
_LISTS = {
    "get_fwd_recv_ops": (ACTIVATIONS, -1),
    "get_fwd_send_ops": (ACTIVATIONS, 1),
    "get_bwd_recv_ops": (GRADIENTS, 1),
    "get_bwd_send_ops": (GRADIENTS, -1),
}
_MOST_KEPT = 2048
_MARK = "stage|"
_RECORDING = f"{os.sep}in_rank{os.sep}intercept_calls.py"


class Flow(NamedTuple):
    """What goes between two stages.

    Attributes:
        stage: That of the rank that sends or receives it; from 0, as torch counts.
        carries: ``activations`` of the forward pass, or ``gradients`` of them.
        micro_batch: From 0.
        other: The stage at the other end.
    """

    stage: int
    carries: str
    micro_batch: int
    other: int


def write_flow(flow: Flow) -> str:
    """Return it as a text for the record of a message."""
    return _MARK + "|".join(map(str, flow))


def read_flow(text: str | None) -> Flow | None:
    """Return what such a text says; None if it is none."""
    if text is None or not text.startswith(_MARK):
        return None
    parts = text.removeprefix(_MARK).split("|")
    if len(parts) != 4 or not all(one.isdecimal() for one in (parts[0], *parts[2:])):
        return None
    return Flow(int(parts[0]), parts[1], int(parts[2]), int(parts[3]))


class PipelineStages:
    """What the messages of this process's pipelines carry."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Any, str]] = {}
        self._of_records: dict[int, str] = {}
        self._is_wrapped = False

    def wrap(self) -> None:
        """Put ourselves around the methods, once torch's stages are imported."""
        if self._is_wrapped or (module := sys.modules.get(_MODULE)) is None:
            return
        stage = getattr(module, _STAGE, None)
        if stage is None:
            # The import goes on in another thread, or torch names its stages otherwise.
            return
        self._is_wrapped = True
        for name, (carries, step) in _LISTS.items():
            raw = getattr(stage, name, None)
            if raw is not None:
                setattr(stage, name, _note_after(raw, functools.partial(self._note, carries, step)))

    def _note(self, carries: str, step: int, stage: Any, chunk: int, ops: Any) -> None:
        if len(self._texts) > _MOST_KEPT:
            self._texts = {key: kept for key, kept in self._texts.items() if kept[0]() is not None}
        ranks = getattr(stage, "stage_index_to_group_rank", None) or {}
        for op in ops:
            peer = getattr(op, "group_peer", None)
            # With torch's tracer values may pass over stages.
            there = [one for one, rank in ranks.items() if rank == peer and (one - stage.stage_index) * step > 0]
            near = stage.stage_index + step
            other = near if near in there or not there else min(there, key=lambda one: abs(one - near))
            text = write_flow(Flow(stage.stage_index, carries, chunk, other))
            self._texts[id(op.tensor)] = weakref.ref(op.tensor), text

    def find(self, tensors: Any) -> str:
        """Return what a message of these tensors carries; empty if no stage has listed it."""
        self.wrap()
        if not self._texts or not tensors:
            return ""
        kept = self._texts.get(id(tensors[0]))
        return kept[1] if kept is not None and kept[0]() is tensors[0] else ""

    def keep(self, number: int, text: str) -> None:
        """Remember what the message with this record carries."""
        if len(self._of_records) > _MOST_KEPT:
            for old in list(self._of_records)[: _MOST_KEPT // 2]:
                del self._of_records[old]
        self._of_records[number] = text

    def find_awaited(self, frame: Any) -> str:
        """Return what the message carries that a thread waits for; empty if it waits for none of a pipeline.

        Args:
            frame: The thread's innermost frame: that of our recording around ``Work.wait``, if it waits.
        """
        code = frame.f_code
        if code.co_name != "wait" or not code.co_filename.endswith(_RECORDING):
            return ""
        held = frame.f_locals
        return self._of_records.get(held["pending"].get(id(held["self"])), "")


def _note_after(raw: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(raw)
    def list_ops(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        ops = raw(self, chunk, *args, **kwargs)
        # Of stages of a kind that we don't know nothing is noted.
        with contextlib.suppress(Exception):
            note(self, chunk, ops)
        return ops

    return list_ops
