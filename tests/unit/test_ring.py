"""The memory file of a rank: what is written is read, whatever moment the writer was stopped at."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rankwise.evidence.in_rank import ring
from rankwise.evidence.reader.merge_records import Merger


def make() -> tuple[bytearray, ring.RingWriter]:
    memory = bytearray(ring.SIZE_BYTES)
    return memory, ring.RingWriter(memory, 7)


def enter(writer: ring.RingWriter, seq: int, name: str = "all_reduce", form: bytes = b"float32[3]") -> int:
    texts = (writer.intern(name), writer.intern("group\t0\tgloo\t0-1\t0"), writer.intern("a.py:3"), 0, 0, 0)
    return writer.enter(seq, float(seq), texts, ring.NOBODY, ring.NOBODY, form)


def read(memory: bytearray) -> list[ring.Record]:
    reading = ring.RingReader(bytes(memory))
    return [ring.Record(raw, reading.read_texts()) for raw in reading.read_raw_records()]


def test_what_was_entered_and_left_is_read() -> None:
    """A record tells all that was given, and whether the collective is over."""
    memory, writer = make()
    first = enter(writer, 1)
    enter(writer, 2, "barrier", b"")
    writer.leave(first, 9.0, ring.OVER)
    one, two = read(memory)
    assert (one.seq, one.name, one.site, one.shapes, one.dtypes) == (
        1,
        "all_reduce",
        "a.py:3",
        ((3,),),
        ("float32",),
    )
    assert (one.entered_s, one.over_s, one.state, one.root) == (1.0, 9.0, ring.OVER, ring.NOBODY)
    assert (two.seq, two.name, two.shapes, two.state) == (2, "barrier", (), ring.ENTERED)


def test_the_last_ones_are_kept_in_order() -> None:
    """More records than there is room for leave the newest, oldest first; one that is gone can't be marked as over."""
    memory, writer = make()
    numbers = [enter(writer, seq) for seq in range(1, ring.NUM_RECORDS + 11)]
    writer.leave(numbers[0], 1.0, ring.OVER)
    found = read(memory)
    assert [record.seq for record in found] == list(range(11, ring.NUM_RECORDS + 11))
    assert {record.state for record in found} == {ring.ENTERED}


def test_a_torn_record_is_left_out() -> None:
    """A record whose end was not written, or is another's, is none; the others are."""
    memory, writer = make()
    for seq in range(1, 4):
        enter(writer, seq)
    at = memory.index(struct.pack("<Qq", 2, 2))
    memory[at + ring.RECORD_BYTES - 8 : at + ring.RECORD_BYTES] = bytes(8)
    assert [record.seq for record in read(memory)] == [1, 3]


def test_a_refused_call_is_no_collective() -> None:
    """What torch refused before anything was sent does not count."""
    memory, writer = make()
    writer.leave(enter(writer, 1), 2.0, ring.REFUSED)
    writer.leave(enter(writer, 1), 2.0, ring.RAISED)
    assert [op.has_raised for op in Merger().merge(ring.RingReader(bytes(memory))).ops] == [True]


def test_a_full_table_of_texts_is_said() -> None:
    """When there is no room for a text it is unknown; what was written before stays."""
    memory, writer = make()
    numbers = [writer.intern(f"{number}" * 500) for number in range(1000)]
    short = [writer.intern(f"{number}") for number in range(5000)]
    assert numbers[0]
    assert not numbers[-1]
    assert not short[-1]
    enter(writer, 1)
    reading = ring.RingReader(bytes(memory))
    assert reading.get(ring.FULL_AT)
    assert reading.read_texts()[numbers[0]] == "0" * 500
    assert read(memory)[0].site == ""


def test_another_world_begins_anew() -> None:
    """After a new default group the numbers begin at 1 again, and the old ones are not mixed with them."""
    memory, writer = make()
    enter(writer, 1)
    writer.mark(ring.LEFT_AT)
    writer.begin_world(5.0)
    enter(writer, 1, "barrier")
    reading = ring.RingReader(bytes(memory))
    assert [record.name for record in read(memory)] == ["barrier"]
    assert (reading.get(ring.JOINED_AT), reading.get(ring.LEFT_AT)) == (1, 0)


def test_half_a_report_never_hides_the_one_before() -> None:
    """A report that was being written when the rank was killed is not read; the last whole one is."""
    memory, writer = make()
    writer.report("stacks", b"first", 1.0)
    whole = bytes(memory)
    writer.report("stacks", b"second", 2.0)
    assert ring.RingReader(bytes(memory)).read_report("stacks") == (2, b"second", 2.0)
    torn = bytearray(memory)
    at = torn.index(b"second")
    torn[at : at + 3] = b"xxx"
    assert ring.RingReader(bytes(torn)).read_report("stacks") == (1, b"first", 1.0)
    assert ring.RingReader(whole).read_report("flight") is None


def test_only_one_living_python_writes() -> None:
    """A file that a living process has claimed is its own; one of a process that has ended can be claimed."""
    memory, _ = make()
    ring.RingWriter(memory, os.getpid())
    assert not ring.claim(memory, os.getpid() + 1)
    assert ring.claim(memory, os.getpid())
    ended = os.posix_spawn("/bin/true", ["/bin/true"], {})
    os.waitpid(ended, 0)
    ring.RingWriter(memory, ended)
    assert ring.claim(memory, os.getpid())


def test_an_empty_file_is_no_evidence() -> None:
    """What no rank has written to is not read as an empty record."""
    assert not ring.RingReader(bytes(ring.SIZE_BYTES)).is_begun
    assert not ring.RingReader(b"").is_begun


@given(st.sets(st.integers(0, 200)))
def test_ranks_are_written_and_read(ranks: set[int]) -> None:
    """Members of a group survive, whichever they are."""
    ordered = tuple(sorted(ranks))
    assert ring.read_ranks(ring.write_ranks(ordered)) == ordered


@given(st.lists(st.tuples(st.lists(st.integers(0, 10**6), max_size=5).map(tuple), st.sampled_from(["float32", "int64"])), max_size=12))  # fmt: skip
def test_forms_are_written_and_read(tensors: list[tuple[tuple[int, ...], str]]) -> None:
    """Shapes and types survive; where they don't fit, the shapes are unknown and never wrong."""
    raw = ring.describe_form(tensors)
    shapes, dtypes = ring.parse_form(raw.decode())
    assert len(raw) <= ring.FORM_BYTES
    if raw.startswith(b"?"):
        assert shapes == ()
    else:
        assert list(zip(shapes, dtypes, strict=True)) == tensors


@given(st.binary(max_size=2000), st.integers(0, ring.SIZE_BYTES - 2000))
def test_whatever_is_in_the_file_it_is_read(noise: bytes, at: int) -> None:
    """A script that writes into the file by mistake can't bring its parent down."""
    memory, writer = make()
    for seq in range(1, 30):
        enter(writer, seq)
    writer.report("flight", b"{}", 1.0)
    memory[at : at + len(noise)] = noise
    Merger().read(bytes(memory))


@pytest.mark.linux
def test_the_file_is_mapped_without_a_descriptor_of_its_own() -> None:
    """What is written into the mapping is in the file, and no descriptor was taken for it."""
    fd = os.memfd_create("ring")
    os.ftruncate(fd, ring.SIZE_BYTES)
    before = sorted(Path("/proc/self/fd").iterdir())
    memory = ring.map_file(fd)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    ring.RingWriter(memory, 3)
    assert ring.RingReader(os.pread(fd, ring.SIZE_BYTES, 0)).get(ring.PID_AT) == 3
    os.close(fd)
