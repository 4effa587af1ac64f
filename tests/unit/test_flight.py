"""Torch's flight recorders, read inside a rank: NCCL has one of its own, beside that of all other backends."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankwise.evidence.in_rank.flight_recorder import Flight

native = pytest.importorskip("torch._C._distributed_c10d")


def dump(backend: str, *times: int) -> Any:
    """A recorder with one all-reduce at each of these nanoseconds."""
    entries = [
        {"profiling_name": f"{backend}:all_reduce", "process_group": ("0", "default_pg"), "collective_seq_id": number, "time_created_ns": at,
         "input_sizes": [[3]], "input_dtypes": ["Float"], "state": "scheduled", "retired": False, "is_p2p": False, "frames": []}
        for number, at in enumerate(times, 1)
    ]  # fmt: skip
    return lambda *_: pickle.dumps({"entries": entries})


def read(monkeypatch: pytest.MonkeyPatch, **dumps: Any) -> list[str]:
    """Return which backends' collectives are written down, in order."""
    for name in ("fr", "nccl"):
        monkeypatch.setattr(native, f"_dump_{name}_trace", dumps.get(name), raising=False)
    written: list[bytes] = []
    writer = SimpleNamespace(report=lambda _kind, raw, _at: written.append(raw))
    sites = SimpleNamespace(describe=lambda _frames: ("", []))
    Flight(SimpleNamespace(get_room=lambda _: 1 << 20), writer, sites).write()
    return [one["backend"] for one in json.loads(written[0])["entries"]]


@pytest.mark.parametrize("uses_gpu", [False, True])
def test_both_recorders_are_one_list_by_time(monkeypatch: pytest.MonkeyPatch, uses_gpu: bool) -> None:
    """DDP's buckets on NCCL stand between those of Gloo; where no GPU is used NCCL is not asked."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_gpu)
    found = read(monkeypatch, fr=dump("gloo", 10, 30), nccl=dump("nccl", 20, 40))
    assert found == (["gloo", "nccl", "gloo", "nccl"] if uses_gpu else ["gloo", "gloo"])


def test_a_torch_with_one_recorder_is_read_by_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is only what was once NCCL's, all backends are in it, and no GPU is needed."""
    assert read(monkeypatch, nccl=dump("gloo", 10)) == ["gloo"]
