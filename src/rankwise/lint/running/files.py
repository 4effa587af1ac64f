"""The check of many files: what is known already comes from the cache, the rest is shared out over processes."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rankwise.base import __version__
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.host import count_cores
from rankwise.base.similar_paths import find_near
from rankwise.lint import registry
from rankwise.lint.analyses.installed import versions
from rankwise.lint.inputs.discovery import find_files
from rankwise.lint.running.cache import Cache, digest_of
from rankwise.lint.running.check import sort_findings
from rankwise.lint.running.one_file import Checker, Result
from rankwise.lint.running.settings import pick_rules, shows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rankwise.lint.finding import Finding
    from rankwise.lint.running.settings import Settings

#: Below this much text a process costs more than it saves.
_WORTH_PROCESSES = 400_000
_CHUNK_BYTES, _CHUNK_FILES = 200_000, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check has come to.

    Attributes:
        findings: Those that are shown, in the order of files.
        notes: Files that were not looked at, and why; a line each.
        failures: What keeps the check from being whole: paths that are not there, rules that broke; a line each.
        num_files: Files that were found.
        num_checked: How many of them were looked at.
        num_cached: How many of them needed no new look.
        num_lines: Lines in them.
        seconds: How long it took.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    num_files: int = 0
    num_checked: int = 0
    num_cached: int = 0
    num_lines: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """1 where an error or a warning is shown, 2 where the check is not whole, else 0."""
        if any(one.severity != "hint" for one in self.findings):
            return 1
        return 2 if self.failures else 0


class Plan(NamedTuple):
    """How a check is done: beside the settings, what changes no finding."""

    jobs: int = 0
    cache_folder: Path | None = None


def check_files(paths: Sequence[str], settings: Settings, plan: Plan | None = None) -> Outcome:
    """Check files and folders.

    Args:
        paths: As the user named them.
        settings: What is shown.
        plan: How many processes, and where results are kept; None for as many as fit, and nowhere.
    """
    plan = plan or Plan()
    started = SYSTEM_CLOCK.monotonic()
    files, missing = find_files(paths, settings.excludes)
    roots = find_roots(settings.folder)
    cache = Cache(plan.cache_folder, _name_of_all_else(roots))
    known = {path: kept for path in files if (kept := cache.find(path)) is not None}
    results = {path: Result(path=path, kept=kept) for path, kept in known.items()}
    failures = [f"{path}: there is no such file or folder{_guess(path)}" for path in missing]
    try:
        for result in _check_all([path for path in files if path not in known], roots, plan.jobs, failures):
            results[result.path] = result
            if result.sources:
                cache.keep(result.path, result.kept, result.sources)
    finally:
        cache.save()  # also what was done until Ctrl-C
    outcome = summarize([results[path] for path in files if path in results], settings, failures, named=paths)
    return replace(outcome, num_cached=len(known), seconds=SYSTEM_CLOCK.monotonic() - started)


def _guess(path: str) -> str:
    near = find_near(Path(path))
    return f"; did you mean {near}?" if near else ""


def check_text(path: str, data: bytes, settings: Settings) -> Outcome:
    """Check what came by standard input, under the name of a file."""
    result = Checker(roots=find_roots(settings.folder)).check_data(path, data)
    return summarize([result], settings, [], named=(path,))


def summarize(
    results: Iterable[Result], settings: Settings, failures: Iterable[str], *, named: Sequence[str] = ()
) -> Outcome:
    """Put results together, and leave out what is not to be shown.

    Args:
        results: Of all files.
        settings: What is shown.
        failures: What is known to have gone wrong already.
        named: Paths that the user named: of a file among these, what it lacks is a failure, else a note.
    """
    results = tuple(results)
    rules = {rule.id: rule for rule in pick_rules(settings, registry.all_rules())}
    own = {os.path.normpath(path) for path in named}
    # What is no text is passed over in a folder; who names it means it.
    passed = {
        result.path: result.kept.note
        for result in results
        if result.kept.note and not (result.kept.findings and result.path in own)
    }
    findings = [
        one
        for result in results
        if result.path not in passed
        for one in result.kept.findings
        if one.rule in rules and shows(settings, rules[one.rule], one.severity, one.path)
    ]
    notes = [f"{path}: not looked at: {note}" for path, note in passed.items()]
    lacking: dict[str, list[str]] = {}
    for result in results:
        if result.missing:
            lacking.setdefault(result.missing, []).append(result.path)
    failed = [*failures, *(line for result in results for line in result.failures)]
    for why, paths in lacking.items():
        is_named = not own.isdisjoint(paths)
        line = f"{paths[0]}{f' and {len(paths) - 1} more' if paths[1:] else ''}: {why}"
        (failed if is_named else notes).append(line)
    return Outcome(
        findings=tuple(sort_findings(findings)),
        notes=tuple(notes),
        failures=tuple(failed),
        num_files=len(results),
        num_checked=sum(not (one.path in passed or one.missing or one.failures) for one in results),
        num_lines=sum(result.kept.num_lines for result in results),
    )


def merge(one: Outcome, other: Outcome) -> Outcome:
    """Put two outcomes together, in this order."""
    return Outcome(
        findings=tuple(dict.fromkeys((*one.findings, *other.findings))),
        notes=(*one.notes, *other.notes),
        failures=(*one.failures, *other.failures),
        num_files=one.num_files + other.num_files,
        num_checked=one.num_checked + other.num_checked,
        num_cached=one.num_cached + other.num_cached,
        num_lines=one.num_lines + other.num_lines,
        seconds=one.seconds + other.seconds,
    )


def find_roots(folder: Path) -> tuple[Path, ...]:
    """Folders from which the project's imports are tried: its own, its ``src``, and the current one."""
    candidates = (folder, folder / "src", Path.cwd())
    return tuple(dict.fromkeys(path for path in candidates if path.is_dir()))


def _name_of_all_else(roots: tuple[Path, ...]) -> str:
    """Name of all that findings depend on beside the user's files: this program, Python, libraries, and where paths begin."""
    own = Path(__file__).parents[1]
    texts = [path.read_bytes() for path in sorted(own.rglob("*.py"))]
    words = (__version__, sys.version, str(Path.cwd()), *map(str, roots), *versions())
    return digest_of("\0".join([*words, *map(digest_of, texts)]).encode())[:16]


def _check_all(paths: Sequence[str], roots: tuple[Path, ...], jobs: int, failures: list[str]) -> Iterator[Result]:
    jobs = jobs or count_cores()
    chunks = list(_cut(paths)) if jobs > 1 else []
    if len(chunks) > 1 and sum(size for _, size in chunks) >= _WORTH_PROCESSES:
        from rankwise.lint.running.pool import check_chunks  # noqa: PLC0415 - multiprocessing takes a while to import

        yield from check_chunks([paths for paths, _ in chunks], roots, min(jobs, len(chunks)), failures)
        return
    checker = Checker(roots=roots)
    for path in paths:
        yield checker.check(path)


def _cut(paths: Sequence[str]) -> Iterator[tuple[list[str], int]]:
    """Cut a list of files where enough is together; neighbours stay together, as they import the same modules."""
    chunk, size = list[str](), 0
    for path in paths:
        with contextlib.suppress(OSError):  # whoever reads it will say so
            size += os.stat(path).st_size  # noqa: PTH116 - thousands of them
        chunk.append(path)
        if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_FILES:
            yield chunk, size
            chunk, size = [], 0
    if chunk:
        yield chunk, size
