"""Pages of the documentation on the terminal: what a report or a probe names, by that name."""

from __future__ import annotations

import difflib
import re

from rankwise.doctor import registry
from rankwise.lint.registry import docs_folder

_LINK = re.compile(r"\[([^\]\n]+)\]\([^)\n]+\)")
_SEEN = re.compile(r"\*\*You see:\*\* (.*?)\n\n", re.DOTALL)
_QUOTE = re.compile(r"(`+) ?(.+?) ?\1")
_ENTRY = re.compile(r"^### ([A-Z]\d{1,2}): .*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)


def find_page(name: str) -> str | None:
    """Return the page of a verdict's rule, a failure class or a probe, as Markdown without links.

    Args:
        name: ``mispaired_gradients``, ``D14``, ``gloo-variables``; in any case, and with dashes or underscores.

    Returns:
        The page; None if there is none of that name.
    """
    _, text = _read_pages().get(_fold(name), ("", None))
    return None if text is None else _LINK.sub(r"\1", text)


def find_close(name: str) -> list[str]:
    """Return at most three names of pages that may be meant."""
    pages = _read_pages()
    return [pages[one][0] for one in difflib.get_close_matches(_fold(name), pages, n=3, cutoff=0.75)]


def list_names() -> list[str]:
    """List the names of all pages."""
    return sorted(name for name, _ in _read_pages().values())


def quotes_of(page: str) -> list[str]:
    """Return the texts that a failure class's page says are seen: not the flags, names and variables that it speaks of."""
    seen = _SEEN.search(page)
    quotes = [quote for _, quote in _QUOTE.findall(" ".join(seen[1].split()))] if seen else []
    return [
        quote
        for quote in quotes
        if (" " in quote or re.fullmatch(r"\w+Error|[A-Z]{5,}", quote)) and not quote.startswith(("-", "rankwise "))
    ]


def find_quoting(text: str) -> tuple[str, ...]:
    """Return the failure classes whose pages quote a text, or a part of it; numbers may differ."""
    flat = " ".join(text.split())
    return tuple(
        name
        for name, page in _read_pages().values()
        if any(re.search(_quote_pattern(quote), flat) for quote in quotes_of(page))
    )


def _quote_pattern(quote: str) -> str:
    """Return the pattern of a quote: dots stand for anything, and a number for any number but that of a signal."""
    pattern = re.escape(quote.strip(". …")).replace(r"\ :", r" ?:")
    if not re.search("signal|exitcode", quote, re.IGNORECASE):
        pattern = re.sub(r"\d+", r"\\d+", pattern)
    return re.sub(r"\\\.\\\.\\\.|…", ".{0,300}?", pattern) + r"(?!\w)"


def _fold(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _read_pages() -> dict[str, tuple[str, str]]:
    """Return the names and the pages."""
    folder = docs_folder()
    if folder is None:
        return {}
    pages = {
        _fold(path.stem): (path.stem, path.read_text(encoding="utf-8"))
        for path in (folder / "rules").glob("*.md")
        if path.stem != "README"
    }
    pages |= {
        _fold(one.id): (one.id, f"# {one.id}: {one.title}\n\n{registry.page(one)}") for one in registry.all_probes()
    }
    classes = (folder / "reference" / "failure-classes.md").read_text(encoding="utf-8")
    return pages | {_fold(entry[1]): (entry[1], entry[0][2:]) for entry in _ENTRY.finditer(classes)}
