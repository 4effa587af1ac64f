"""Which Python runs the ranks: ours if it has torch, else the project's own.

The launcher needs no torch and may live in an environment of its own (uvx, pipx) beside the project's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.environ import get
from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST_TORCH = (2, 8)
_ASK = """
import sys, importlib.util as u
s = u.find_spec("torch")
print(s.origin if s else "")
print(int(sys.flags.no_site or sys.flags.ignore_environment or sys.implementation.name != "cpython"
          or sys.version_info < (3, 10)))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python for the ranks.

    Attributes:
        torch_version: As torch states it; None if it has no torch.
        is_ours: Whether it is the launcher's own.
        can_warm: Whether a warm server can be made of it: CPython 3.10 that looks at PYTHONPATH (no -S, -E, -I).
        is_wrapper: Whether it is a script around a Python, which may do something else for each rank.
    """

    path: str
    torch_version: str | None
    is_ours: bool = True
    can_warm: bool = True
    is_wrapper: bool = False


def find_own() -> Interpreter:
    """Return this very Python: what was pickled here is read by the same version."""
    spec = find_spec("torch")
    return Interpreter(path=sys.executable, torch_version=_read_version(spec.origin if spec else None))


def find_interpreter(*, needs_torch: bool = True) -> Interpreter:
    """Choose the ranks' Python: PYTHON_EXEC, ours, the active environment's, the project's, the one on PATH.

    Args:
        needs_torch: Whether to refuse one without torch.

    Raises:
        UsageError: None has torch, or it is older than 2.8.
    """
    chosen = _choose()
    if chosen.torch_version is None:
        if not needs_torch:
            return chosen
        raise UsageError(
            f"there is no torch in {chosen.path}",
            hint="pip install 'rankwise[torch]', in the environment of your script; or set PYTHON_EXEC to its python",
        )
    found = re.match(r"(\d+)\.(\d+)", chosen.torch_version)
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        raise UsageError(
            f"torch {chosen.torch_version} in {chosen.path} is too old: 2.8 or newer is needed",
            hint="pip install --upgrade torch",
        )
    return chosen


def _choose() -> Interpreter:
    if named := get("PYTHON_EXEC"):
        return _ask(named)
    ours = find_own()
    if ours.torch_version is not None:
        return ours
    for path in _list_others():
        other = _ask(path)
        if other.torch_version is not None:
            return other
    return ours


def _list_others() -> Iterator[str]:
    name = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    for folder in (get("VIRTUAL_ENV"), get("CONDA_PREFIX"), ".venv", "venv"):
        path = Path(folder, name)
        # Compared as written: the pythons of all virtual environments are links to one file.
        if folder and path.exists() and str(path.absolute()) != sys.executable:
            yield str(path.absolute())
    for command in ("python", "python3"):
        if path_found := shutil.which(command):
            yield path_found


def _ask(python: str) -> Interpreter:
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python} can't be run: {error}", hint="check PYTHON_EXEC") from error
    origin, _, is_closed = asked.stdout.strip().rpartition("\n")
    version = _read_version(origin.strip().rpartition("\n")[2] or None)
    return Interpreter(
        path=python,
        torch_version=version,
        is_ours=False,
        can_warm=is_closed.strip() == "0",
        is_wrapper=_is_script(python),
    )


def _is_script(python: str) -> bool:
    try:
        with Path(shutil.which(python) or python).open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def _read_version(origin: str | None) -> str | None:
    """Read torch's version beside its ``__init__.py``, without importing it."""
    if origin is None:
        return None
    try:
        text = Path(origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"__version__ = '([^']+)'", text)
    return found[1] if found else None
