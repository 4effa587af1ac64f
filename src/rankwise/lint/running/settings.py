"""What a project wants to be told: `[tool.rankwise.check]` in its pyproject.toml, and the flags of one run."""

from __future__ import annotations

import difflib
import fnmatch
import re
import sys
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.base.findings import Severity
    from rankwise.lint.rule import Rule

_RANKS: dict[str, int] = {"error": 0, "warning": 1, "hint": 2}
_KEYS = ("select", "ignore", "extend-select", "per-file-ignores", "exclude", "severity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which findings are shown.

    Attributes:
        select: Rules by id, beginning of an id (``RW1``), name or ``ALL``; empty: all.
        ignore: Rules that are not shown.
        extend_select: Rules beside those of ``select``.
        per_file_ignores: Patterns of paths, and the rules not shown there.
        exclude: Patterns of paths that a search leaves out.
        severity: The mildest that is shown; a rule selected by its own id or name is shown whatever it is.
        folder: Where the settings were found: patterns of paths are relative to it.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    per_file_ignores: dict[str, tuple[str, ...]] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    severity: Severity = "warning"
    folder: Path = field(default_factory=Path.cwd)

    def excludes(self, path: Path) -> bool:
        """Whether a search leaves a path out."""
        return any(_fits(path, pattern, self.folder) for pattern in self.exclude)


def load_settings(start: Path) -> Settings:
    """Read the settings that hold in a folder: of the nearest pyproject.toml that speaks of rankwise.

    Raises:
        UsageError: They have a key or a value that is not known.
    """
    here = start.resolve()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and (table := _find_table(path)) is not None:
            return _to_settings(table, path)
    return Settings(folder=here if here.is_dir() else here.parent)


def load_settings_file(path: Path) -> Settings:
    """Read the settings of one file, which must have some.

    Raises:
        UsageError: It can't be read, or has no table for us.
    """
    if not path.is_file():
        raise UsageError(f"--config {path}: there is no such file")
    table = _find_table(path)
    if table is None:
        raise UsageError(f"--config {path} has no table [tool.rankwise.check]")
    return _to_settings(table, path.resolve())


def override(
    settings: Settings,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    extend_select: Sequence[str] = (),
    severity: Severity | None = None,
) -> Settings:
    """Put a run's flags over a project's settings: a selection takes the old one's place, the others add."""
    return replace(
        settings,
        select=tuple(select) or settings.select,
        extend_select=(*(() if select else settings.extend_select), *extend_select),
        ignore=(*settings.ignore, *ignore),
        severity=severity or settings.severity,
    )


def check_selectors(settings: Settings, rules: Iterable[Rule[Any]]) -> None:
    """See to it that every selector means a rule; what is ignored may also be a rule of an earlier version.

    Raises:
        UsageError: One does not; it says what may have been meant.
    """
    rules = tuple(rules)
    known = [name for rule in rules for name in (rule.id, rule.name)]
    ignored = [*settings.ignore, *(word for words in settings.per_file_ignores.values() for word in words)]
    for word in [*settings.select, *settings.extend_select, *ignored]:
        folded = word.upper() if word.upper().startswith("RW") else word.lower()
        near = difflib.get_close_matches(folded, known, n=1, cutoff=0.8)
        is_of_old = word in ignored and (not near or re.fullmatch(r"RW\d{3}", folded))
        if not is_of_old and not any(_means(word, rule) for rule in rules):
            hint = f"did you mean {near[0]}?" if near else "`rankwise rules` lists them"
            raise UsageError(f"{word!r} is neither a rule nor the start of a rule's id", hint=hint)


def pick_rules(settings: Settings, rules: Iterable[Rule[Any]]) -> tuple[Rule[Any], ...]:
    """Return the rules that can have something to show."""
    words = (*settings.select, *settings.extend_select) if settings.select else ()
    picked = [rule for rule in rules if not words or any(_means(word, rule) for word in words)]
    return tuple(rule for rule in picked if not _is_ignored(rule, settings.ignore, words))


def shows(settings: Settings, rule: Rule[Any], severity: Severity, path: str) -> bool:
    """Whether a finding is shown.

    Args:
        settings: What the project wants.
        rule: The rule that found it; one of those picked.
        severity: How bad it is.
        path: The file as the user named it.
    """
    named = (*settings.select, *settings.extend_select)
    if _RANKS[severity] > _RANKS[settings.severity] and not any(_names(word, rule) for word in named):
        return False
    for pattern, words in settings.per_file_ignores.items():
        if any(_means(word, rule) for word in words) and _fits(Path(path), pattern, settings.folder):
            return False
    return True


def _is_ignored(rule: Rule[Any], ignore: Sequence[str], selected: Sequence[str]) -> bool:
    """As in other checkers: of two selectors that contradict each other, the closer one wins."""
    ignored = max((_closeness(word) for word in ignore if _means(word, rule)), default=-1)
    chosen = max((_closeness(word) for word in selected if _means(word, rule)), default=-1)
    return ignored >= 0 and ignored >= chosen


def _closeness(word: str) -> int:
    if word.upper() == "ALL":
        return 0
    return len(word) if re.fullmatch(r"[A-Za-z]+\d*", word) else 99


def _means(word: str, rule: Rule[Any]) -> bool:
    if word.upper() == "ALL" or word.lower() == rule.name:
        return True
    return re.fullmatch(r"[A-Za-z]+\d*", word) is not None and rule.id.startswith(word.upper())


def _names(word: str, rule: Rule[Any]) -> bool:
    return word.upper() == rule.id or word.lower() == rule.name


def _fits(path: Path, pattern: str, folder: Path) -> bool:
    """Whether a path, or a folder above it, is what a pattern means: a name, or a path below the settings' folder."""
    try:
        relative = PurePosixPath((Path.cwd() / path).relative_to(folder).as_posix())
    except ValueError:
        relative = PurePosixPath(path.as_posix().lstrip("/"))
    pattern = pattern.rstrip("/").removeprefix("./")
    if "/" not in pattern:
        return any(fnmatch.fnmatchcase(part, pattern) for part in relative.parts)
    wholes = (relative, *relative.parents)
    return any(fnmatch.fnmatchcase(str(one), wanted) for one in wholes for wanted in _spellings(pattern))


def _spellings(pattern: str) -> tuple[str, ...]:
    # `**/` may stand for no folder at all, which fnmatch does not know.
    return (pattern, pattern.replace("**/", ""))


def _find_table(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}", hint="use --isolated to do without it") from None
    if "rankwise" not in text:
        return None
    found = _parse_toml(text, path)
    for key in ("tool", "rankwise", "check"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _parse_toml(text: str, path: Path) -> Any:
    try:
        # By name: Python 3.10 has only the package of the same make.
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise UsageError(
            f"{path} may have settings for rankwise, and Python 3.10 can't read TOML",
            hint="pip install tomli, or use --isolated to do without the file",
        ) from None
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}", hint="mend it, or use --isolated to do without it") from None


def _to_settings(table: dict[str, Any], path: Path) -> Settings:
    for key in table:
        if key not in _KEYS:
            near = difflib.get_close_matches(key.replace("_", "-"), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_KEYS)}"
            raise UsageError(f"{path}: [tool.rankwise.check] has no key {key!r}", hint=hint)
    severity = table.get("severity", "warning")
    if severity not in _RANKS:
        raise UsageError(f"{path}: severity = {severity!r} is not one of error, warning, hint")
    ignores = table.get("per-file-ignores", {})
    if not isinstance(ignores, dict):
        raise UsageError(f"{path}: per-file-ignores is to be a table of patterns, each with a list of rules")
    return Settings(
        select=_to_words(table, "select", path),
        ignore=_to_words(table, "ignore", path),
        extend_select=_to_words(table, "extend-select", path),
        per_file_ignores={pattern: _to_words(ignores, pattern, path) for pattern in ignores},
        exclude=_to_words(table, "exclude", path),
        severity=severity,
        folder=path.parent,
    )


def _to_words(table: dict[str, Any], key: str, path: Path) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise UsageError(f'{path}: {key} = {value!r} is to be a list of words, like ["RW101"]')
    return tuple(value)
