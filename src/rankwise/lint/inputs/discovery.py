"""Which files a check looks at: those that are named, and what a folder holds."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.lint.inputs.reading import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Folders that hold other people's code, or what was made of one's own.
_SKIPPED = frozenset(
    """.git .hg .svn .tox .nox node_modules __pycache__ build dist site-packages .ipynb_checkpoints .rankwise_cache
    .mypy_cache .ruff_cache .pytest_cache .eggs""".split()  # noqa: SIM905
)
_GIT_S = 10.0
_SEPARATOR = re.escape(os.sep)


def find_files(paths: Sequence[str], excludes: Callable[[Path], bool]) -> tuple[list[str], list[str]]:
    """Find the files to check.

    Args:
        paths: Files and folders as the user named them; a file that is named is checked whatever it is called.
        excludes: Tells what a search leaves out.

    Returns:
        The files, each once, folders in order of name; and the paths that are not there.
    """
    found, missing = dict[str, None](), list[str]()
    for path in paths:
        if Path(path).is_dir():
            found.update(dict.fromkeys(sorted(_search(path, excludes), key=_order)))
        elif Path(path).exists():
            found[os.path.normpath(path)] = None
        else:
            missing.append(path)
    return list(found), missing


def _search(folder: str, excludes: Callable[[Path], bool]) -> Iterator[str]:
    names = _ask_git(folder)
    for name in names if names else _walk(folder):
        if os.path.splitext(name)[1].lower() not in SUFFIXES or _is_skipped(name):  # noqa: PTH122 - thousands of them
            continue
        path = os.path.normpath(os.path.join(folder, name))  # noqa: PTH118 - as above
        # Git also tells files that are deleted, and links to folders.
        if not excludes(Path(path)) and os.path.isfile(path):  # noqa: PTH113 - as above
            yield path


def _order(path: str) -> list[str]:
    """A folder's files stand together, whatever a dot or a dash in a name sorts like."""
    return re.split(_SEPARATOR, path)


def _is_skipped(name: str) -> bool:
    return any(
        part in _SKIPPED or part.startswith((".venv", "venv.")) or part == "venv"
        for part in re.split(_SEPARATOR, name)[:-1]
    )


def _walk(folder: str) -> Iterator[str]:
    """Give the files below a folder, by their paths from there; links to folders are not followed."""
    for here, folders, files in os.walk(folder):
        base = os.path.relpath(here, folder)
        folders[:] = sorted(
            name
            for name in folders
            if not _is_skipped(f"{name}{os.sep}") and not os.path.isfile(os.path.join(here, name, "pyvenv.cfg"))  # noqa: PTH113, PTH118 - as above
        )
        yield from (name if base == "." else os.path.join(base, name) for name in files)  # noqa: PTH118 - as above


def _ask_git(folder: str) -> list[str]:
    """What git does not ignore below a folder; nothing where git can't tell, or ignores all of it."""
    here = Path(folder).resolve()
    if not any((above / ".git").exists() for above in (here, *here.parents)):
        return []
    # A repository's own settings may name a program to be run as file monitor: nothing of the user's is run here.
    command = [
        "git",
        "-c",
        "core.fsmonitor=false",
        "-c",
        "core.hooksPath=/dev/null",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    try:
        reported = subprocess.run(command, cwd=folder, capture_output=True, timeout=_GIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [os.fsdecode(name).replace("/", os.sep) for name in reported.split(b"\0") if name]
