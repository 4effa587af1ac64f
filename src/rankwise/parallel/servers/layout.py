"""Which part of a model is on which server, and where in the flat buffers of server and worker; the way back to a plain optimizer.

Whole tensors go to the server that has least so far, largest first; a tensor above a bound is cut into ranges, one for each server, so
that one embedding does not make one server slow (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014).
"""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.base.errors import ModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


#: Each piece begins at such a multiple of bytes, as tensors of their own do: kernels read 64 bytes at once.
_ALIGNMENT_BYTES = 64
#: A tensor above it is cut; below it one message more would cost as much as the bytes saved.
SPLIT_BYTES = 16 << 20


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a parameter, flattened, and the byte of the shard's buffer with which it begins; ``shape`` is the parameter's if it is all of it."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return (self.stop - self.start) * int(self.dtype.itemsize)

    def take(self, value: Tensor) -> Tensor:
        """Return its part of a parameter, or of what has the parameter's shape; a view if that is contiguous."""
        return value.reshape(-1)[self.start : self.stop].view(self.shape)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write its part of a parameter, or of what has the parameter's shape."""
        held = whole.contiguous()
        self.take(held).copy_(part, non_blocking=True)
        if held is not whole:  # channels_last, say
            whole.copy_(held)


@final
@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What one shard holds: pieces one after the other, those of one dtype together.

    A segment is a dtype, the first byte and the number of elements of its part of the buffer, gaps included.
    """

    number: int
    pieces: tuple[Piece, ...]
    size_bytes: int
    segments: tuple[tuple[torch.dtype, int, int], ...]

    def allocate(self) -> Tensor:
        """Return a buffer of zeros for it, shape (``size_bytes``,), uint8."""
        return torch.zeros(self.size_bytes, dtype=torch.uint8)

    def view(self, buffer: Tensor) -> list[Tensor]:
        """Return each piece as a view of the buffer, in its own shape and dtype."""
        parts = [buffer[one.offset : one.offset + one.size_bytes] for one in self.pieces]
        return [part.view(one.dtype).view(one.shape) for part, one in zip(parts, self.pieces, strict=True)]

    def view_segments(self, buffer: Tensor) -> list[Tensor]:
        """Return the part of each dtype as a flat view of the buffer."""
        return [buffer[start : start + count * dtype.itemsize].view(dtype) for dtype, start, count in self.segments]


def spread(model: nn.Module, num_shards: int, *, split_bytes: int | None = SPLIT_BYTES) -> list[ShardLayout]:
    """Spread the parameters that are trained over shards, of which some may stay empty; a pure function of names, shapes and dtypes."""
    if split_bytes is not None and split_bytes < 1:
        raise UsageError(f"split_bytes={split_bytes} is not a number of bytes above 0", hint="None: never split")
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not trained:
        raise ModelError(
            "no parameter of the model is trained: the servers would have nothing to hold",
            hint="see requires_grad",
        )
    lazy = next((name for name, one in trained if one.is_meta), None)
    if lazy is not None:
        raise ModelError(
            f"parameter {lazy} is on the meta device and has no values",
            hint="build the model on the CPU of each server",
        )
    loads = [0] * num_shards
    chosen: list[list[Piece]] = [[] for _ in range(num_shards)]
    for name, one in sorted(trained, key=lambda pair: -pair[1].nbytes):
        pieces = [Piece(name, 0, one.numel(), tuple(one.shape), one.dtype)]
        first = loads.index(min(loads))
        if split_bytes is not None and one.nbytes > split_bytes and num_shards > 1:
            length, first = math.ceil(one.numel() / num_shards), 0
            bounds = pairwise([*range(0, one.numel(), length), one.numel()])
            pieces = [Piece(name, start, stop, (stop - start,), one.dtype) for start, stop in bounds]
        for number, piece in enumerate(pieces, first):
            chosen[number].append(piece)
            loads[number] += piece.size_bytes
    order = {name: place for place, (name, _) in enumerate(trained)}
    return [
        _lay_out(number, sorted(pieces, key=lambda piece: (str(piece.dtype), order[piece.name])))
        for number, pieces in enumerate(chosen)
    ]


def _lay_out(number: int, pieces: Sequence[Piece]) -> ShardLayout:
    placed: list[Piece] = []
    segments: list[tuple[torch.dtype, int, int]] = []
    offset = 0
    for piece in pieces:
        placed.append(replace(piece, offset=offset))
        begin = segments.pop()[1] if segments and segments[-1][0] == piece.dtype else offset
        offset += -(-piece.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        segments.append((piece.dtype, begin, (offset - begin) // piece.dtype.itemsize))
    return ShardLayout(number, tuple(placed), offset, tuple(segments))


@final
class Part:
    """What a worker has of one shard: a buffer that it pulls into, and one that it pushes from."""

    def __init__(self, layout: ShardLayout, parameters: Mapping[str, nn.Parameter]) -> None:
        self.layout = layout
        self.values, self.gradients = layout.allocate(), layout.allocate()
        self._pairs = [(parameters[one.name], one) for one in layout.pieces]
        self._value_views, self._gradient_views = layout.view(self.values), layout.view(self.gradients)

    def write_back(self) -> None:
        """Copy what was pulled into the model."""
        with torch.no_grad():
            for (parameter, piece), view in zip(self._pairs, self._value_views, strict=True):
                piece.put(parameter.data, view)

    def collect(self, factor: float) -> list[int]:
        """Copy the gradients into the buffer, times a factor; return the pieces that have none."""
        missing: list[int] = []
        pairs = zip(self._pairs, self._gradient_views, strict=True)
        for place, ((parameter, piece), view) in enumerate(pairs):
            if parameter.grad is None:
                view.zero_()
                missing.append(place)
                continue
            view.copy_(piece.take(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad))
        if factor != 1:
            for part in self.layout.view_segments(self.gradients):
                part.mul_(factor)
        return missing


def digest(layouts: Sequence[object]) -> str:
    """Return a text that is equal where the layouts are."""
    return hashlib.sha256(repr(layouts).encode()).hexdigest()[:16]


# ------------------------------------------------------- back to the whole model


def gather_states(
    model: nn.Module,
    layouts: Sequence[ShardLayout],
    packed: Mapping[int, Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Fill a model with the servers' values, and return an optimizer over its trained parameters that has their states."""
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = make_optimizer(list(parameters.values()))
    gathered: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for layout in layouts:
            loaded = torch.load(io.BytesIO(packed[layout.number].numpy().tobytes()), weights_only=True)
            states = loaded["optimizer"].get("state", {})
            for place, (piece, value) in enumerate(zip(layout.pieces, loaded["values"], strict=True)):
                whole = parameters[piece.name]
                piece.put(whole.data, value)
                held = gathered.setdefault(piece.name, {})
                for key, part in states.get(place, {}).items():
                    if not isinstance(part, torch.Tensor) or part.shape != value.shape or part.dim() == 0:
                        held[key] = part
                        continue
                    if key not in held:
                        held[key] = torch.zeros(whole.shape, dtype=part.dtype, device=whole.device)
                    piece.put(held[key], part)
    for name, state in gathered.items():
        if state:
            optimizer.state[parameters[name]] = state
    return optimizer


def name_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Mapping[str, Any]]:
    """Return what a plain optimizer keeps for each parameter of a model, by name."""
    names = {one: name for name, one in model.named_parameters()}
    strangers = [one for group in optimizer.param_groups for one in group["params"] if one not in names]
    if strangers:
        raise UsageError(
            f"resume: the optimizer has {len(strangers)} parameters that the model does not have",
            hint="pass the optimizer of this model that the checkpoint was loaded into",
        )
    return {names[one]: state for one, state in optimizer.state.items()}
