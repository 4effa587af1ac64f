"""The file that a user may have meant by a path that is not there."""

from __future__ import annotations

import difflib
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: A folder of data may have millions of files.
_MOST = 10_000


def find_near(path: Path) -> Path | None:
    """Return the script, or the file of the same ending, beside a path whose name is most like it; None if none is like it."""
    if not path.parent.is_dir():
        return None
    # Folder and ending are alike anyway, and say nothing of how near a name is.
    endings = {".py", path.suffix or ".py"}
    names = {one.stem: one for one in islice(path.parent.iterdir(), _MOST) if one.suffix in endings}
    near = difflib.get_close_matches(path.stem, names, n=1, cutoff=0.7)
    return names[near[0]] if near else None
