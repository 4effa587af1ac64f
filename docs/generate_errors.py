"""Write docs/reference/errors.md from the table of error texts, the real texts of its tests, and the quotes of the failure classes."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli.error_text import AT_FAULT
from rankwise.cli.pages import find_page, quotes_of
from rankwise.verdict.error_meanings import MEANINGS, find_meaning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.verdict.error_meanings import Meaning

DOCS = Path(__file__).parent
TARGET = DOCS / "reference" / "errors.md"
sys.path[:0] = [str(DOCS), str(DOCS.parent / "tests")]
from generated_pages import find_anchors  # noqa: E402 - a file beside this one

from error_texts import REAL  # noqa: E402 - a file of the tests

_HEAD = """\
# Troubleshooting by error message

Search this page for the line that torch, NCCL, Gloo, the launcher or Python printed (numbers, paths and names will differ): it says which rank to look at, and what to do.

On the terminal, `rankwise rule` does the same for a line that you paste:

```console
$ rankwise rule 'RuntimeError: Address already in use'
RuntimeError: Address already in use
  at fault  the rank that printed it
  do        remove the fixed port from the script: ...
...
I9: the port is taken
...
```

and for a whole log, with the causes first and what only followed from them below:

```console
$ echo '[rank1]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:32967: Connection reset by peer.' > job.log
$ echo '[rank0]: RuntimeError: CUDA error: invalid device ordinal' >> job.log
$ rankwise rule < job.log
line 2: [rank0]: RuntimeError: CUDA error: invalid device ordinal
  at fault  the rank that printed it, rank 0
  do        take the device from LOCAL_RANK, ...
...
line 1: [rank1]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:32967: Connection reset by peer.
  at fault  another rank, ...
...
```

A job that `rankwise run` has started needs neither: its report names the rank that failed first, and what to do. [Failure classes](failure-classes.md) has all classes, also those that print nothing.

This page is made from the table that the reports use (`make docs`).
"""
#: The sections for texts that do not belong to one mistake.
_SECTIONS = {
    "peer": "A rank lost another one",
    "timeout": "A rank waited in vain",
    "mismatch": "The ranks' calls differ",
}
_LONGEST_TEXT = 400


def find_texts() -> dict[Meaning, list[str]]:
    """Return the real texts of each entry of the table. Errors of our own are left out: they say what to do.

    Raises:
        ValueError: An entry has none.
    """
    texts: dict[Meaning, list[str]] = {}
    for text, _, _ in REAL:
        if meaning := find_meaning(text):
            texts.setdefault(meaning, []).append(text)
    others = [meaning for meaning in MEANINGS if meaning.fix is not None]
    if missing := [meaning.pattern.pattern for meaning in others if meaning not in texts]:
        raise ValueError(f"no real text in tests/error_texts.py for {missing}")
    return {meaning: texts[meaning] for meaning in others}


def _read_titles() -> dict[str, tuple[str, str]]:
    """Return the chapter and the title of each failure class."""
    chapter, titles = "", {}
    for line in (DOCS / "reference" / "failure-classes.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            chapter = line[3:]
        elif found := re.fullmatch(r"### ([A-Z]\d{1,2}): (.*)", line):
            titles[found[1]] = (chapter, found[2])
    return titles


def _shorten(text: str) -> str:
    """Return a text as one line, without its stack or its list of reasons."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]} ..."


def _write_entry(title: str, members: list[tuple[Meaning, list[str]]], link: str) -> Iterator[str]:
    at_fault, advice = AT_FAULT[members[0][0].blame]
    yield from ("", f"### {title}", "", f"**At fault:** {at_fault}.{f' [More]({link}).' if link else ''}")
    for fix, same in groupby(members, key=lambda each: each[0].fix):
        yield ""
        yield from (f"    {_shorten(text)}" for _, texts in same for text in texts)
        yield from ("", f"**Do:** {fix or advice}.")


def _write_sections(anchors: dict[str, str]) -> Iterator[str]:
    texts, titles = find_texts(), _read_titles()

    def section(meaning: Meaning) -> str:
        own = titles[meaning.class_id][0] if meaning.class_id else "Processes and hardware"
        return _SECTIONS.get(meaning.blame, own)

    order = [*_SECTIONS.values(), *dict.fromkeys(chapter for chapter, _ in titles.values())]
    entries = sorted(texts.items(), key=lambda each: order.index(section(each[0])))
    for name, members in groupby(entries, key=lambda each: section(each[0])):
        yield from ("", f"## {name}")
        for _, same in groupby(members, key=lambda each: each[0].class_id or each[0].fix):
            group = list(same)
            meaning, (text, *_) = group[0]
            id_ = meaning.class_id
            title = f"{id_}: {titles[id_][1]}" if id_ else _title_of(text, meaning)
            yield from _write_entry(title, group, f"failure-classes.md#{anchors[id_]}" if id_ else "")


def _title_of(text: str, meaning: Meaning) -> str:
    """Return what the error says, without its type and numbers."""
    if meaning.blame == "peer":
        return "the connection to another rank was lost"
    said = re.sub(r"^[\w.]+Error: ", "", text.partition("\n")[0])
    return re.split(r"(?: after \d+.*)|[,.] ", said)[0]


def _write_quoted(anchors: dict[str, str]) -> Iterator[str]:
    """Yield a table of what only the failure classes quote."""
    rows = [
        (quote, id_, title)
        for id_, (_, title) in _read_titles().items()
        for quote in quotes_of(f"{find_page(id_)}\n\n")
        if not find_meaning(quote) and not find_meaning(f"rankwise.HandshakeError: {quote}")
    ]
    yield from ("", "## Other texts", "", "| text | may be |", "|---|---|")
    for quote, id_, title in sorted(rows, key=lambda row: row[0].lower()):
        yield f"| `{quote.replace('|', chr(92) + '|')}` | [{id_}: {title}](failure-classes.md#{anchors[id_]}) |"


def render() -> str:
    """Return the page."""
    anchors = find_anchors()
    return "\n".join([_HEAD.rstrip(), *_write_sections(anchors), *_write_quoted(anchors)]) + "\n"


def main() -> None:
    """Write the page."""
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
