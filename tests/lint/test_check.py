"""The check of pieces and of many files: places, comments, rules that break, processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.lint import registry
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.finding import Edit, Finding, Found, Span
from rankwise.lint.program import Project
from rankwise.lint.rule import Rule
from rankwise.lint.running import check as check_module
from rankwise.lint.running.check import check_unit
from rankwise.lint.running.files import Outcome, Plan, check_files, check_text
from rankwise.lint.running.settings import Settings
from rankwise.lint.running.text_edits import mend_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script


def _mark(script: Script) -> Iterator[Found]:
    """One finding on each line that calls `mark`, which is mended to `done`."""
    for number, line in enumerate(script.unit.lines, start=1):
        if (at := line.find("mark(")) >= 0:
            span = Span(number, at + 1, number, at + 5)
            yield Found(span, "marked", "drop it", edits=[Edit(span=span, text="done")])


def _break(script: Script) -> Iterator[Found]:
    if "fragile" in script.unit.code:
        raise ValueError("too bad")
    return iter(())


MARK: Rule[Script] = Rule(
    id="RW101", name="marked", severity="error", classes=("C1",), summary="", look=_mark, needs_ranks=False
)
FRAGILE: Rule[Script] = Rule(
    id="RW102", name="fragile", severity="hint", classes=(), summary="", look=_break, needs_ranks=False
)


@pytest.fixture
def few_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the two rules above are there, so that a test's text has the findings that it means."""
    monkeypatch.setattr(registry, "all_rules", lambda: (MARK, FRAGILE, check_module.unreadable.text_is_not_python))


def _places(findings: Any) -> list[tuple[int, int, int | None]]:
    return [(one.span.line, one.span.col, one.cell) for one in findings]


def test_findings_stand_at_their_place_in_the_file() -> None:
    """Spans, other places and edits are those of the page, after the cut indent."""
    unit = CodeUnit(path="a.md", language="python", code="\nimport torch\nmark()\n", indents={3: 4}, is_fragment=True)
    (found,) = check_unit(unit, Project(), (MARK,))
    assert (found.span, found.edits[0].span) == (Span(3, 5, 3, 9), Span(3, 5, 3, 9))


def test_a_comment_silences_before_the_place_is_changed() -> None:
    """Comments are read in the code that was analysed, whatever the file looks like."""
    unit = CodeUnit(
        path="a.ipynb",
        language="python",
        code="import torch\nmark()  # noqa: RW101\nmark()\n",
        cells=((1, 1), (2, 1), (2, 2)),
    )
    assert _places(check_unit(unit, Project(), (MARK,))) == [(2, 1, 2)]


def test_text_without_ranks_has_findings_only_if_broken() -> None:
    """A text that has nothing to do with several processes is parsed, and that is all."""
    assert check_unit(CodeUnit(path="a.py", language="python", code="mark()"), Project(), (MARK,)) == []
    (found,) = check_unit(CodeUnit(path="a.py", language="python", code="x =\n"), Project(), ())
    assert (found.rule, found.severity, found.span.line) == ("RW901", "error", 1)


def test_a_broken_text_has_one_finding() -> None:
    """Python 2 gives its one finding with the place, which a comment may silence."""
    code = "import torch\nprint 'rank'\nmark()\n"
    assert [
        one.rule for one in check_unit(CodeUnit(path="a.py", language="python", code=code), Project(), (MARK,))
    ] == ["RW901"]
    silenced = code.replace("'rank'", "'rank'  # noqa: RW901")
    assert check_unit(CodeUnit(path="a.py", language="python", code=silenced), Project(), (MARK,)) == []


def test_a_rule_that_breaks_takes_no_other_with_it() -> None:
    """The other rules' findings stay, and the failure is a line with rule, file and cause; without a list it is raised."""
    unit = CodeUnit(path="a.py", language="python", code="import torch\nmark('fragile')\n")
    failures: list[str] = []
    assert len(check_unit(unit, Project(), (FRAGILE, MARK), failures)) == 1
    assert failures == ["RW999 internal: rule RW102 failed on a.py: ValueError: too bad; please report it"]
    with pytest.raises(ValueError, match="too bad"):
        check_unit(unit, Project(), (FRAGILE, MARK))


def test_exit_codes() -> None:
    """1 for an error or a warning, 2 if something could not be checked, 0 for hints and nothing."""

    def one(severity: Any) -> Finding:
        return Finding(
            rule="RW1",
            failure_class="",
            severity=severity,
            message="",
            fix="",
            path="a",
            span=Span(1, 1, 1, 1),
        )

    assert Outcome().exit_code == 0
    assert Outcome(findings=(one("hint"),)).exit_code == 0
    assert Outcome(findings=(one("warning"),), failures=("x",)).exit_code == 1
    assert Outcome(failures=("x",)).exit_code == 2


@pytest.mark.usefixtures("few_rules")
def test_many_files(tmp_path: Path) -> None:
    """Findings of all files come in order, what is missing and what is no text is told, the settings choose."""
    (tmp_path / "b.py").write_text("import torch\nmark()\n")
    (tmp_path / "a.py").write_text("import torch\nmark()\nmark()\n")
    (tmp_path / "c.py").write_bytes(b"\0")
    outcome = check_files([str(tmp_path), "nowhere"], Settings())
    assert [(Path(one.path).name, one.span.line) for one in outcome.findings] == [
        ("a.py", 2),
        ("a.py", 3),
        ("b.py", 2),
    ]
    assert outcome.failures == ("nowhere: there is no such file or folder",)
    assert "NUL" in outcome.notes[0]
    assert (outcome.num_files, outcome.num_lines) == (3, 5)
    assert outcome.num_checked == 2
    assert check_files([str(tmp_path)], Settings(ignore=("RW101",))).findings == ()


@pytest.mark.usefixtures("few_rules")
@pytest.mark.parametrize(
    ("data", "line", "word"), [("x = 1".encode("utf-16"), 1, "UTF-16"), (b"x\n\0y", 2, "NUL byte")]
)
def test_a_named_script_that_is_no_text_is_a_finding(data: bytes, line: int, word: str, tmp_path: Path) -> None:
    """Python can't start it: who names it is told with exit code 1, also from the cache; a folder's search goes by."""
    path = tmp_path / "a.py"
    path.write_bytes(data)
    for _ in range(2):
        outcome = check_files([str(path)], Settings(), Plan(cache_folder=tmp_path / "cache"))
        (found,) = outcome.findings
        assert (found.rule, found.span.line, outcome.notes, outcome.exit_code) == ("RW901", line, (), 1)
        assert word in found.message
    outcome = check_files([str(tmp_path)], Settings(), Plan(cache_folder=tmp_path / "cache"))
    assert (outcome.findings, len(outcome.notes), outcome.num_checked) == ((), 1, 0)


def test_kept_results_are_those_of_these_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's key has the text of every rule in it: a rule that changes makes what it found before worthless."""
    names, read = list[str](), Path.read_bytes

    def listen(path: Path) -> bytes:
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", listen)
    (tmp_path / "a.py").write_text("x = 1\n")
    check_files([str(tmp_path)], Settings(), Plan(cache_folder=tmp_path / "cache"))
    assert {"conditional_calls.py", "unparsed.py", "check.py"} <= set(names)


@pytest.mark.usefixtures("few_rules")
def test_a_text_from_standard_input() -> None:
    """The name decides what the text is read as."""
    assert _places(check_text("x.md", b"```python\nimport torch\nmark()\n```\n", Settings()).findings) == [(3, 1, None)]


@pytest.mark.usefixtures("few_rules")
def test_mending_keeps_the_file_as_it_is(tmp_path: Path) -> None:
    """A mended text has its line ends, and nothing that is not shown is mended."""
    path = tmp_path / "a.py"
    path.write_bytes(b"import torch\r\nmark()\r\n")
    findings = check_files([str(path)], Settings()).findings
    (mended,) = mend_files(findings, Settings())
    assert mended.after == "import torch\r\ndone()\r\n"
    assert list(mend_files(findings, Settings(ignore=("RW101",)))) == []


def _write_many(folder: Path) -> None:
    for number in range(12):
        text = "import torch\n" + f"x_{number} = 1\n" * 6000
        (folder / f"f{number}.py").write_text(text + ("self.gpu_id = (\n" if number == 7 else ""))


def test_several_processes_find_the_same(tmp_path: Path) -> None:
    """How many processes look changes nothing but the time."""
    _write_many(tmp_path)
    settings = Settings(select=("RW901",), folder=tmp_path)
    one, two = (check_files([str(tmp_path)], settings, Plan(jobs=jobs)) for jobs in (1, 2))
    assert [Path(finding.path).name for finding in one.findings] == ["f7.py"]
    assert (one.findings, one.failures, one.num_lines) == (two.findings, two.failures, two.num_lines)


_MANY = """
import sys
from pathlib import Path
from rankwise.lint.running import pool
if __name__ == "__main__":
    try:
        for result in pool.check_chunks([[path] for path in sys.argv[1:]] * 50, (Path.cwd(),), 2, []):
            print(result.path, flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are counted in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_stays_when_the_parent_ends(number: signal.Signals, tmp_path: Path) -> None:
    """Workers end with the process that started them, if that is killed at once or by Ctrl-C, and say nothing."""
    _write_many(tmp_path)
    files = [str(path) for path in sorted(tmp_path.glob("f*.py"))]
    (tmp_path / "many.py").write_text(_MANY)
    command = [sys.executable, str(tmp_path / "many.py"), *files]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    parent.stdout.readline()
    if number == signal.SIGKILL:
        parent.kill()
    else:
        os.killpg(parent.pid, number)
    _, told = parent.communicate(timeout=60)
    assert parent.returncode == (-9 if number == signal.SIGKILL else 130)
    assert number == signal.SIGKILL or told == b""
    deadline = time.monotonic() + 30
    while (left := _members(parent.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found
