"""A GPT whose layers can be split: queries, keys and values apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, NUM_HEADS = 16, 4


class Attention(nn.Module):
    """Reshapes by its own number of heads, as most do."""

    def __init__(self, *, head_norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_dim = NUM_HEADS, WIDTH // NUM_HEADS
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(self.head_dim) if head_norm else nn.Identity()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence = x.shape[:2]
        q, k, v = (
            layer(x).view(batch, sequence, self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, *, head_norm: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(head_norm=head_norm), Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Two blocks, learned positions; with ``tied`` the head has the embedding's weight."""

    def __init__(self, vocabulary: int, sequence: int, *, tied: bool = False, head_norm: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH, padding_idx=min(13, vocabulary - 1))
        self.positions = nn.Embedding(sequence, WIDTH)
        self.blocks = nn.ModuleList([Block(head_norm=head_norm) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x = self.tokens(tokens_BS) + self.positions(torch.arange(tokens_BS.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
