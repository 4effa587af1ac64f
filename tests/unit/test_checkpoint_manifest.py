"""The two JSON files of a checkpoint come back as they were written, and no changed byte in them goes unnoticed."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.manifest import (
    Chunk,
    File,
    Index,
    Manifest,
    TensorEntry,
    dump,
    dump_index,
    dump_manifest,
    parse,
    parse_index,
    parse_manifest,
)

MANIFEST = Manifest(
    step=7, serial=3, world_size=2, files=(File(name="index.json", size=10, head=10, crc32=5), File(name="shard-00001.safetensors", size=2**40, head=64, crc32=2**32 - 1)),
    mesh={"shard": 2}, versions={"rankwise": "1"}, metrics={"loss": 0.5, "best": -math.inf}, parts=("model", "rng"), saved_at="now",
)  # fmt: skip
INDEX = Index(
    {
        "a": TensorEntry("float32", (4, 2), (Chunk("x", 64, 16, 1, (0, 0), (2, 2)), Chunk("y", 64, 16, 2, (2, 0), (2, 2)))),
        "b": TensorEntry("int64", (), (Chunk("x", 80, 8, 3, (), ()),)),
    },
    {"part": {"value": [1, {"$tensor": "a"}]}},
    {0: {"own": {"value": 0}}, 1: {"own": {"value": 1}}},
)  # fmt: skip


def test_they_come_back() -> None:
    """Manifest and index are equal after writing and reading; both are plain JSON to others."""
    assert parse_manifest(dump_manifest(MANIFEST), "m") == MANIFEST
    assert parse_index(dump_index(INDEX), "i") == INDEX
    for data in (dump_manifest(MANIFEST), dump_index(INDEX)):
        json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    nan = parse_manifest(
        dump_manifest(Manifest(step=1, serial=1, world_size=1, files=(), metrics={"loss": math.nan})), "m"
    )
    assert math.isnan(nan.metrics["loss"])


@pytest.mark.parametrize("data", [dump_manifest(MANIFEST), dump_index(INDEX)], ids=["manifest", "index"])
def test_no_bit_can_change(data: bytes) -> None:
    """Every bit of every byte is under the checksum, the checksum's own bytes and the first brace too."""
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            with pytest.raises(CheckpointError, match="some/path is damaged"):
                parse(bytes(changed), "some/path")


def test_no_byte_can_be_lost_or_come_in() -> None:
    """A file that is cut anywhere, longer, or empty is damaged."""
    data = dump_manifest(MANIFEST)
    for end in range(len(data)):
        with pytest.raises(CheckpointError, match="is damaged"):
            parse(data[:end], "path")
    for more in (data + b"\n", data + b" ", b" " + data, data.replace(b" ", b"  ", 1), data * 2):
        with pytest.raises(CheckpointError, match="is damaged"):
            parse(more, "path")


@given(
    st.dictionaries(
        st.text().filter(lambda key: key != "crc32"),
        st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=4),
        min_size=1,
    )
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_object_comes_back(content: dict[str, object]) -> None:
    """Whatever the keys and texts, the checksum on top does not get in their way."""
    found = parse(dump(content), "path")
    assert len(found.pop("crc32")) == 8
    assert found == content


@pytest.mark.parametrize("lost", ["step", "serial", "files", "metrics", "parts"])
def test_a_manifest_that_lacks_a_field_is_refused(lost: str) -> None:
    """A right checksum does not make a wrong content right."""
    content = json.loads(dump_manifest(MANIFEST))
    del content["crc32"], content[lost]
    with pytest.raises(CheckpointError, match="path lacks what a manifest must have"):
        parse_manifest(dump(content), "path")


def test_what_is_of_another_kind_is_told() -> None:
    """Another program's file, and one of a later version, are not called damaged."""
    content = json.loads(dump_manifest(MANIFEST))
    del content["crc32"]
    with pytest.raises(CheckpointError, match="is not the manifest of a checkpoint of rankwise"):
        parse_manifest(dump({**content, "format": "other"}), "path")
    with pytest.raises(CheckpointError, match="has version 9 of the format; this rankwise reads version 1"):
        parse_manifest(dump({**content, "version": 9}), "path")
    with pytest.raises(CheckpointError, match="path lacks what an index must have"):
        parse_index(dump({"files": [], "tensors": {"a": ["float32", [1], [[0, 1, 1, 1, [], []]]]}}), "path")
