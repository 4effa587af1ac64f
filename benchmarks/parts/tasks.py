"""What the contenders of benchmarks/trainer.py train: model, data, optimizer, loss; and the watch that each step passes by."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Classes of the small network's data.
_NUM_CLASSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a GPT is.

    Attributes:
        vocabulary: How many words.
        context: Words of a sample.
    """

    vocabulary: int
    context: int
    width: int
    num_layers: int
    num_heads: int


SMALL = Size(vocabulary=256, context=32, width=64, num_layers=2, num_heads=2)
TINY = Size(vocabulary=64, context=16, width=32, num_layers=2, num_heads=2)
#: 26 million parameters, and activations that are small beside them.
WIDE = Size(vocabulary=2048, context=16, width=512, num_layers=8, num_heads=8)
#: 124 million parameters, the embedding counted once, as it is the last layer too.
LARGE = Size(vocabulary=50304, context=1024, width=768, num_layers=12, num_heads=12)


# B batch, S sequence, D width, H heads, V vocabulary
class Block(nn.Module):
    """Attention to what came before, and a small network for each place."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.to_qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Add both to the stream."""
        qkv = self.to_qkv(self.norm_1(x_BSD)).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in qkv)
        mixed_BHSD = scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(mixed_BHSD.transpose(1, 2).flatten(2))
        added: Tensor = x_BSD + self.mlp(self.norm_2(x_BSD))
        return added


class GPT(nn.Module):
    """Says of each place which word comes next."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.num_layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.words.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, words_BS: Tensor) -> Tensor:
        """Return logits, shape (B, S, V)."""
        places_S = torch.arange(words_BS.shape[1], device=words_BS.device)
        x_BSD = self.words(words_BS) + self.places(places_S)
        logits_BSV: Tensor = self.head(self.norm(self.blocks(x_BSD)))
        return logits_BSV


@dataclass(slots=True)
class Watch:
    """Takes the time of blocks of steps; every contender's loss function passes by it.

    Attributes:
        block: Steps of a block.
        device: Where the steps are computed.
        pause: Called between two blocks; its time does not count.
        blocks: Wall and CPU seconds of a step, the mean of each block.
        peak_bytes: The most memory of the GPU in each block.
        held_bytes: What the rank has of the parameters and of the states of the optimizer, after the first block.
    """

    block: int
    device: torch.device
    pause: Callable[[], None] | None = None
    blocks: list[tuple[float, float]] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    held_bytes: int = 0
    _held: tuple[Any, Any] | None = None
    _steps: int = 0
    _begun: tuple[float, float] = (0.0, 0.0)

    def note(self, model: Any, optimizer: Any) -> None:
        """Hear what is trained, so that what it holds can be counted."""
        self._held = (model, optimizer)

    def mark(self) -> None:
        """Note that a step begins."""
        number, self._steps = self._steps, self._steps + 1
        if number % self.block:
            return
        wall, cpu = self._look()
        if number and self._held is not None:
            self.held_bytes, self._held = count_held(*self._held), None
        if number:
            self.blocks.append(((wall - self._begun[0]) / self.block, (cpu - self._begun[1]) / self.block))
        if self.device.type == "cuda":
            self.peak_bytes += [torch.cuda.max_memory_allocated(self.device)] if number else []
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.pause is not None:
            self.pause()
        self._begun = self._look()

    def _look(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            # A GPU works behind the program's back: its time is known only where it is waited for.
            torch.cuda.synchronize(self.device)
        return time.perf_counter(), time.process_time()


def count_held(model: Any, optimizer: Any) -> int:
    """Return the bytes of this rank's parts of the parameters and of the states of the optimizer; a tensor of both, or of two names, once."""
    states = getattr(optimizer, "optim", optimizer).state.values()
    tensors = [*model.parameters(), *(one for state in states for one in state.values())]
    local = [getattr(one, "_local_tensor", one) for one in tensors if isinstance(one, Tensor)]
    return sum({one.data_ptr(): one.nbytes for one in local}.values())


@dataclass(slots=True)
class Readings:
    """What one contender has shown on one rank: seconds of a step in each round, and the most memory of its GPU.

    Attributes:
        wall: Wall time.
        CPU: CPU time of the process.
        peak_bytes: 0 without a GPU.
        held_bytes: The rank's part of parameters and states; 0 where nobody has said what is trained.
    """

    wall: list[float] = field(default_factory=list)
    CPU: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    held_bytes: int = 0

    def add(self, watch: Watch, *, num_warm: int) -> None:
        """Take what a watch has seen, but for the first blocks."""
        for wall, cpu in watch.blocks[num_warm:]:
            self.wall.append(wall)
            self.CPU.append(cpu)
        self.peak_bytes = max(self.peak_bytes, *watch.peak_bytes[num_warm:], 0)
        self.held_bytes = max(self.held_bytes, watch.held_bytes)


class Items(Dataset[tuple[Tensor, ...]]):
    """The same samples as a data set of one's own gives them, one by one: nobody can see that nothing in it is drawn at random."""

    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(self.tensors[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, the same by every contender.

    Attributes:
        model: "mlp", "gpt", "tiny", "wide" or "124M".
        optimizer: "sgd" or "adamw".
        fused: Whether the optimizer is asked to run as one kernel.
        batch: Samples of a step on each rank.
        steps: Steps of a training: one epoch.
        world_size: How many ranks.
        precision: "fp32", or "bf16" for mixed precision.
        compiler: The backend of torch.compile; None: the model is not compiled.
        is_own_data: Whether the data set is a class of one's own, and not torch's TensorDataset.
        log_every: Steps between two reports.
        spread: How the model is spread over the ranks: "ddp", or a name of `parts/spreads.py`.
        device_type: Of the ranks.
    """

    model: str
    optimizer: str
    fused: bool
    batch: int
    steps: int
    world_size: int
    precision: str = "fp32"
    compiler: str | None = None
    is_own_data: bool = False
    log_every: int = 50
    spread: str = "ddp"
    device_type: str = "cpu"

    @property
    def size(self) -> Size | None:
        """How large the GPT is; None for the small network."""
        return {"mlp": None, "gpt": SMALL, "tiny": TINY, "wide": WIDE, "124M": LARGE}[self.model]

    @property
    def tensor_degree(self) -> int:
        """How many ranks share the work of each layer, and so have the same samples."""
        return {"tp": self.world_size, "tp-fsdp": 2}.get(self.spread, 1)

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.batch * self.world_size // self.tensor_degree

    @property
    def terms(self) -> int:
        """Terms that a sample adds to a sum-reduced loss."""
        return self.size.context if self.size else 1

    def build_model(self) -> nn.Module:
        """Build the model, alike on all ranks; not compiled, on the CPU."""
        torch.manual_seed(0)
        if self.size:
            return GPT(self.size)
        return nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Linear(32, _NUM_CLASSES)
        )  # fmt: skip

    def build_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Build the optimizer."""
        chosen = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[self.optimizer]
        return chosen(parameters, lr=1e-3, fused=True if self.fused else None)

    def build_data(self) -> Dataset[tuple[Tensor, ...]]:
        """Build the data of one epoch: as many samples as all steps of all ranks take."""
        tensors = self._build_tensors()
        return Items(tensors) if self.is_own_data else tensors

    def _build_tensors(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        number = self.steps * self.global_batch
        if self.size:
            shape = (number, self.size.context + 1)
            words = torch.randint(self.size.vocabulary, shape, generator=generator)
            return TensorDataset(words[:, :-1], words[:, 1:])
        inputs = torch.randn(number, 32, generator=generator)
        return TensorDataset(inputs, torch.randint(_NUM_CLASSES, (number,), generator=generator))

    def compute_loss(self, watch: Watch, model: Any, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Begin a step: forward, and loss."""
        watch.mark()
        outputs = model(x)
        return cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction=reduction)
