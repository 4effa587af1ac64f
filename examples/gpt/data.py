"""The text to learn: the source of Python's standard library, which every machine with Python has, or a file of yours.

A token is a byte, so nothing has to be learned or downloaded before the training. The files stand one behind the other in one
flat tensor, and a sample is a *window* of it: ``context`` bytes, and for each of them the byte that follows. A window never
reaches into the next file. The last one of a file is therefore shorter, which is why the loss counts tokens and not samples.
"""

# Shape letters: N bytes of the whole text, W windows, S sequence.

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch.utils.data import Dataset

#: A target with this value does not count, as torch's cross_entropy has it.
IGNORED = -100
#: Every so many files, one is held out.
HOLD_OUT_EVERY = 40


@final
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """All windows of some pieces of a text.

    Args:
        text_N: The bytes of all files.
        pieces: Where each file of this set begins in the text, and where it ends.
        context: Bytes of a window.
        at_most: How many windows there are at most, the first ones; None: all.
    """

    def __init__(
        self, text_N: Tensor, pieces: list[tuple[int, int]], context: int, *, at_most: int | None = None
    ) -> None:
        self.text_N, self.context = text_N, context
        # The last byte of a file has no byte behind it that could be its target.
        begins = [torch.arange(begin, end - 1, context) for begin, end in pieces]
        self.begins_W = torch.cat(begins)[:at_most]
        self.ends_W = torch.cat(
            [(one + context + 1).clamp(max=end) for one, (_, end) in zip(begins, pieces, strict=True)]
        )

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.begins_W)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of a window and those that follow them, each of shape (S,); what is missing counts nothing."""
        piece = self.text_N[int(self.begins_W[index]) : int(self.ends_W[index])].long()
        inputs_S = torch.zeros(self.context, dtype=torch.long)
        targets_S = torch.full((self.context,), IGNORED)
        inputs_S[: len(piece) - 1], targets_S[: len(piece) - 1] = piece[:-1], piece[1:]
        return inputs_S, targets_S


def load_windows(context: int, *, file: Path | None = None, num_held_out: int | None = None) -> tuple[Windows, Windows]:
    """Read the text, the same on every rank.

    Args:
        context: Bytes of a window.
        file: A file to read in place of the standard library; it is mapped into memory, so it may be large.
        num_held_out: Windows to evaluate on, at most; None: all that are held out.

    Returns:
        The windows to train on and those held out: every fortieth file of the library, or the last fortieth of ``file``.
    """
    if file is not None:
        size = file.stat().st_size
        cut = size - size // HOLD_OUT_EVERY
        text_N = torch.from_file(str(file), dtype=torch.uint8, size=size)
        return (
            Windows(text_N, [(0, cut)], context),
            Windows(text_N, [(cut, size)], context, at_most=num_held_out),
        )
    # Sorted by name: a folder's own order differs from machine to machine.
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    sources = [source for path in paths if len(source := path.read_bytes()) > 1]
    text_N = torch.frombuffer(bytearray(b"".join(sources)), dtype=torch.uint8)
    ends = torch.tensor([len(source) for source in sources]).cumsum(0).tolist()
    pieces = list(zip([0, *ends], ends, strict=False))
    held_out = pieces[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]
    train = [piece for piece in pieces if piece not in held_out]
    return Windows(text_N, train, context), Windows(text_N, held_out, context, at_most=num_held_out)
