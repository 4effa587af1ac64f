"""Takes out what Gloo of torch 2.8 writes on standard output whenever ranks connect; as a program, from its standard input.

With ``python -u``, as ranks run, C++ writes such a line in pieces: those of several ranks mix, and a rank may print between them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter

#: The pieces of a line, by kind: how often a line has them, and what each looks like; a tee may write the rank in front.
_PIECES = {
    "start": (1, r"(?:\[\w+\]:)?\[Gloo\] Rank "),
    "number": (3, r"\d"),
    "is": (1, r" is connected to "),
    "peers": (1, r" peer ranks\. "),
    "expected": (1, r"Expected number of connected peer ranks is : "),
    "end": (1, r"\r?\n"),
}
_PIECE = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, (_, pattern) in _PIECES.items()))

_LEADING = re.compile(r"\d( is connected to | peer ranks\. )")


def without_gloo(text: str) -> str:
    """Return what else was written; for fewer than eleven ranks, whose numbers have one digit."""
    kept, at, end = list[str](), 0, -1
    owed: Counter[str] = Counter()
    while at < len(text):
        piece = _PIECE.match(text, at)
        kind = "" if piece is None else piece.lastgroup or ""
        if kind == "start":
            owed.update({name: number for name, (number, _) in _PIECES.items()})
        # Digits and ends of lines are Gloo's only beside another piece of a line that is not complete.
        is_alone = kind in {"number", "end"} and at != end and not _LEADING.match(text, at)
        if piece is None or not owed[kind] or is_alone:
            kept.append(text[at])
            at += 1
            continue
        owed[kind] -= 1
        at = end = piece.end()
    return "".join(kept)


if __name__ == "__main__":
    sys.stdout.write(without_gloo(sys.stdin.read()))
