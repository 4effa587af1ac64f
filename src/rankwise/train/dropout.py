"""Dropout that is the same at any number of ranks: what is dropped depends on where a sample stands in its epoch, not on who computes it.

nn.Dropout takes its numbers from a generator of each rank, so that another number of ranks is another training. Here they are a hash of
(key of the layer, epoch, position of the sample, element), as in counter-based generators (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011): no generator is read or moved, and an activation that is computed again, for activation checkpointing, is the same.

B rows, E elements of a row along its last dim.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor, nn

from rankwise.base.errors import ModelError, UsageError
from rankwise.data.permutation import hash_numbers
from rankwise.data.sample_position import Place, current_place, find_place, find_rank
from rankwise.runtime.rng import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

Unit = Literal["element", "channel", "sample"]

# Odd multipliers with bits all over: those of splitmix64 and of MurmurHash3's 32-bit finalizer, as signed numbers.
_WIDE_FIRST, _WIDE_SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_FIRST, _SECOND, _SPREAD = -0x7A143595, -0x3D4D51CB, -0x61C8864F
_HALF = 1 << 31


@final
class GlobalDropout(nn.Module):  # type: ignore[misc]
    """Dropout whose masks are equal at any number of ranks and micro-batches, and after a resume with others.

    In training each element is set to 0 with probability ``p``, and the rest is divided by ``1 - p``; in evaluation
    nothing happens. The mask of a sample depends on four things: this layer's key, the epoch, the sample's position in
    the epoch's order (``rankwise.DataLoader`` knows it), and the element's coordinates in the sample, so that padding
    at the end of a dim changes nothing for what was there before.

    The key is a buffer, drawn from torch's default generator when the layer is made: the same seed before the model is
    built gives the same masks. Checkpoints keep it, and DistributedDataParallel gives all ranks that of rank 0.

    A layer that is called several times for one micro-batch draws another mask each time. Under activation
    checkpointing, one that is called once is recomputed as it was; for one that is called more often ``same_masks`` is
    needed, and without it the backward is an error. A backward belongs before the next micro-batch. Copies of a layer
    (``copy.deepcopy``) have its key, and count their calls together.

    Args:
        p: Probability of an element to be dropped, 0 to 1; counted in steps of 2**-32.
        unit: What is dropped as one: an "element", a "channel" (what stands at one place of the first dim behind the
            samples', as in nn.Dropout1d to 3d), or a whole "sample" (stochastic depth).
        batch_dim: Which dim of the input counts the samples.
        flattened: That dim holds several rows of each sample, one sample after the other, as after ``x.flatten(0, 1)``.
            Without it, any other size than the micro-batch's is an error.

    Attributes:
        key: int64, shape ().

    Raises:
        UsageError: Invalid arguments. In the forward: the size is not that of the micro-batch, or there is none.
    """

    def __init__(self, p: float = 0.5, *, unit: Unit = "element", batch_dim: int = 0, flattened: bool = False) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UsageError(f"GlobalDropout(p={p!r})", hint="p is a probability, 0 to 1")
        if unit not in {"element", "channel", "sample"}:
            raise UsageError(f"GlobalDropout(unit={unit!r})", hint="'element', 'channel' or 'sample'")
        self.p, self.unit, self.batch_dim, self.flattened = p, unit, batch_dim, flattened
        self.key: Tensor
        self.register_buffer("key", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw another key, from torch's default generator."""
        drawn = torch.randint(1 << 62, (), device="cpu")
        # Calls are counted by it: on the CPU, as nobody should wait for a GPU; a tensor, as torch.compile would compile
        # anew for each number.
        self._name = drawn
        self.key.copy_(drawn)

    def forward(self, x: Tensor) -> Tensor:
        """Drop, in training.

        Args:
            x: Any shape of at least one dim; float16 to float64.

        Returns:
            As ``x``; the same tensor in evaluation.
        """
        if not self.training or self.p == 0:
            return x
        num_rows = x.size(self.batch_dim)
        if torch.compiler.is_compiling():
            tickets_B = _draw_outside(self._name, num_rows, self.flattened, _number_site())
        else:
            tickets_B = _draw_tickets(self._name, num_rows, self.flattened)
        keeps = decide_kept(
            tickets_B.to(x.device, non_blocking=True),
            self.key,
            self.p,
            _find_sizes(x, self.batch_dim, self.unit),
        )
        shape = [*keeps.shape, *[1] * x.dim()][: x.dim()]
        scale = 0.0 if self.p == 1 else 1 / (1 - self.p)
        # Scaled first: then only the mask, a byte for each element, is kept for the backward.
        return x.mul(scale).mul_(keeps.view(shape).movedim(0, self.batch_dim))

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows."""
        more = f", unit={self.unit!r}" if self.unit != "element" else ""
        return f"p={self.p}{more}"


def decide_kept(tickets_B: Tensor, key: Tensor, p: float, sizes: list[int]) -> Tensor:
    """Return which elements are kept; a function of its arguments alone.

    Args:
        tickets_B: int64, shape (B,): 64 random bits for each row.
        key: int64, shape (): the layer's, on the same device.
        p: Probability to be dropped.
        sizes: The other sizes of the mask; at least one.

    Returns:
        bool, shape (B, *sizes).
    """
    wide = _blend(tickets_B, key)
    for size in sizes[:-1]:
        wide = _blend(wide.unsqueeze(-1), torch.arange(1, size + 1, device=wide.device))
    # The last dim, which most of the work is for, in 32 bits: twice as fast. What is different for each row and for
    # each column is random already, and is added and mixed.
    wide.unsqueeze_(-1)
    row_B1, other_B1 = wide.to(torch.int32), (wide >> 32).to(torch.int32)
    column_E = torch.arange(1, sizes[-1] + 1, dtype=torch.int32, device=wide.device)
    column_E = column_E.mul_(_SPREAD).bitwise_xor_(column_E >> 15).mul_(_SECOND)
    mixed = row_B1 + column_E
    mixed ^= mixed >> 16
    mixed *= _FIRST
    mixed ^= mixed >> 15
    mixed *= _SECOND
    # Not compared as a product: a compiler may take it that products don't overflow, and compare the factor instead.
    mixed ^= other_B1
    return mixed >= min(round(p * 2 * _HALF) - _HALF, _HALF - 1)


def _blend(wide: Tensor, other: Tensor) -> Tensor:
    """Return 64 bits that depend on all bits of both."""
    mixed = (wide ^ other) * _WIDE_FIRST
    mixed ^= mixed >> 29
    mixed *= _WIDE_SECOND
    mixed ^= mixed >> 32
    return mixed


def _find_sizes(x: Tensor, batch_dim: int, unit: Unit) -> list[int]:
    """Return the sizes of one row's mask."""
    others = list(x.shape)
    others.pop(batch_dim)  # Dynamo of torch 2.8 can't trace `del` on a list
    if unit == "channel":
        if not others:
            raise UsageError(
                f"GlobalDropout(unit='channel') got an input of shape {tuple(x.shape)}",
                hint="it has no channels",
            )
        return others[:1]
    return (others if unit == "element" else []) or [1]


# ------------------------------------------------------------------------ which call of which sample


def _draw_tickets(name: Tensor, num_rows: int, flattened: bool) -> Tensor:  # noqa: FBT001 - as torch's operators want it
    """Return 64 random bits for each row, on the CPU, and count the call."""
    place, number = _count_call(int(name))
    num_samples = len(place.positions)
    if num_rows != num_samples and not (flattened and num_samples and num_rows % num_samples == 0):
        hint = (
            "flattened=True is for inputs with several rows for each sample"
            if not flattened
            else "as many rows for each sample"
        )
        raise UsageError(
            f"GlobalDropout got an input of {num_rows} rows, and the micro-batch at hand has {num_samples} samples",
            rank=find_rank(),
            hint=f"its dim batch_dim must be the samples', in the loader's order; {hint}",
        )
    known = ("dropout", number, num_rows if flattened else None)
    if known not in place.memo:
        positions = place.positions
        numbers = (
            torch.arange(positions.start, positions.stop, positions.step, device="cpu")
            if isinstance(positions, range)
            else torch.tensor(list(positions), dtype=torch.int64, device="cpu")
        )
        tickets = hash_numbers(numbers, derive_seed(0, "dropout", place.epoch, number))
        if flattened and num_samples:
            rows = torch.arange(1, num_rows // num_samples + 1, device="cpu")
            tickets = _blend(tickets.unsqueeze(1), rows).flatten()
        place.memo[known] = tickets
    found: Tensor = place.memo[known]
    return found


_sites = count()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def _number_site() -> int:
    """Return a number for each call in a compiled graph: equal calls would be made one, and get the same mask."""
    return next(_sites)


# Opaque to torch.compile: it runs at each call, and reads which micro-batch is at hand. On the CPU, so that no CUDA
# graph records its result.
@torch.library.custom_op("rankwise::draw_tickets", mutates_args=())  # type: ignore[untyped-decorator,unused-ignore]
def _draw_outside(name: Tensor, num_rows: int, flattened: bool, site: int) -> Tensor:  # noqa: ARG001, FBT001 - see _number_site
    return _draw_tickets(name, num_rows, flattened).clone()  # an operator may not return what it holds


@_draw_outside.register_fake  # type: ignore[untyped-decorator,unused-ignore]
def _(name: Tensor, num_rows: int, flattened: bool, site: int) -> Tensor:  # noqa: ARG001, FBT001
    return torch.empty(num_rows, dtype=torch.int64, device="cpu")


#: While activations are computed again by the leave of ``same_masks``: the place of their forward, and the calls
#: counted before it.
_recalled: tuple[Place, dict[int, int]] | None = None


def _count_call(name: int) -> tuple[Place, int]:
    """Return the place of the samples at hand, and how often the layer was called for them before."""
    if _recalled is not None:
        place, calls = _recalled
    else:
        place = current_place()
        calls = _find_calls(place)
        if (
            torch._C._current_graph_task_id() != -1
        ):  # torch.utils.checkpoint asks so as well: it is -1 outside of backward
            return place, _guess_call(calls.get(name, 0))
    number = calls.get(name, 0)
    calls[name] = number + 1
    return place, number


def _guess_call(num_calls: int) -> int:
    if num_calls == 1:
        return 0
    raise UsageError(
        f"a GlobalDropout is computed again in a backward, and its forward has run {num_calls} times for the micro-batch at hand: which one is it?",
        rank=find_rank(),
        hint="run the backward before you take the next micro-batch"
        if num_calls == 0
        else "make a layer for each call, or checkpoint(..., use_reentrant=False, context_fn=rankwise.train.dropout.same_masks)",
    )


def _find_calls(place: Place) -> dict[int, int]:
    calls: dict[int, int] = place.memo.setdefault("dropout calls", {})
    return calls


def same_masks() -> tuple[_Noting, _Recalling]:
    """Let activation checkpointing recompute a GlobalDropout as it was, also if the layer is called several times for a micro-batch.

    It is what torch's ``checkpoint(..., use_reentrant=False, context_fn=same_masks)`` takes.

    Returns:
        The contexts of the forward, and of its recomputation.
    """
    noting = _Noting()
    return noting, _Recalling(noting)


@final
class _Noting:
    """Notes which micro-batch is at hand, and the calls so far."""

    def __init__(self) -> None:
        self.noted: tuple[Place, dict[int, int]] | None = None

    def __enter__(self) -> None:
        place = find_place()
        # Inside of a checkpoint that is being computed again, what that one goes by counts.
        if _recalled is not None:
            self.noted = _recalled[0], dict(_recalled[1])
        elif place is not None:
            self.noted = place, dict(_find_calls(place))

    def __exit__(self, *_: object) -> None:
        """Nothing is to be undone."""


@final
class _Recalling:
    """Goes back there as long as it is open; it may be opened several times."""

    def __init__(self, noting: _Noting) -> None:
        self._noting = noting
        self._before: list[tuple[Place, dict[int, int]] | None] = []

    def __enter__(self) -> None:
        global _recalled  # noqa: PLW0603 - for the process: torch runs backwards in threads of its own
        self._before.append(_recalled)
        noted = self._noting.noted
        _recalled = None if noted is None else (noted[0], dict(noted[1]))

    def __exit__(self, *_: object) -> None:
        global _recalled  # noqa: PLW0603 - as above
        _recalled = self._before.pop()


# ------------------------------------------------------------------------------------- a whole model

_UNITS: dict[type[nn.Module], Unit] = {
    nn.Dropout: "element",
    nn.Dropout1d: "channel",
    nn.Dropout2d: "channel",
    nn.Dropout3d: "channel",
}


def replace_dropout(model: nn.Module, *, batch_dim: int = 0, partly: bool = False) -> nn.Module:
    """Replace each nn.Dropout, nn.Dropout1d, 2d and 3d of a model by a GlobalDropout.

    Call it on every rank with the same seed, or before ``apply_ddp``. What can't be replaced: dropout that a layer does
    inside of its own forward, as nn.MultiheadAttention (its weights) and nn.LSTM, nn.GRU, nn.RNN (between layers) do;
    nn.AlphaDropout and nn.FeatureAlphaDropout; classes derived from any of these. Calls of
    ``torch.nn.functional.dropout`` and ``scaled_dot_product_attention(dropout_p=...)`` in a forward are not seen from
    outside.

    Args:
        model: Changed in place.
        batch_dim: Which dim of these layers' inputs counts the samples.
        partly: Leave what can't be replaced as it is, instead of an error.

    Returns:
        The model; a new layer if the model is a dropout layer itself.

    Raises:
        ModelError: Some can't be replaced; nothing was changed.
    """
    foreign = [] if partly else [f"{name!r} ({type(layer).__name__})" for name, layer in _find_foreign(model)]
    if foreign:
        raise ModelError(
            f"the dropout of {len(foreign)} layer(s) can't be replaced: {', '.join(foreign[:5])}",
            rank=find_rank(),
            hint="set their dropout to 0, or write them with GlobalDropout; partly=True leaves them, and then another number of ranks is another training",
        )
    made: dict[nn.Module, nn.Module] = {}
    for owner in [nn.ModuleDict({"model": model}), *model.modules()]:
        for name, layer in owner.named_children():
            if type(layer) in _UNITS:
                if layer not in made:  # a layer that stands at several places stays one
                    made[layer] = GlobalDropout(layer.p, unit=_UNITS[type(layer)], batch_dim=batch_dim).train(
                        layer.training
                    )
                setattr(owner, name, made[layer])
    return made.get(model, model)


def _find_foreign(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    base: Any = nn.Dropout.__base__
    for name, layer in model.named_modules():
        own = getattr(layer, "dropout", 0.0) if isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) else 0.0
        is_derived = isinstance(layer, base) and type(layer) not in _UNITS and layer.p > 0
        if is_derived or own > 0:
            yield name, layer
