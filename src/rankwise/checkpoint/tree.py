"""Any state without tensors as JSON, and back: nothing that is read can execute.

Containers and values that JSON has not are written as an object with one key: ``{"$tuple": [1, 2]}``. A tensor is a name.
"""

from __future__ import annotations

import base64
import collections
import math
import pickle
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.errors import CheckpointError
from rankwise.base.memory import view_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DICTS = (dict, collections.OrderedDict)
#: What a defaultdict may make, and still be plain data.
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size"}


@final
class Encoder:
    """Takes a nested state apart.

    Args:
        prefix: In front of the names of tensors.
        can_pickle: Whether objects that JSON can't hold may be pickled.
    """

    def __init__(self, prefix: str, *, can_pickle: bool = False) -> None:
        self.prefix, self.can_pickle = prefix, can_pickle
        #: What was found: tensors by their names.
        self.tensors: dict[str, torch.Tensor] = {}
        #: Those of them that stood in what a module's ``state_dict()`` returns.
        self.of_modules: set[str] = set()
        #: Whether tensors on the meta device stand for what another rank has; these have names, and are not collected.
        self.has_stand_ins = False
        self._absent: set[str] = set()

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Return what JSON can hold of a value, and collect its tensors.

        Raises:
            CheckpointError: Something in it can't be held; names its place.
        """
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(value, path)}
        if value is None or type(value) in {bool, int, str}:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if type(value) is list:
            return [self.encode(one, (*path, str(place))) for place, one in enumerate(value)]
        if type(value) in _DICTS:
            before = len(self.tensors)
            encoded = self._encode_dict(value, path)
            if hasattr(value, "_metadata"):  # only a module's has it
                self.of_modules.update(islice(self.tensors, before, None))
            return encoded
        return self._encode_rare(value, path)

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(one, (*path, key)) for key, one in value.items()}
        return {
            "$dict": [
                [self.encode(key, (*path, "key")), self.encode(one, (*path, str(key)))] for key, one in value.items()
            ]
        }

    def _encode_rare(self, value: Any, path: tuple[str, ...]) -> Any:  # noqa: C901, PLR0911 - one for each type
        tag = _SEQUENCES.get(type(value))
        if tag is not None:
            items = sorted(value, key=repr) if tag in {"$set", "$frozenset"} else value
            return {tag: [self.encode(one, (*path, str(place))) for place, one in enumerate(items)]}
        if type(value) in {bytes, bytearray}:
            return {"$" + type(value).__name__: base64.b64encode(value).decode()}
        if type(value) is collections.defaultdict and value.default_factory in {None, *_FACTORIES.values()}:
            made = getattr(value.default_factory, "__name__", None)
            return {"$defaultdict": [made, self._encode_dict(dict(value), path)]}
        if type(value) is complex:
            return {"$complex": [repr(value.real), repr(value.imag)]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, PurePath):
            return {"$path": str(value)}
        if type(value) is collections.Counter:
            return {"$counter": self._encode_dict(dict(value), path)}
        if type(value) is collections.deque:
            return {
                "$deque": [value.maxlen, [self.encode(one, (*path, str(place))) for place, one in enumerate(value)]]
            }
        if type(value).__module__ == "numpy":
            return self._encode_numpy(value, path)
        return self._encode_opaque(value, path)

    def _encode_numpy(self, value: Any, path: tuple[str, ...]) -> Any:
        """Of NumPy, which need not be installed, numbers and arrays of numbers."""
        kind = getattr(getattr(value, "dtype", None), "kind", "O")
        if kind not in "biufc" or not hasattr(value, "shape"):
            return self._encode_opaque(value, path)
        dtype = value.dtype
        # As bytes: torch lacks some of NumPy's types, and the order of bytes must be told.
        raw = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)
        return {"$numpy": [dtype.str, list(value.shape), type(value).__name__ == "ndarray", self._keep(raw, path)]}

    def _encode_opaque(self, value: Any, path: tuple[str, ...]) -> Any:
        place = ".".join((self.prefix, *path))
        if self.can_pickle:
            try:
                return {"$pickle": base64.b64encode(pickle.dumps(value)).decode()}
            except Exception as error:
                raise CheckpointError(
                    f"{place} is a {type(value).__qualname__}, and can't even be pickled: {error}"
                ) from error
        raise CheckpointError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which can't be saved as plain data",
            hint="give it state_dict() and load_state_dict(), or turn it into numbers, strings, lists, dicts and tensors; save(..., pickle=True) pickles it",
        )

    def _keep(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        place = ".".join((self.prefix, *path))
        if type(tensor).__name__ == "ShardedTensor":  # whose every attribute raises something else
            raise CheckpointError(
                f"{place} is a ShardedTensor, of FSDP1",
                hint="use FSDP2 (torch.distributed.fsdp.fully_shard), or StateDictType.FULL_STATE_DICT",
            )
        is_absent = self.has_stand_ins and tensor.device.type == "meta"
        if not is_absent and (
            tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta"
        ):
            raise CheckpointError(
                f"{place} is a tensor that has no plain bytes ({tensor.layout}, {tensor.device.type}{', quantized' if tensor.is_quantized else ''})",
                hint="save its components: of a sparse tensor the indices and the values",
            )
        name, number = place, 2
        while name in self.tensors or name in self._absent:  # {"a.b": x, "a": {"b": y}}
            name, number = f"{place}~{number}", number + 1
        if is_absent:
            self._absent.add(name)
        else:
            self.tensors[name] = tensor.detach()
        return name


def decode(value: Any, find_tensor: Callable[[str], torch.Tensor], *, can_pickle: bool = False) -> Any:  # noqa: PLR0911 - one for each tag
    """Put a state together again.

    Args:
        value: What ``Encoder.encode`` returned.
        find_tensor: Returns the tensor of a name.
        can_pickle: Whether pickled objects in it may be loaded, and with that any code executed.

    Raises:
        CheckpointError: It holds something pickled, or something that this version does not know.
    """
    if isinstance(value, list):
        return [decode(one, find_tensor, can_pickle=can_pickle) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(one, find_tensor, can_pickle=can_pickle) for key, one in value.items()}
    tag, held = next(iter(value.items()))
    if tag == "$tensor":
        return find_tensor(held)
    if tag == "$numpy":
        return _decode_numpy(held, find_tensor)
    if tag == "$pickle":
        if not can_pickle:
            raise CheckpointError(
                "it holds a pickled object, and loading one executes the code in it",
                hint="if you trust whoever wrote it: load(..., pickle=True)",
            )
        return pickle.loads(base64.b64decode(held))  # noqa: S301 - asked for by the caller
    if tag in _PLAIN:
        return _PLAIN[tag](held)
    if tag in _NESTED:
        return _NESTED[tag](decode(held, find_tensor, can_pickle=can_pickle))
    raise CheckpointError(
        f"it holds a {tag}, which this version does not know",
        hint="load it with the rankwise that wrote it, or a later one",
    )


def list_tensors(tree: Any) -> Iterator[str]:
    """Return the names of all tensors in what ``Encoder.encode`` returned."""
    if isinstance(tree, list):
        for one in tree:
            yield from list_tensors(one)
    elif isinstance(tree, dict):
        for key, held in tree.items():
            if key == "$tensor":
                yield held
            elif key == "$numpy":
                yield held[3]
            else:
                yield from list_tensors(held)


def rename_tensors(tree: Any, names: Mapping[str, str]) -> Any:
    """Return what ``Encoder.encode`` returned with other names of tensors in it."""
    if isinstance(tree, list):
        return [rename_tensors(one, names) for one in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: names[held] if key == "$tensor" else [*held[:3], names[held[3]]] if key == "$numpy" else rename_tensors(held, names)
        for key, held in tree.items()
    }  # fmt: skip


def _decode_numpy(held: Any, find_tensor: Callable[[str], torch.Tensor]) -> Any:
    try:
        import numpy as np  # noqa: PLC0415 - only a state that holds arrays needs it
    except ImportError:
        raise CheckpointError("it holds a NumPy array, and NumPy is not installed", hint="pip install numpy") from None
    dtype, shape, is_array, name = held
    raw = find_tensor(name)
    num_bytes = raw.numel() * raw.element_size()
    array = None
    with suppress(TypeError, ValueError):
        # An empty array has one byte, too.
        held_bytes = view_memory(raw.data_ptr(), num_bytes if math.prod(shape) else 0)
        array = np.frombuffer(held_bytes, dtype=dtype).reshape(shape).copy()
    if array is None or array.shape != tuple(shape):
        raise CheckpointError(
            f"its index says that {name!r} is a NumPy array of {dtype} and shape {tuple(shape)}, and holds {num_bytes} bytes for it",
            hint="the index was changed after it was saved: load an older checkpoint",
        )
    return array if is_array else array[()]


def _decode_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"it holds a dtype {name!r}, which this torch does not have")
    return dtype


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$bytearray": lambda held: bytearray(base64.b64decode(held)),
    "$complex": lambda held: complex(float(held[0]), float(held[1])),
    "$dtype": _decode_dtype,
    "$device": torch.device,
    "$path": Path,
}
_NESTED: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$size": torch.Size,
    "$dict": dict,
    "$counter": collections.Counter,
    "$defaultdict": lambda held: collections.defaultdict(_FACTORIES.get(held[0]), held[1]),
    "$deque": lambda held: collections.deque(held[1], held[0]),
}
