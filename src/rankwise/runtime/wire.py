"""How each kind of leaf travels in a reduction: as a tensor that the backend can add, and back without loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.base.errors import CollectiveError
from rankwise.runtime.groups import choose_carrier
from rankwise.runtime.nested import describe_leaf, find_unfit, from_tensor, kind_of, to_tensor
from rankwise.runtime.signature import format_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.runtime.groups import Group

Op = Literal["sum", "mean", "min", "max", "product", "any", "all"]
OPS: tuple[str, ...] = get_args(Op)

#: Tensors below this travel together, in flat buffers of at most the other.
_SMALL_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20

_HALVES = {torch.float16, torch.bfloat16}
_FLOATS = {*_HALVES, torch.float32, torch.float64}
_INTS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32}
_COMPLEX = {torch.complex64, torch.complex128}
_WORD = 1 << 32


@final
@dataclass(frozen=True, slots=True)
class Wire:
    """One leaf on its way.

    Attributes:
        tensor: What travels, on a device that the backend takes; may share the leaf's memory.
        op: What the backend does with it: sum, min, max or product.
        finish: Makes the reduced tensor into the leaf's result; may raise CollectiveError, equally on all ranks.
    """

    tensor: Tensor
    op: str
    finish: Callable[[Tensor], Any]


def read_op(op: Any) -> Any:
    """Return our name of an operation that was given by torch's: ``dist.ReduceOp.SUM`` is ``"sum"``."""
    if isinstance(op, str):
        return op
    names = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product"}
    name = str(getattr(op, "name", None) or op).rpartition(".")[2]
    is_torchs = "RedOp" in type(op).__name__ or "ReduceOp" in type(op).__name__
    return names.get(name, repr(op)) if is_torchs else repr(op)


def check_op(op: str) -> CollectiveError | None:
    """Return the error for an operation that does not exist."""
    if op in OPS:
        return None
    return CollectiveError(f"there is no operation {op!r}", hint=f"choose one of {', '.join(OPS)}")


def check_leaf(path: str, leaf: Any, op: str) -> CollectiveError | None:
    """Return why a leaf can't be reduced with this operation; None if it can."""
    kind = kind_of(leaf)
    where = path or "the value"
    if kind == "object":
        return CollectiveError(
            f"{where} is a {type(leaf).__name__} ({repr(leaf)[:60]}), which can't be reduced",
            hint="pass tensors and numbers only; all_gather carries any object",
        )
    if (unfit := find_unfit(leaf, path)) is not None:
        return unfit
    text = f"{where} is {format_leaf(describe_leaf(leaf))}"
    if kind == "int" and not -(1 << 63) <= leaf < 1 << 63:
        text = f"{text} of {leaf.bit_length()} bits, and 63 can be sent"
        return CollectiveError(text, hint="pass it as a float, or all_gather it")
    wrong, hint = _check_dtype(_dtype_of(leaf, kind), op)
    return CollectiveError(f"{text}, {wrong}", hint=hint) if wrong else None


def _check_dtype(dtype: torch.dtype, op: str) -> tuple[str, str]:
    """Return what is wrong with an operation on this dtype, and what to do; two empty texts if nothing is."""
    if dtype not in {*_FLOATS, *_INTS, *_COMPLEX, torch.bool}:
        return "which has no arithmetic here", "cast it first, to float32 or int64"
    if op in {"any", "all"} and dtype != torch.bool:
        return f"and {op!r} is for bools", "compare first: pass x > 0, for example"
    if op == "product" and dtype == torch.bool:
        return "and 'product' is for numbers", "use op='all'"
    if op in {"min", "max", "product"} and dtype in _COMPLEX:
        return "and complex numbers have only 'sum' and 'mean'", "reduce x.abs(), or all_gather"
    return "", ""


def _dtype_of(leaf: Any, kind: str) -> torch.dtype:
    scalars = {"bool": torch.bool, "int": torch.int64, "float": torch.float64, "complex": torch.complex128}
    if kind in scalars:
        return scalars[kind]
    dtype: torch.dtype = to_tensor(leaf).dtype
    return dtype


def encode(path: str, leaf: Any, op: str, group: Group, *, precise: bool) -> Wire:
    """Return how a leaf that ``check_leaf`` has passed travels.

    Args:
        path: Where in the tree it is.
        leaf: A number, a tensor or an array; not modified.
        op: One of ``OPS``.
        group: Among whom.
        precise: Whether floats are added in float64 and stay so.
    """
    kind = kind_of(leaf)
    if kind == "int":
        return _encode_int(leaf, op, group)
    if kind in {"bool", "float", "complex"}:
        dtype = _dtype_of(leaf, kind)
        inner = _encode_tensor(path, torch.tensor(leaf, dtype=dtype), op, group)
        return Wire(inner.tensor, inner.op, lambda seen: inner.finish(seen).item())
    tensor = to_tensor(leaf)
    if precise and tensor.dtype in _FLOATS | _COMPLEX:
        tensor = tensor.to(torch.complex128 if tensor.dtype in _COMPLEX else torch.float64)
    inner = _encode_tensor(path, tensor, op, group)
    return Wire(inner.tensor, inner.op, lambda seen: from_tensor(inner.finish(seen), kind))


def _encode_int(value: int, op: str, group: Group) -> Wire:
    """Python's ints don't overflow, so neither do ours: two words for a sum, everybody's factor for a product."""
    carrier = choose_carrier(group, "cpu")
    if op in {"min", "max"}:
        return Wire(torch.tensor([value], device=carrier), op, lambda seen: int(seen[0]))
    if op == "product":
        factors = torch.zeros(group.size, dtype=torch.int64)
        factors[group.position] = value
        return Wire(factors.to(carrier), "sum", lambda seen: math.prod(seen.tolist()))
    words = torch.tensor(divmod(value, _WORD), device=carrier)

    def finish(seen: Tensor) -> int | float:
        high, low = seen.tolist()
        total = int(high) * _WORD + int(low)
        return total / group.size if op == "mean" else total

    return Wire(words, "sum", finish)


def _encode_tensor(path: str, leaf: Tensor, op: str, group: Group) -> Wire:
    leaf = leaf.resolve_conj().resolve_neg()  # a backend reads memory, and knows of no pending minus
    carrier, home, dtype, size = choose_carrier(group, leaf.device.type), leaf.device, leaf.dtype, group.size
    if dtype == torch.bool and op in {"any", "all", "min", "max"}:
        native = {"any": "max", "all": "min"}.get(op, op)
        return Wire(leaf.to(carrier, torch.uint8), native, lambda seen: seen.to(home, torch.bool))
    if op == "mean":
        return _encode_mean(leaf, carrier, size)
    if dtype == torch.bool:
        return Wire(leaf.to(carrier, torch.int64), "sum", lambda seen: seen.to(home))
    if dtype in _INTS:
        return Wire(leaf.to(carrier, torch.int64), op, lambda seen: _narrow(path, seen, dtype, op).to(home))
    if dtype in _COMPLEX:
        pairs = torch.view_as_real(leaf).to(carrier)
        return Wire(pairs, "sum", lambda seen: torch.view_as_complex(seen).to(home))
    return Wire(leaf.to(carrier), op, lambda seen: seen.to(home))


def _encode_mean(leaf: Tensor, carrier: torch.device, size: int) -> Wire:
    home = leaf.device
    if leaf.is_complex():
        pairs = torch.view_as_real(leaf).to(carrier)
        return Wire(pairs, "sum", lambda seen: torch.view_as_complex(seen.div_(size)).to(home))
    if not leaf.is_floating_point():
        return Wire(leaf.to(carrier, torch.int64), "sum", lambda seen: (seen.double() / size).to(home))
    if leaf.dtype in _HALVES:
        # Their sum may be beyond float16 where their mean is not; DDP divides first too.
        return Wire(leaf.to(carrier) / size, "sum", lambda seen: seen.to(home))
    return Wire(leaf.to(carrier), "sum", lambda seen: seen.div_(size).to(home))


def _narrow(path: str, seen: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """Cast back what was reduced in int64, unless it does not fit any more: wrapping round is what torch does."""
    if dtype == torch.int64:
        return seen
    if op in {"sum", "product"} and seen.numel():
        low, high = (int(bound) for bound in torch.aminmax(seen))
        limits = torch.iinfo(dtype)
        if low < limits.min or high > limits.max:
            name, worst = str(dtype).removeprefix("torch."), high if high > limits.max else low
            raise CollectiveError(
                f"{path or 'the value'}: its {op} over the ranks is {worst}, and {name} ends at {limits.min} and {limits.max}",
                hint="cast it first: x.to(torch.int64)",
            )
    return seen.to(dtype)


def may_overflow(leaf: Any, op: str) -> bool:
    """Whether the result may not fit the leaf's dtype, which only a rank that holds it finds out."""
    kind = kind_of(leaf)
    if op not in {"sum", "product"} or kind not in {"tensor", "array", "scalar"}:
        return False
    return _dtype_of(leaf, kind) in _INTS - {torch.int64}


def has_nan(leaf: Any) -> bool:
    """Whether a leaf that ``check_leaf`` has passed holds NaN."""
    kind = kind_of(leaf)
    return _dtype_of(leaf, kind) in _FLOATS and bool(find_nan(leaf).any())


def find_nan(leaf: Any) -> Tensor:
    """Return where a leaf of floats is NaN."""
    tensor = to_tensor(leaf) if kind_of(leaf) != "float" else torch.tensor(leaf, dtype=torch.float64)
    return tensor.isnan()


def put_nan(result: Any, mask: Tensor) -> Any:
    """Return a result with NaN where the mask says, in its own memory where it has one."""
    kind = kind_of(result)
    if kind == "tensor":
        return result.masked_fill_(mask, math.nan)
    if kind == "array":
        result[mask.cpu().numpy()] = math.nan
        return result
    return type(result)("nan") if bool(mask) else result


_NATIVE = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT"}


def native_op(op: str) -> Any:
    """Return torch's name of an operation that backends know."""
    return getattr(dist.ReduceOp, _NATIVE[op])


def plan_buckets(wires: Sequence[Wire]) -> list[list[int]]:
    """Return which wires travel together: small ones of one dtype, device and operation; equal on all ranks."""
    tensors = ((wire.tensor, wire.op) for wire in wires)
    return fill_buckets(((one.dtype, one.device, op), one.numel() * one.element_size()) for one, op in tensors)


def fill_buckets(items: Iterable[tuple[Any, int]]) -> list[list[int]]:
    """Return which items travel together, by their numbers: small ones of one kind.

    Args:
        items: Kind and bytes of each.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for index, (kind, size_bytes) in enumerate(items):
        if size_bytes >= _SMALL_BYTES:
            buckets.append([index])
            continue
        bucket, filled = open_buckets.get(kind, ([], 0))
        if not bucket or filled + size_bytes > _BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[kind] = (bucket, filled + size_bytes)
    return buckets


def pack(wires: Sequence[Wire], *, in_place: bool = False) -> Tensor:
    """Return a flat tensor with the values of all these wires, of its own memory unless ``in_place`` lets one keep its."""
    if len(wires) == 1:
        if in_place and wires[0].tensor.is_contiguous():
            return wires[0].tensor.view(-1)
        return wires[0].tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return torch.cat([wire.tensor.reshape(-1) for wire in wires])


def unpack(wires: Sequence[Wire], flat: Tensor) -> list[Any]:
    """Undo ``pack`` and finish each leaf; results hold no memory of their neighbours'."""
    if len(wires) == 1:
        return [wires[0].finish(flat.view(wires[0].tensor.shape))]
    pairs = zip(wires, flat.split([wire.tensor.numel() for wire in wires]), strict=True)
    return [wire.finish(part.clone().view(wire.tensor.shape)) for wire, part in pairs]
