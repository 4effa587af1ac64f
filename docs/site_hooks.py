"""What the site does with a page before it is built: links that lead out of docs/ become plain words, as the site has no clone around it."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]\n]*)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's Markdown; called by mkdocs."""
    folder = posixpath.dirname(page.file.src_uri)

    def keep(link: re.Match[str]) -> str:
        leads_out = posixpath.normpath(posixpath.join(folder, link[2].partition("#")[0])).startswith("..")
        return link[1] if leads_out else link[0]

    return _LINK.sub(keep, markdown)
