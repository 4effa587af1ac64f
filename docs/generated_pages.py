"""What the scripts share that write pages from docstrings: anchors of the failure classes, and a folder that holds these pages only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCS = Path(__file__).parent
_CLASSES = DOCS / "reference" / "failure-classes.md"


def find_anchors() -> dict[str, str]:
    """Return where each failure class is explained."""
    heads = re.findall(r"^### (([A-Z]\d{1,2}): .*)$", _CLASSES.read_text(encoding="utf-8"), re.MULTILINE)
    return {id_: re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head, id_ in heads}


def write_pages(target: Path, pages: Mapping[str, str]) -> None:
    """Write pages by their names, and remove those that are gone."""
    target.mkdir(exist_ok=True)
    for path in target.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (target / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(pages)} pages to {target.relative_to(DOCS.parent)}")
