"""The check of one file: read, find, and tell what that depends on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import RankwiseError
from rankwise.lint import registry
from rankwise.lint.finding import Finding
from rankwise.lint.inputs.reading import read_file
from rankwise.lint.program import Project
from rankwise.lint.rules import unparsed as unreadable
from rankwise.lint.running.cache import Kept, digest_file, digest_of
from rankwise.lint.running.check import check_unit, sort_findings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.code_unit import CodeUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came out of one file.

    Attributes:
        path: As the user named it.
        kept: What was found, and what may be kept for the next run.
        sources: What that depends on, digests of files by absolute path; empty if it must not be kept.
        failures: What went wrong in ourselves.
        missing: What has to be installed to check it; empty if nothing.
    """

    path: str
    kept: Kept
    sources: dict[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    missing: str = ""


@dataclass(slots=True)
class Checker:
    """What looks at files, one after the other: modules that they share are read once."""

    roots: tuple[Path, ...]
    _project: Project = field(init=False)
    _digests: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._project = Project(roots=self.roots)

    def check(self, path: str, num_ranks: int = 1) -> Result:
        """Read a file and find the mistakes in it.

        Args:
            path: The file.
            num_ranks: How many processes of it a command starts.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            return Result(path=path, kept=Kept(findings=()), failures=(f"{path}: it can't be read: {error.strerror}",))
        return self.check_data(path, data, num_ranks)

    def check_data(self, path: str, data: bytes, num_ranks: int = 1) -> Result:
        """Find the mistakes in a file whose content was read already."""
        reading = read_file(path, data)
        findings, failures, missing = list[Finding](), list[str](), ""
        if reading.unparsed is not None:
            findings.append(unreadable.tell(path, reading.unparsed))
        self._project.read, self._project.searched = set(), set()
        for unit in reading.units:
            try:
                findings += self.check_unit(replace(unit, num_ranks=num_ranks), failures)
            except RankwiseError as error:
                missing = str(error)
        kept = Kept(findings=tuple(sort_findings(findings)), note=reading.note, num_lines=reading.num_lines)
        sources = dict[str, str]()
        if not failures and not missing:
            sources = {os.path.abspath(path): digest_of(data), **dict(self._digest_read())}  # noqa: PTH100 - keeps links
        return Result(path=path, kept=kept, sources=sources, failures=tuple(failures), missing=missing)

    def check_unit(self, unit: CodeUnit, failures: list[str] | None) -> list[Finding]:
        """Find the mistakes in a piece."""
        return check_unit(unit, self._project, registry.all_rules(), failures)

    def _digest_read(self) -> Iterator[tuple[str, str]]:
        for name in sorted(map(os.path.abspath, self._project.read | self._project.searched)):
            if name not in self._digests:
                self._digests[name] = digest_file(name)
            yield name, self._digests[name]
