"""What was found in a file, kept until the file, a module that it imports, or a rule changes.

All of it is one JSON file for one set of rules. Whatever goes wrong with the cache, the check goes on without it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.files import write_atomic
from rankwise.lint.finding import Edit, Finding, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by `rankwise check`; it may be deleted at any time.\n"
_MOST_ENTRIES, _MOST_INDEXES = 50_000, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is kept of one file: what was found, why it was not looked at, how long it is."""

    findings: tuple[Finding, ...]
    note: str = ""
    num_lines: int = 0


def digest_of(data: bytes) -> str:
    """Short name of a content."""
    return blake2b(data, digest_size=12).hexdigest()


def digest_file(path: str) -> str:
    """Short name of a file's content; empty if there is no such file."""
    try:
        return digest_of(Path(path).read_bytes())
    except OSError:
        return ""


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
        self._entries: dict[str, dict[str, Any]] = {}
        self._now: dict[str, str] = {}
        self._is_changed = False
        if self._file is not None:
            try:
                found = json.loads(self._file.read_text(encoding="utf-8"))
                for path, entry in found["entries"].items():
                    self._entries[path] = {**entry, "sources": [found["sources"][at] for at in entry["sources"]]}
            except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
                self._entries = {}

    def find(self, path: str) -> Kept | None:
        """Return what is known of a file (as the user named it), if all that it depends on is unchanged."""
        entry = self._entries.get(path)
        if entry is None:
            return None
        try:
            for source in entry["sources"]:
                if source not in self._now:
                    self._now[source] = digest_file(source)
            if _combine(self._now[source] for source in entry["sources"]) != entry["digest"]:
                return None
            findings = tuple(_from_json(one) for one in entry["findings"])
            return Kept(findings=findings, note=entry["note"], num_lines=entry["num_lines"])
        except (TypeError, ValueError, KeyError, IndexError):
            return None

    def keep(self, path: str, kept: Kept, sources: Mapping[str, str]) -> None:
        """Remember what was found in a file, and what that depends on: the digests of files by absolute path."""
        self._entries.pop(path, None)  # so that the newest come last
        self._entries[path] = {
            "sources": list(sources),
            "digest": _combine(sources.values()),
            **dataclasses.asdict(kept),
        }
        self._is_changed = True

    def save(self) -> None:
        """Write it down, if there is something new; a folder that can't be written is left alone."""
        if self._folder is None or self._file is None or not self._is_changed:
            return
        entries = dict(list(self._entries.items())[-_MOST_ENTRIES:])
        used = dict.fromkeys(source for entry in entries.values() for source in entry["sources"])
        number = {source: at for at, source in enumerate(used)}
        numbered = {
            path: {**entry, "sources": [number[one] for one in entry["sources"]]} for path, entry in entries.items()
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, content in (("CACHEDIR.TAG", _TAG), (".gitignore", "*\n")):
                if not (self._folder / name).exists():
                    write_atomic(self._folder / name, content)
            write_atomic(self._file, json.dumps({"sources": list(used), "entries": numbered}, separators=(",", ":")))
            # What older rules have left.
            indexes = sorted(self._folder.glob("check-*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in indexes[:-_MOST_INDEXES]:
                path.unlink(missing_ok=True)
        except OSError:
            return


def _combine(digests: Iterable[str]) -> str:
    return digest_of(",".join(digests).encode())


def _from_json(row: dict[str, Any]) -> Finding:
    also = tuple((text, path, Span(**span)) for text, path, span in row["also"])
    edits = tuple(Edit(span=Span(**edit["span"]), text=edit["text"]) for edit in row["edits"])
    return Finding(**{**row, "span": Span(**row["span"]), "also": also, "edits": edits})
