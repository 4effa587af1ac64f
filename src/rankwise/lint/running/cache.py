"""What was found in a file, kept until the file, a module that it imports, or a rule changes.

All of it is one JSON file for one set of rules. A file whose size and time are as they were is not even read.
Whatever goes wrong with the cache, the check goes on without it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.files import write_atomic
from rankwise.lint.finding import Edit, Finding, Span

if TYPE_CHECKING:
    from collections.abc import Iterable

_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by `rankwise check`; it may be deleted at any time.\n"
#: A file that was changed in the last moments before a save may change again within one tick of its clock.
_TOO_YOUNG_NS = 2_000_000_000
_MOST_ENTRIES, _MOST_INDEXES = 50_000, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that a result depends on, as it was when it was read.

    Attributes:
        path: Absolute.
        size: In bytes; -1 if there was no such file.
        mtime_ns: When it was last changed.
        digest: Of its content; empty if there was no such file.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is kept of one file: what was found, why it was not looked at, how long it is."""

    findings: tuple[Finding, ...]
    note: str = ""
    num_lines: int = 0


def look_at(path: str, data: bytes | None = None) -> Source:
    """Tell what a file is like now.

    Args:
        path: Absolute.
        data: Its content, if it was read already.
    """
    try:
        reported = os.stat(path)  # noqa: PTH116 - thousands of them
        content = Path(path).read_bytes() if data is None else data
    except OSError:
        return Source(path=path, size=-1, mtime_ns=0, digest="")
    return Source(path=path, size=reported.st_size, mtime_ns=reported.st_mtime_ns, digest=digest_of(content))


def digest_of(data: bytes) -> str:
    """Short name of a content."""
    return blake2b(data, digest_size=12).hexdigest()


@final
class Cache:
    """Results of earlier runs with the same rules."""

    def __init__(self, folder: Path | None, key: str) -> None:
        """Load what there is.

        Args:
            folder: Where it is kept; None keeps nothing.
            key: Name of all that results depend on beside files.
        """
        self._folder, self._file = folder, None if folder is None else folder / f"check-{key}.json"
        self._sources: dict[str, Source] = {}
        self._entries: dict[str, list[Any]] = {}
        self._now: dict[str, str] = {}
        self._saved_ns, self._is_changed = 0, False
        self._load()

    def find(self, path: str) -> Kept | None:
        """Return what is known of a file (as the user named it), if all that it depends on is unchanged."""
        entry = self._entries.get(path)
        if entry is None:
            return None
        try:
            sources, digest, num_lines, note, findings = entry
            if _combine(self._digest_now(source) for source in sources) != digest:
                return None
            return Kept(findings=tuple(_from_json(path, one) for one in findings), note=note, num_lines=num_lines)
        except (TypeError, ValueError, KeyError, IndexError):
            return None

    def keep(self, path: str, kept: Kept, sources: Iterable[Source]) -> None:
        """Remember what was found in a file, and what that depends on."""
        sources = tuple(sources)
        for source in sources:
            self._sources[source.path] = source
            self._now.setdefault(source.path, source.digest)
        self._entries.pop(path, None)  # so that the newest come last
        self._entries[path] = [
            [source.path for source in sources],
            _combine(source.digest for source in sources),
            kept.num_lines,
            kept.note,
            [_to_json(one) for one in kept.findings],
        ]
        self._is_changed = True

    def save(self, now_ns: int) -> None:
        """Write it down, if there is something new; a folder that can't be written is left alone.

        Args:
            now_ns: The time.
        """
        if self._folder is None or self._file is None or not self._is_changed:
            return
        entries = dict(list(self._entries.items())[-_MOST_ENTRIES:])
        used = dict.fromkeys(path for entry in entries.values() for path in entry[0])
        number = {path: at for at, path in enumerate(used)}
        sources = [self._sources.get(path) or look_at(path) for path in used]
        text = json.dumps(
            {
                "saved_ns": now_ns,
                "sources": [[one.path, one.size, one.mtime_ns, one.digest] for one in sources],
                "entries": {path: [[number[one] for one in entry[0]], *entry[1:]] for path, entry in entries.items()},
            },
            separators=(",", ":"),
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, content in (("CACHEDIR.TAG", _TAG), (".gitignore", "*\n")):
                if not (self._folder / name).exists():
                    write_atomic(self._folder / name, content)
            write_atomic(self._file, text)
            _drop_old(self._folder)
        except OSError:
            return

    def _load(self) -> None:
        if self._file is None:
            return
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            rows = [
                Source(path=path, size=size, mtime_ns=mtime, digest=digest)
                for path, size, mtime, digest in found["sources"]
            ]
            names = [row.path for row in rows]
            entries = {path: [[names[at] for at in entry[0]], *entry[1:]] for path, entry in found["entries"].items()}
            saved_ns = int(found["saved_ns"])
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return
        self._sources, self._entries, self._saved_ns = {row.path: row for row in rows}, entries, saved_ns

    def _digest_now(self, path: str) -> str:
        """The digest of a file's content now; it is read only if its size or time tells that it may have changed."""
        if (known := self._now.get(path)) is not None:
            return known
        before = self._sources.get(path)
        digest = None
        try:
            reported = os.stat(path)  # noqa: PTH116 - thousands of them
        except OSError:
            digest = ""
        else:
            is_old = reported.st_mtime_ns < self._saved_ns - _TOO_YOUNG_NS
            if (
                before is not None
                and is_old
                and (reported.st_size, reported.st_mtime_ns) == (before.size, before.mtime_ns)
            ):
                digest = before.digest
        if digest is None:
            self._sources[path] = now = look_at(path)
            digest, self._is_changed = now.digest, True
        self._now[path] = digest
        return digest


def _combine(digests: Iterable[str]) -> str:
    return digest_of(",".join(digests).encode())


def _drop_old(folder: Path) -> None:
    """Remove what older rules have left."""
    indexes = sorted(folder.glob("check-*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in indexes[:-_MOST_INDEXES]:
        path.unlink(missing_ok=True)


def _to_json(one: Finding) -> list[Any]:
    also = [[text, path, _numbers(span)] for text, path, span in one.also]
    edits = [[_numbers(edit.span), edit.text] for edit in one.edits]
    return [
        one.rule,
        one.failure_class,
        one.severity,
        one.message,
        one.fix,
        _numbers(one.span),
        one.cell,
        also,
        edits,
    ]


def _from_json(path: str, row: list[Any]) -> Finding:
    rule, failure_class, severity, message, fix, span, cell, also, edits = row
    return Finding(
        rule=rule,
        failure_class=failure_class,
        severity=severity,
        message=message,
        fix=fix,
        path=path,
        span=Span(*span),
        cell=cell,
        also=tuple((text, where, Span(*numbers)) for text, where, numbers in also),
        edits=tuple(Edit(span=Span(*numbers), text=text) for numbers, text in edits),
    )


def _numbers(span: Span) -> list[int]:
    return [span.line, span.col, span.end_line, span.end_col]
