"""The check of a command as it would be typed, and of the scripts that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.lint.running.cache import Kept
from rankwise.lint.running.files import Outcome, find_roots, summarize
from rankwise.lint.running.one_file import Checker, Result
from rankwise.lint.shell.study import Shell, study_shell, unit_of_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.lint.running.settings import Settings


def check_command(argv: Sequence[str], settings: Settings) -> Outcome:
    """Check a command and the scripts that it names.

    Args:
        argv: Its words, as the user's shell has split them.
        settings: What is shown.

    Raises:
        UsageError: The parser for shell text is not installed.
    """
    unit, checker = unit_of_command(argv), Checker(roots=find_roots(settings.folder))
    failures = list[str]()
    found = checker.check_unit(unit, failures)
    results = [Result(path=unit.path, kept=Kept(findings=tuple(found)), failures=tuple(failures))]
    missing, shell = list[str](), study_shell(unit)
    if not (found or failures or shell.launches):
        return Outcome(notes=("no launcher in this command: nothing was checked",), num_files=1)
    num_ranks = {
        launch.script.text: launch.num_per_node or 1 for launch in shell.launches if launch.script and launch.is_elastic
    }
    for path in dict.fromkeys(find_scripts(shell)):
        if Path(path).is_file():
            results.append(checker.check(path, num_ranks.get(path, 1)))
        else:
            missing.append(f"{path}: the command starts it, and there is no such file")
    return summarize(results, settings, missing, named=[result.path for result in results])


def find_scripts(shell: Shell) -> Iterator[str]:
    """Give the Python files that the launches in a text start, by path or, of this folder's modules, by name."""
    yield from (path for path, _ in shell.scripts())
    for launch in shell.launches:
        name = launch.script.text if launch.script and launch.flag("module", "m") else None
        if name and all(part.isidentifier() for part in name.split(".")):
            base = Path(*name.split("."))
            for path in (base.with_name(f"{base.name}.py"), base / "__main__.py"):
                if path.is_file():
                    yield str(path)
                    break
