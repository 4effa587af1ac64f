"""Any state as plain data and back: equal, or refused by name; nothing that is read executes."""

from __future__ import annotations

import base64
import collections
import ctypes
import enum
import json
import math
import mmap
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from rankwise import checkpoint
from rankwise.base.errors import CheckpointError
from rankwise.base.memory import view_memory
from rankwise.checkpoint.contents import list_parts
from rankwise.checkpoint.manifest import Index
from rankwise.checkpoint.tree import Encoder, decode

numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.complex_numbers())
leaves = st.one_of(st.none(), numbers, st.text(), st.binary(), st.sampled_from([torch.float32, torch.device("cpu")]))
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda held: st.one_of(
        st.lists(held), st.lists(held).map(tuple), st.lists(held).map(collections.deque), st.dictionaries(keys, held)
    ),
    max_leaves=20,
)  # fmt: skip


class Pair(NamedTuple):
    a: int
    b: int


class Color(enum.IntEnum):
    RED = 1


class Explosive:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def round_trip(value: Any, *, can_pickle: bool = False) -> Any:
    """Encode, write as JSON, read and decode."""
    encoder = Encoder("part", can_pickle=can_pickle)
    text = json.dumps(encoder.encode(value), allow_nan=False)
    return decode(json.loads(text), encoder.tensors.__getitem__, can_pickle=can_pickle)


def describe(value: Any) -> Any:
    """Say exactly what a value is; unlike ==, NaN is like NaN, and 1 is not like True."""
    if isinstance(value, dict):
        return ["dict", [[describe(key), describe(one)] for key, one in value.items()]]
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value).__name__, [describe(one) for one in value]]
    return [type(value).__name__, repr(value)]


@given(trees)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_plain_comes_back_as_it_was(value: Any) -> None:
    """Whatever is made of plain values and containers comes back equal in value, type and order."""
    assert describe(round_trip(value)) == describe(value)


@given(st.recursive(st.integers(), lambda held: st.lists(held) | st.dictionaries(st.text(), held), max_leaves=10))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tensors_come_back_wherever_they_stand(shape: Any) -> None:
    """Each tensor of a nested state comes back at its own place, though names of places may collide."""

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(one) for key, one in value.items()}
        return [fill(one) for one in value] if isinstance(value, list) else torch.tensor([float(value % 2**20)])

    state = fill(shape)
    assert describe(round_trip(state)) == describe(state)


@pytest.mark.parametrize(
    "value",
    [
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {"$tensor": "part.x"},
        {"$pickle": "x", "other": 1},
        {1: "int", "1": "text", (1, "1"): "tuple", None: "none", 1.5: "float"},
        [math.nan, math.inf, -math.inf, -0.0, 10**60, "\udc80"],
        collections.deque([1, 2, 3], maxlen=3),
        collections.Counter("abca"),
        {frozenset({1, 2}), 3},
        torch.Size([2, 3]),
        bytearray(b"\x00\xff"),
        collections.defaultdict(list, {"a": [1]}),
        Path("/tmp/x"),
        {},
        [[], (), {}],
    ],
    ids=repr,
)
def test_the_odd_ones_come_back(value: Any) -> None:
    """Keys that look like our own marks, keys that are not texts, and rare types come back too."""
    found = round_trip(value)
    assert describe(found) == describe(value)
    if isinstance(value, collections.deque):
        assert found.maxlen == value.maxlen


def test_numpy_numbers_and_arrays_come_back() -> None:
    """NumPy's numbers and arrays keep dtype, byte order and shape; the empty and the 0-dim one too."""
    np = pytest.importorskip("numpy")
    values = [
        np.float32(1.5), np.int64(-3), np.bool_(True), np.array(2.0), np.zeros((0, 3)), np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array([1 + 2j]),
    ]  # fmt: skip
    for value, found in zip(values, round_trip(values), strict=True):
        assert type(found) is type(value)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert (found == value).all()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Pair(1, 2), "Pair"),
        (Color.RED, "Color"),
        (object(), "builtins.object"),
        (lambda: None, "function"),
        ((1).__class__, "builtins.type"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
    ids=["namedtuple", "enum", "object", "function", "class", "meta", "sparse"],
)
def test_what_is_not_plain_is_refused_by_its_place(value: Any, told: str) -> None:
    """What would come back as something else is refused, and the error names its place and its type."""
    with pytest.raises(CheckpointError, match=r"part\.a\.0\.b is a ") as caught:
        Encoder("part").encode({"a": [{"b": value}]})
    assert told in str(caught.value)


def test_an_array_of_objects_is_refused() -> None:
    """NumPy's arrays of objects are pickles in disguise."""
    np = pytest.importorskip("numpy")
    with pytest.raises(CheckpointError, match="can't be saved as plain data"):
        Encoder("part").encode(np.array([object()]))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("<f4", [1 << 40]),
        ("<f4", [3]),
        ("<f8", [2]),
        ("<f4", [-1, -2]),
        ("|O", [1]),
        ("none", [2]),
        ("<f4", ["2"]),
    ],
)
def test_an_array_is_as_large_as_its_tensor(dtype: str, shape: Any) -> None:
    """An index that was changed behind its checksum reads no memory beside the tensor: it is refused, by name, with both sizes."""
    pytest.importorskip("numpy")
    raw = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"'array' is a NumPy array .* holds 8 bytes for it"):
        decode({"$numpy": [dtype, shape, True, "array"]}, {"array": raw}.__getitem__)


def test_memory_of_more_than_two_gib_is_seen_whole() -> None:
    """An int of C holds no such size: what was cut there was saved, and could not be loaded, or compared as equal."""
    with mmap.mmap(-1, (5 << 30) + 1) as pages:
        owner = (ctypes.c_char * len(pages)).from_buffer(pages)
        view = view_memory(ctypes.addressof(owner), len(pages))
        view[-1] = 7
        assert (len(view), pages[-1]) == ((5 << 30) + 1, 7)
        view.release()
        del view, owner


def test_pickled_objects_come_back_only_if_asked_for() -> None:
    """With pickle=True on both sides an object comes back; without it at reading, it is refused."""
    assert round_trip([Pair(1, 2)], can_pickle=True) == [Pair(1, 2)]
    tree = Encoder("part", can_pickle=True).encode(Pair(1, 2))
    with pytest.raises(CheckpointError, match="pickled object") as caught:
        decode(tree, {}.__getitem__)
    assert "pickle=True" in str(caught.value)
    with pytest.raises(CheckpointError, match="can't even be pickled"):
        Encoder("part", can_pickle=True).encode(lambda: None)


def test_a_crafted_pickle_never_executes(tmp_path: Path) -> None:
    """A pickle that somebody has put into a tree, at any depth, is not even looked at."""
    victim = tmp_path / "made"
    tree = {"$pickle": base64.b64encode(pickle.dumps(Explosive(str(victim)))).decode()}
    for crafted in (
        tree,
        [tree],
        {"$tuple": [tree]},
        {"$dict": [["a", tree]]},
        {"$dict": [[{"$tuple": [tree]}, 1]]},
    ):
        with pytest.raises(CheckpointError, match="pickled object"):
            decode(crafted, {}.__getitem__)
    assert not victim.exists()
    decode(tree, {}.__getitem__, can_pickle=True)
    assert victim.exists()  # so that the test means something


def test_a_crafted_folder_never_executes(tmp_path: Path) -> None:
    """A folder that somebody has made with pickles in it, checksums right, executes nothing unless it is asked for."""
    victim, folder = tmp_path / "made", tmp_path / "runs"
    checkpoint.save(folder, {"evil": Explosive(str(victim)), "n": 1}, step=1, pickle=True)
    assert checkpoint.verify(folder) == []
    for attempt in (lambda: checkpoint.load(folder, {"evil": None}), lambda: checkpoint.read(folder)):
        with pytest.raises(CheckpointError, match="pickled object"):
            attempt()
    state = {"n": 0}
    assert checkpoint.load(folder, state) == 1  # what is not asked for is not decoded
    assert state == {"n": 1}
    assert not victim.exists()
    assert checkpoint.load(folder, {"evil": None}, pickle=True) == 1
    assert victim.exists()


@pytest.mark.parametrize("tree", [{"$eval": "1"}, {"$module": "os"}, {"$dtype": "load"}])
def test_an_unknown_mark_is_refused(tree: Any) -> None:
    """A mark of a later version, or of nobody, is named and refused; a dtype's name reaches nothing else of torch."""
    with pytest.raises(CheckpointError, match="it holds a"):
        decode(tree, {}.__getitem__)


def test_what_is_in_a_defaultdict_or_a_deque_is_among_the_contents() -> None:
    """Its tensors are listed as those of any container, and what says how it is made is no part of them."""
    held = {"$defaultdict": ["list", {"a": [{"$tensor": "one"}], "b": {"$deque": [3, [{"$tensor": "two"}]]}}]}
    (part,) = list_parts(Index({}, {"state": {"plain": held}}, {}))
    assert (part.tensors, part.others) == (["one", "two"], [])
