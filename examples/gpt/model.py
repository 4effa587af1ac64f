"""A small GPT: a decoder-only transformer that predicts the next token, here a byte (Radford et al., 2019)."""

# Shape letters: B batch, S sequence, N tokens of a batch, D width, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from data import IGNORED
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

#: How many tokens there are: the values of a byte.
NUM_BYTES = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a model is.

    Attributes:
        layers: How many blocks.
        width: Numbers that stand for one token.
        heads: Heads of each attention; they divide the width.
        context: Tokens that the model sees at once.
        vocabulary: Rows of the table of tokens; bytes need the first 256.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = NUM_BYTES


SIZES = {
    "small": Size(layers=3, width=128, heads=4, context=64),
    # The smallest GPT-2, with its vocabulary rounded up to a multiple of 128, so that speeds can be compared with others'.
    "124M": Size(layers=12, width=768, heads=12, context=1024, vocabulary=50304),
}


@final
class Attention(nn.Module):
    """Let each token look at itself and at those before it, in several heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.enter = nn.Linear(size.width, 3 * size.width, bias=False)
        self.leave = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return what each token has gathered, shape (B, S, D)."""
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.enter(x_BSD).chunk(3, dim=2)
        )
        gathered = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.leave(gathered.transpose(1, 2).flatten(2))


@final
class Block(nn.Module):
    """Attention, then two linear layers for each token by itself; both are added to what was there."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(size.width, bias=False), Attention(size)
        self.norm_2 = nn.LayerNorm(size.width, bias=False)
        self.widen = nn.Linear(size.width, 4 * size.width, bias=False)
        self.leave = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the tokens after this block, shape (B, S, D)."""
        x_BSD = x_BSD + self.attention(self.norm_1(x_BSD))
        return x_BSD + self.leave(F.gelu(self.widen(self.norm_2(x_BSD)), approximate="tanh"))


@final
class GPT(nn.Module):
    """The whole model; the table of tokens serves at both ends (Press and Wolf, arXiv:1608.05859)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added up over all blocks begins smaller, as in GPT-2: the sum would grow with their number.
                depth = (2 * size.layers) ** -0.5 if "leave" in name else 1.0
                # Close to GPT-2's 0.02 at its width; narrower layers learn faster with more.
                nn.init.normal_(parameter, std=0.5 * size.width**-0.5 * depth)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return a score for each possible next token, shape (B, S, V)."""
        places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.tokens(tokens_BS) + self.places(places_S)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        # Not a Linear that shares the table: a checkpoint would hold the table twice.
        return F.linear(self.norm(x_BSD), self.tokens.weight)


def sum_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all tokens that count, and their number.

    Args:
        model: A GPT, wrapped or not.
        batch: Tokens and those that follow them, both of shape (B, S).
    """
    tokens_BS, targets_BS = batch
    scores_NV, targets_N = model(tokens_BS).flatten(0, 1), targets_BS.flatten()
    loss = F.cross_entropy(scores_NV, targets_N, ignore_index=IGNORED, reduction="sum")
    return loss, (targets_N != IGNORED).sum()


def make_optimizer(model: nn.Module, *, lr: float) -> torch.optim.Optimizer:
    """Return AdamW that lets matrices decay, and leaves the scales of the norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def generate(model: GPT, prompt: str, *, num_bytes: int, seed: int = 0, temperature: float = 0.7) -> str:
    """Go on writing where a prompt ends.

    Args:
        model: Not wrapped in DDP; its mode stays as it was.
        prompt: What to begin with.
        num_bytes: How much to write.
        seed: Of the choice among likely bytes.
        temperature: Below 1, likely bytes are taken more often than the model says.

    Returns:
        The prompt and what follows it; bytes that are no UTF-8 appear as a replacement character.
    """
    was_training = model.training
    model.eval()
    device = model.tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens_BS = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(num_bytes):
        scores_BV = model(tokens_BS[:, -model.size.context :])[:, -1, :NUM_BYTES].float()
        chances_BV = (scores_BV / temperature).softmax(dim=1)
        tokens_BS = torch.cat([tokens_BS, torch.multinomial(chances_BV, 1, generator=generator)], dim=1)
    model.train(was_training)
    return bytes(tokens_BS[0].tolist()).decode("utf-8", errors="replace")
