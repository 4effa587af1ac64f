"""The code of a Jupyter notebook: its cells as one program, and the shell commands in them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.inputs.unparsed import Unparsed, find_unparsed

_SHELL_CELL = re.compile(r"%%(?:bash|sh|zsh|!|system|sx|script\s+(?:\S*/)?(?:bash|sh|zsh)\b)")
#: Cell magics whose body is Python that runs in the notebook.
_PYTHON_CELL = re.compile(r"%%(?:time|timeit|capture|prun|memit|mprun|lprun|python3?|pypy|debug|snakeviz|heat)\b")
_FILE_CELL = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+|--append\s+)?(\S+)")
_MAGIC = re.compile(r"(\s*)(?:(!{1,2})|%{1,2}[A-Za-z_]|\?{1,2}\w)")
_ASSIGNED_MAGIC = re.compile(r"(\s*[\w.,\s\[\]]+=\s*)(?:!|%[A-Za-z_])")
_HELP = re.compile(r"(\s*)[\w.*]+\?{1,2}\s*$")


@dataclass(slots=True)
class _Lines:
    """Lines of one language, gathered from cells."""

    lines: list[str] = field(default_factory=list)
    cells: list[tuple[int, int]] = field(default_factory=list)
    indents: dict[int, int] = field(default_factory=dict)

    def add(self, line: str, cell: int, number: int, indent: int = 0) -> None:
        self.lines.append(line)
        self.cells.append((cell, number))
        if indent:
            self.indents[len(self.lines)] = indent

    def unit(self, path: str, language: str, *, is_fragment: bool) -> CodeUnit:
        return CodeUnit(
            path=path,
            language="shell" if language == "shell" else "python",
            code="\n".join(self.lines) + "\n",
            cells=tuple(self.cells),
            indents=self.indents,
            is_fragment=is_fragment,
        )


def read_notebook(path: str, text: str) -> tuple[tuple[CodeUnit, ...], Unparsed | None]:
    """Find the code in a notebook.

    Args:
        path: The file as the user named it.
        text: Its JSON.

    Returns:
        Its pieces, and why it is no notebook (then there are none).
    """
    try:
        found = json.loads(text)
        cells = code_cells(found)
    except RecursionError:
        return (), _no_notebook("its JSON is nested too deep to be read")
    except json.JSONDecodeError as error:
        return (), _no_notebook(f"{error.msg} (line {error.lineno}, column {error.colno})", error.lineno, error.colno)
    except ValueError as error:
        return (), _no_notebook(str(error))
    if _tell_language(found) not in {"", "python"}:
        return (), None
    python, others = _Lines(), list[CodeUnit]()
    for number, cell in cells.items():
        _read_cell(path, number, source_of(cell), python, others)
    main = (python.unit(path, "python", is_fragment=True),) if python.lines else ()
    return (*main, *others), None


def _no_notebook(why: str, line: int = 1, col: int = 1) -> Unparsed:
    return Unparsed(line=line, col=col, why=f"this is not a notebook: {why}", fix="save it again from Jupyter")


def code_cells(notebook: object) -> dict[int, dict[str, Any]]:
    """Return the cells of a notebook that hold code, by their numbers from 1.

    Raises:
        ValueError: It is none.
    """
    found = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(found, list):
        raise ValueError("it has no list of cells")  # noqa: TRY004 - a text that is none
    numbered = enumerate(found, start=1)
    return {number: one for number, one in numbered if isinstance(one, dict) and one.get("cell_type") == "code"}


def source_of(cell: dict[str, Any]) -> str:
    """Return the code of a cell."""
    source = cell.get("source", "")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _tell_language(found: object) -> str:
    about = found.get("metadata") if isinstance(found, dict) else None
    for part in ("kernelspec", "language_info"):
        reported = about.get(part) if isinstance(about, dict) else None
        if isinstance(reported, dict) and (
            name := reported.get("language") or (reported.get("name") if part == "language_info" else "")
        ):
            return re.sub(r"\d+$", "", str(name).lower())
    return ""


def _read_cell(path: str, number: int, source: str, python: _Lines, others: list[CodeUnit]) -> None:
    lines = source.split("\n")
    first = next((at for at, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return
    head = lines[first].strip()
    body = [*[""] * (first + 1), *lines[first + 1 :]]
    if head.startswith("%%") and not _PYTHON_CELL.match(head):
        if _SHELL_CELL.match(head):
            others.append(_as_unit(path, "shell", body, number, is_fragment=False))
        elif (file := _FILE_CELL.match(head)) and file[1].strip("'\"").endswith((".py", ".sh", ".sbatch", ".slurm")):
            language = "python" if file[1].strip("'\"").endswith(".py") else "shell"
            others.append(_as_unit(path, language, body, number, is_fragment=" -a" in head or "--append" in head))
        return
    lines = body if head.startswith("%%") else lines
    if find_unparsed("\n".join(lines)) is not None:
        lines, shell = neutralise(lines, number)
        if shell.lines:
            others.append(shell.unit(path, "shell", is_fragment=True))
        if find_unparsed("\n".join(lines)) is not None:
            # Alone, so that it does not hide all other cells; the check says what is wrong with it.
            others.append(_as_unit(path, "python", lines, number, is_fragment=True))
            return
    for at, line in enumerate(lines, start=1):
        python.add(line, number, at)


def _as_unit(path: str, language: str, lines: list[str], number: int, *, is_fragment: bool) -> CodeUnit:
    gathered = _Lines()
    for at, line in enumerate(lines, start=1):
        gathered.add(line, number, at)
    return gathered.unit(path, language, is_fragment=is_fragment)


def neutralise(lines: list[str], number: int) -> tuple[list[str], _Lines]:
    """Put `pass` in the place of what only IPython reads; shell lines are gathered."""
    plain, shell = list[str](), _Lines()
    goes_on = is_shell = False
    for at, line in enumerate(lines, start=1):
        if goes_on:
            plain.append("")
            if is_shell:
                shell.add(line, number, at)
        elif found := _MAGIC.match(line):
            plain.append(f"{found[1]}pass")
            is_shell = found[2] is not None
            if is_shell:
                shell.add(line[found.end() :], number, at, indent=found.end())
        elif found := _ASSIGNED_MAGIC.match(line):
            plain.append(f"{found[1]}None")
            is_shell = False
        elif found := _HELP.match(line):
            plain.append(f"{found[1]}pass")
            is_shell = False
        else:
            plain.append(line)
            continue
        goes_on = line.endswith("\\")
    return plain, shell
