"""What `--fix` changes in files: their texts before and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.lint.running import text_edits
from rankwise.lint.running.files import find_roots, summarize
from rankwise.lint.running.one_file import Checker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rankwise.lint.finding import Finding
    from rankwise.lint.running.settings import Settings


def mend_files(findings: Iterable[Finding], settings: Settings) -> Iterator[text_edits.Mended]:
    """Give the files that have something to mend; nothing is written.

    Args:
        findings: Those that are shown; of what is not shown nothing is mended.
        settings: What is shown.
    """
    checker = Checker(roots=find_roots(settings.folder))

    def check(path: str, data: bytes) -> Sequence[Finding]:
        return summarize([checker.check_data(path, data)], settings, []).findings

    for path in dict.fromkeys(one.path for one in findings if one.edits):
        try:
            data = Path(path).read_bytes()
        except OSError:
            continue  # a command has no file
        mended = text_edits.mend(path, data, check)
        if mended is not None and mended.after != mended.before:
            yield mended
