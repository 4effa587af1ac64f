"""Ranks in a sentence: ``rank 3``, or ``ranks 0-2, 7``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def name_ranks(ranks: Sequence[int], most: int | None = 12, *, noun: str = "rank") -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5, 6``; of very many apart from each other ``512 ranks (0, 2, 4, … 1022)``.

    Args:
        ranks: In any order.
        most: So many runs are named in full; None for all of them, where the text must tell ranks apart.
        noun: What is numbered, where it is no rank.
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    if most is not None and len(texts) > most:
        return f"{len(ranks)} {noun}s ({', '.join(texts[: most // 2])}, … {texts[-1]})"
    return f"{noun}{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
