"""What the launcher needs at a job's end was imported long before it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise
from clocks import FakeClock
from rankwise.launcher.late_imports import ROOMS, LateImports

_PACKAGE = Path(rankwise.__file__).parent
_FILES = [path for room in ROOMS for path in (_PACKAGE / room.replace(".", "/")).rglob("*.py")]
#: Polls too early, and then in time, and writes which modules are there each time.
_POLL = """
import json, sys
from clocks import FakeClock
from rankwise.launcher.late_imports import LateImports
clock = FakeClock()
imports = LateImports(clock)
for seconds in (4.9, 0.2):
    clock.sleep(seconds)
    imports.poll()
    print(json.dumps(sorted(sys.modules)))
"""


def test_all_rooms_are_imported_once_the_ranks_have_started() -> None:
    """Nothing while the ranks start; then each module of the rooms that a launcher uses."""
    path = f"import sys; sys.path[:0] = [{str(_PACKAGE.parent)!r}, {str(Path(__file__).parents[1])!r}]"
    done = subprocess.run([sys.executable, "-c", path + _POLL], capture_output=True, text=True, check=True)
    early, late = (set(line.strip("[]").replace('"', "").split(", ")) for line in done.stdout.splitlines())
    names = {
        ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in _FILES
    }
    assert "rankwise.verdict.first_failure" not in early
    assert names - late == set()
    assert "torch" not in late


def test_no_function_of_these_rooms_imports_another() -> None:
    """A room that a launcher's function imports at the last moment belongs to the list."""
    found = {
        node.module
        for path in _FILES
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rankwise.")
    }
    assert "rankwise.verdict.first_failure" in found
    assert {name for name in found if not name.startswith(tuple(f"rankwise.{room}" for room in ROOMS))} == set()


@pytest.mark.parametrize("error", [SyntaxError("half written"), ModuleNotFoundError("removed")])
def test_a_package_that_changes_just_now_harms_no_job(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be imported while it is replaced is left to whoever needs it, and the launcher goes on watching."""

    def fail(_: str) -> None:
        raise error

    clock = FakeClock()
    one, other = LateImports(clock), LateImports(clock)
    one._names = iter(["rankwise.verdict.case"])
    monkeypatch.setattr(importlib, "import_module", fail)
    clock.sleep(6)
    for imports in (one, other):
        imports.poll()
        imports.poll()
