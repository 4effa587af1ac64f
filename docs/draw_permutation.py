"""Draw docs/pictures/permutation.svg: where 1024 positions lead, by a bad shuffle, by two rounds, and by all of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rankwise.data.permutation import NUM_ROUNDS, encipher, hash_numbers

if TYPE_CHECKING:
    from torch import Tensor

TARGET = Path(__file__).parent / "pictures" / "permutation.svg"
NUM_BITS, SIDE, GAP, TOP, BOTTOM = 10, 256, 24, 34, 30
SIZE = 1 << NUM_BITS


def list_panels() -> dict[str, Tensor]:
    """Return the panels: title, and where each position leads."""
    positions = torch.arange(SIZE)
    round_keys = hash_numbers(torch.arange(NUM_ROUNDS), key=1)
    return {
        "multiply and add": (positions * 389 + 77) % SIZE,
        "2 rounds": encipher(positions, NUM_BITS, round_keys[:2]),
        f"{NUM_ROUNDS} rounds": encipher(positions, NUM_BITS, round_keys),
    }


def draw_panel(number: int, title: str, samples: Tensor) -> list[str]:
    """Return the lines of one panel."""
    left = number * (SIDE + GAP)
    scale = SIDE / SIZE
    dots = "".join(
        f"M{left + position * scale:g} {TOP + SIDE - sample * scale:g}h1.8"
        for position, sample in enumerate(samples.tolist())
    )
    return [
        f'<text x="{left + SIDE / 2:g}" y="{TOP - 12}" font-weight="bold">{title}</text>',
        f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#888888"/>',
        f'<path d="{dots}" stroke="#2f6fb2" stroke-width="1.8"/>',
        f'<text x="{left + SIDE / 2:g}" y="{TOP + SIDE + 20}">position in the epoch</text>',
    ]


def render() -> str:
    """Return the picture."""
    panels = list_panels()
    width, height = len(panels) * (SIDE + GAP), TOP + SIDE + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-GAP} 0 {width + GAP} {height}" width="{width + GAP}"'
        ' font-family="system-ui, sans-serif" font-size="13" text-anchor="middle" role="img">',
        f"<title>Which of {SIZE} samples stands at which position: {', '.join(panels)}</title>",
        f'<rect x="{-GAP}" width="{width + GAP}" height="{height}" fill="#ffffff"/>',
        f'<text transform="translate(-8 {TOP + SIDE / 2:g}) rotate(-90)">sample</text>',
    ]
    for number, (title, samples) in enumerate(panels.items()):
        lines += draw_panel(number, title, samples)
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"drew {TARGET.name}")
