"""Logs of digests: what a rank writes is what its parent reads, and large models keep what fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rankwise.evidence.in_rank import ring
from rankwise.evidence.in_rank.digest_log import DigestLog, add
from rankwise.evidence.reader.merge_records import Merger
from rankwise.evidence.reader.replicas import list_names, list_sums


def _tensors(num: int) -> list[Any]:
    return [SimpleNamespace(shape=(3, 2), dtype="float32", is_contiguous=lambda: True)] * num


def _tell(**facts: Any) -> dict[str, Any]:
    told = {"kind": "ddp", "members": (0, 1), "model": 0, "optimizer": 0, "site": "a.py:3", "states": "k", "is_hooked": False}  # fmt: skip
    return {**told, "kinds": "f", "largest": 6, "machine": "one", **facts}


def _digest(log: dict[str, Any], step: int, num: int) -> None:
    moment = {"step": step, "seq": 2 * step, "forwarded": True, "synced": True, "rates": [0.1]}
    add(log, moment, step.to_bytes(4, "little") * num, b"\0\0\x80\x3f" * num)


def _write(logs: DigestLog, memory: bytearray) -> Any:
    logs.write(1.0)
    return Merger().merge(ring.RingReader(bytes(memory))).replicas


@pytest.mark.parametrize("num", [1, 2048])
def test_what_is_written_is_read(num: int) -> None:
    """Names, sums and moments are those that were put there: of 2048 parameters too, with the first digest and the last ones."""
    memory = bytearray(ring.SIZE_BYTES)
    logs = DigestLog(ring, ring.RingWriter(memory, 7))
    names = [f"encoder.layers.{place}.self_attention.weight" for place in range(num)]
    log = logs.find(_tell(), names, _tensors(num))
    for step in range(9):
        _digest(log, step, num)
    (replica,) = _write(logs, memory)
    assert list_names(replica) == tuple(names)
    assert (replica.members, replica.site) == ((0, 1), "a.py:3")
    assert [(step, seq) for step, seq, _ in replica.moments] == [(step, 2 * step) for step in range(9)]
    kept = [digest.step for digest in replica.digests]
    assert kept[0] == 0
    assert kept[-2:] == [7, 8]
    assert all(list_sums(digest) == (digest.step,) * num for digest in replica.digests)


def test_the_digest_of_the_end_is_the_last_one() -> None:
    """It is no moment of the training, and the end no more if steps follow."""
    memory = bytearray(ring.SIZE_BYTES)
    logs = DigestLog(ring, ring.RingWriter(memory, 7))
    log = logs.find(_tell(), ["one"], _tensors(1))
    _digest(log, 0, 1)
    end = {"step": 3, "seq": 9, "forwarded": True, "synced": True, "rates": [], "order": 2, "is_last": True}
    add(log, end, b"same", b"same")
    (replica,) = _write(logs, memory)
    assert replica.last is not None
    assert (replica.last.step, replica.last.order, len(replica.moments)) == (3, 2, 1)
    _digest(log, 4, 1)
    (replica,) = _write(logs, memory)
    assert replica.last is None


def test_another_model_has_another_sheet() -> None:
    """Parameters that were added make another log; what is known of a model is the newest; of very many the oldest go."""
    memory = bytearray(ring.SIZE_BYTES)
    logs = DigestLog(ring, ring.RingWriter(memory, 7))
    _digest(logs.find(_tell(), ["one"], _tensors(1)), 0, 1)
    _digest(logs.find(_tell(states="u"), ["one"], _tensors(1)), 1, 1)
    _digest(logs.find(_tell(states="ka"), ["one", "two"], _tensors(2)), 2, 2)
    first, second = _write(logs, memory)
    assert (first.states, len(first.digests)) == ("u", 2)
    assert (second.states, list_names(second)) == ("ka", ("one", "two"))
    for number in range(20):
        _digest(logs.find(_tell(model=number), ["one"], _tensors(1)), 0, 1)
    assert [replica.model for replica in _write(logs, memory)] == list(range(12, 20))
