"""Small models, written as public code writes them: what may be cut into stages is tried on these."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, WORDS, LENGTH, SAMPLES = 8, 11, 6, 4


def take_vectors(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(SAMPLES, *shape, dtype=torch.float64),)


def take_words(number: int = 1) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randint(WORDS, (SAMPLES, LENGTH)) for _ in range(number))


def take_square(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean square distance of all that a model returns from 0.3."""
    found = model(*batch)
    parts = list(found) if isinstance(found, (tuple, list)) else [found]
    return sum((one - 0.3).square().mean() for one in parts)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batches, and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Any] = take_square


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def build_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def build_named_sequence() -> nn.Module:
    return nn.Sequential(OrderedDict(fc1=nn.Linear(WIDTH, 16), act=nn.Tanh(), drop=nn.Dropout(0.0), fc2=nn.Linear(16, 3)))  # fmt: skip


class LeNet(nn.Module):
    """Functional calls between layers, as in torch's tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(24, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.relu(self.conv2(x))
        x = torch.flatten(x, 1)
        x = functional.dropout(functional.relu(self.fc1(x)), 0.0, self.training)
        return self.fc2(x)


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(24, 10), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(10, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class UNet(nn.Module):
    """Skip connections from the way down to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)])
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)])
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for one in self.down:
            x = functional.relu(one(x))
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = functional.relu(self.middle(x))
        for one in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = functional.relu(one(torch.cat([x, skips.pop()], 1)))
        return self.last(x)


class ViT(nn.Module):
    """A class token and positions that the model holds itself; the head takes one token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.dropout = nn.Dropout(0.0)
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(4)]
        self.blocks = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.dropout(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.c_attn(x).chunk(3, -1))
        if rotary is not None:
            q, k = (rotate(one, *rotary) for one in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: Any = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, rotary)
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """As nanoGPT: a ModuleDict, tied weights, and the loss in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([GptBlock() for _ in range(4)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class FunctionalHead(nn.Module):
    """The head is the embedding's weight, in a functional call; embeddings are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([GptBlock() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * math.sqrt(WIDTH) + self.position
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)


class MaskedBert(nn.Module):
    """The mask is computed first, and every block is given it; the pooler takes the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.segment = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.ModuleList([GptBlock() for _ in range(3)])
        self.pooler, self.classifier = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        mask = (tokens != 0)[:, None, None, :]
        mask = mask | torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        x = self.norm(self.word(tokens) + self.segment(segments % 2))
        for layer in self.layer:
            x = layer(x, mask=mask)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class Rotary(nn.Module):
    """Rotary tables as buffers, sliced by the forward."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(2 * LENGTH), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", angles.cos().double())
        self.register_buffer("sin", angles.sin().double(), persistent=False)
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): GptBlock() for number in range(4)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        rotary = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers.values():
            h = layer(h, rotary=rotary)
        return self.output(self.norm(h)).double()


class RotaryModule(nn.Module):
    """Tables from a module of their own, that takes the hidden state for its dtype, as in transformers."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.tensor([1.0, 0.1]).double(), persistent=False)

        @torch.no_grad()
        def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            angles = positions[:, None].to(x.dtype) * self.inv_freq
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(WORDS, WIDTH), self.Tables()
        self.layers, self.head = nn.ModuleList([GptBlock() for _ in range(3)]), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        rotary = self.rotary(x, torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, rotary=rotary)
        return self.head(x)


class InPlace(nn.Module):
    """In-place operations at every place where it could be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            x += number
            x.mul_(0.5)
        return x


class Attributes(nn.Module):
    """The forward reads what blocks say of themselves."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.linear, self.is_scaled, self.number = nn.Linear(WIDTH, WIDTH), number % 2 == 0, number

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return torch.tanh(self.linear(x)) * scale

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = (
            nn.ModuleList([self.Block(number) for number in range(4)]),
            nn.Linear(WIDTH, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, 2.0 if block.is_scaled else 1.0 + block.linear.weight.shape[0])
        return self.head(x)


class TwoStreams(nn.Module):
    """Blocks with two inputs and two outputs, as reversible and graph networks have them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            a = a + torch.tanh(self.f(b))
            return a, b + torch.tanh(self.g(a))

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([self.Block() for _ in range(4)]), nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), self.right(x)
        for block in self.blocks:
            a, b = block(a, b)
        return self.head(torch.cat([a, b], -1))


class TwoHeads(nn.Module):
    """A tuple is returned: of the end, and of the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])
        self.policy, self.value = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.policy(x), self.value(x)


class HiddenStates(nn.Module):
    """All hidden states are kept and mixed in the end, as in DenseNet-like and ELMo-like models."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])
        self.mix = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        states = [self.stem(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return (torch.stack(states, -1) * self.mix.softmax(0)).sum(-1)


class LongResidual(nn.Module):
    """A residual over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(*[Residual() for _ in range(4)])
        self.tail = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.tail(self.body(x) + x)


class InputEverywhere(nn.Module):
    """Every block is given the model's input again, and a condition that a layer has computed from it (as diffusion models do)."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.modulate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor, condition: Tensor, raw: Tensor) -> Tensor:
            scale, shift = self.modulate(condition).chunk(2, -1)
            return x + torch.tanh(self.linear(x) * (1 + scale) + shift) + raw

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([self.Block() for _ in range(3)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        raw, condition = x, self.time(t.expand(-1, WIDTH))
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, condition, raw)
        return self.head(x)


class Experts(nn.Module):
    """A mixture of experts with a router; its balance loss goes along."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.router(x).softmax(-1)
            top, index = weights.topk(2, -1)
            gates = torch.zeros_like(weights).scatter(-1, index, top)
            out = sum(gates[..., number, None] * torch.tanh(one(x)) for number, one in enumerate(self.experts))
            return x + out, weights.mean(tuple(range(weights.dim() - 1))).square().sum()

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks, self.head = nn.ModuleList([self.Block() for _ in range(4)]), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(tokens), torch.zeros((), dtype=torch.float64)
        for block in self.blocks:
            x, own = block(x)
            balance = balance + own
        return self.head(x), balance


class Translator(nn.Module):
    """Encoder and decoder: every block of the decoder takes what the encoder has returned."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"dropout": 0.0, "batch_first": True}
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 16, **options) for _ in range(2)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(WIDTH, 2, 16, **options) for _ in range(2)])
        self.generator = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.source(source), self.target(target)
        for layer in self.encoder:
            memory = layer(memory)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        return self.generator(x)


class TorchTransformer(nn.Module):
    """torch's own nn.Transformer between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, 0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(target.shape[1]).double()
        return self.out(self.transformer(self.embed(source), self.embed(target), tgt_mask=mask))


class Recurrent(nn.Module):
    """LSTMs one above the other, which return tuples with their states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[:, -1])


class SharedBlock(nn.Module):
    """One block, called again and again (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(WIDTH, WIDTH), Residual(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class Reversed(nn.Module):
    """The model holds its blocks, and what is around them, in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])
        self.embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Autoencoder(nn.Module):
    """Two Sequentials, noise in the middle that is of no size here, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        noise = torch.randn_like(mean) * 0
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


class BatchNorms(nn.Module):
    """BatchNorm between layers, with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12)
        self.fc2, self.bn2 = nn.Linear(12, 12), nn.BatchNorm1d(12, affine=False)
        self.fc3 = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.fc1(x)))
        return self.fc3(functional.relu(self.bn2(self.fc2(x))))


class Keywords(nn.Module):
    """A dict is returned, arguments have names, and a mask has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(WORDS, WIDTH), nn.ModuleList([GptBlock() for _ in range(2)])
        self.score = nn.Linear(WIDTH, WORDS)

    def forward(self, *, input_ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        hidden = self.wte(input_ids)
        for block in self.h:
            hidden = block(hidden, mask=mask)
        return {"logits": self.score(hidden), "hidden": hidden}


def take_keyword_loss(model: nn.Module, batch: Any) -> Tensor:
    found = model(input_ids=batch[0])
    return functional.cross_entropy(found["logits"].flatten(0, 1), batch[0].flatten()) + found["hidden"].square().mean()


class Checkpointed(nn.Module):
    """Blocks run under torch's activation checkpointing, called by the forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Residual() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def take_causal_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss that a causal model of transformers computes itself, by its logits."""
    logits = model(input_ids=batch[0], use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def take_sequence_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits = model(input_ids=batch[0], decoder_input_ids=batch[1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[0].flatten())


def take_bert_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits = model(input_ids=batch[0], attention_mask=(batch[1] > 0).long()).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[0].flatten())


def from_transformers(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return build


_SIZES: Any = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip
CASES = {
    "mlp": Case(build_mlp, take_vectors(WIDTH)),
    "named sequence": Case(build_named_sequence, take_vectors(WIDTH)),
    "lenet": Case(LeNet, take_vectors(1, 10, 10)),
    "vgg": Case(Vgg, take_vectors(1, 8, 8)),
    "resnet": Case(ResNet, take_vectors(3, 8, 8)),
    "unet": Case(UNet, take_vectors(1, 8, 8)),
    "vit": Case(ViT, take_vectors(1, 8, 8)),
    "nanogpt": Case(NanoGpt, take_words(2)),
    "functional head": Case(FunctionalHead, take_words()),
    "bert": Case(MaskedBert, take_words(2)),
    "rotary": Case(Rotary, take_words()),
    "rotary module": Case(RotaryModule, take_words()),
    "in place": Case(InPlace, take_vectors(WIDTH)),
    "attributes": Case(Attributes, take_vectors(WIDTH)),
    "two streams": Case(TwoStreams, take_vectors(WIDTH)),
    "two heads": Case(TwoHeads, take_vectors(WIDTH)),
    "hidden states": Case(HiddenStates, take_vectors(WIDTH)),
    "long residual": Case(LongResidual, take_vectors(WIDTH)),
    "input everywhere": Case(InputEverywhere, lambda: (*take_vectors(WIDTH)(), *take_vectors(1)())),
    "experts": Case(Experts, take_words()),
    "translator": Case(Translator, take_words(2)),
    "nn.Transformer": Case(TorchTransformer, take_words(2)),
    "lstm": Case(Recurrent, take_words()),
    "shared block": Case(SharedBlock, take_vectors(WIDTH)),
    "reversed": Case(Reversed, take_vectors(WIDTH)),
    "autoencoder": Case(Autoencoder, take_vectors(WIDTH)),
    "batch norm": Case(BatchNorms, take_vectors(WIDTH)),
    "keywords": Case(Keywords, take_words(), take_keyword_loss),
    "checkpointed": Case(Checkpointed, take_vectors(WIDTH)),
}  # fmt: skip
TRANSFORMERS = {
    "llama": Case(from_transformers("LlamaForCausalLM", "LlamaConfig", **_SIZES, num_key_value_heads=1), take_words(), take_causal_loss),
    "gpt2": Case(from_transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0), take_words(), take_causal_loss),
    "bert of transformers": Case(from_transformers("BertForMaskedLM", "BertConfig", **_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), take_words(2), take_bert_loss),
    "t5": Case(from_transformers("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=WIDTH, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0), take_words(2), take_sequence_loss),
    "opt": Case(from_transformers("OPTForCausalLM", "OPTConfig", vocab_size=WORDS, hidden_size=WIDTH, word_embed_proj_dim=WIDTH, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=LENGTH, dropout=0.0, pad_token_id=0), take_words(), take_causal_loss),
    "mixtral": Case(from_transformers("MixtralForCausalLM", "MixtralConfig", **_SIZES, num_key_value_heads=1, num_local_experts=4, experts_implementation="eager"), take_words(), take_causal_loss),
}  # fmt: skip
