"""From a file to the pieces of code in it: scripts, notebooks, shell scripts, Markdown pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.inputs.decoding import decode_any, decode_python, is_utf16, tell_binary
from rankwise.lint.inputs.markdown import read_markdown
from rankwise.lint.inputs.notebook import read_notebook

if TYPE_CHECKING:
    from rankwise.lint.inputs.unparsed import Unparsed

Kind = Literal["python", "shell", "notebook", "markdown"]
#: What a folder is searched for.
SUFFIXES: dict[str, Kind] = {
    ".py": "python",
    ".ipynb": "notebook",
    ".sh": "shell",
    ".sbatch": "shell",
    ".slurm": "shell",
    ".md": "markdown",
}
#: What a file that is named itself may be called besides.
_MORE_SUFFIXES: dict[str, Kind] = {
    **SUFFIXES,
    **dict.fromkeys((".pyw", ".pyi", ".py3"), "python"),
    **dict.fromkeys((".bash", ".zsh", ".ksh", ".job", ".pbs", ".srun", ".lsf"), "shell"),
    **dict.fromkeys((".markdown", ".mdx", ".qmd", ".rmd"), "markdown"),
}
MAX_BYTES = 5_000_000
_SHEBANG = re.compile(rb"#![^\n]*?\b(?:(python|pypy)[\d.]*w?|(?:ba|z|da|k)?sh)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file holds.

    Attributes:
        units: Its code, in the order of the file.
        unparsed: Why the file as a whole can't be read as what it calls itself.
        note: Why it was not looked at; empty if it was. Where there is `unparsed` too, that is for a file which was
            named itself.
        num_lines: Lines in it.
        encoding: What to write it back with; empty where it could not be read.
    """

    units: tuple[CodeUnit, ...] = ()
    unparsed: Unparsed | None = None
    note: str = ""
    num_lines: int = 0
    encoding: str = ""


def decide_kind(path: str, head: bytes) -> Kind | None:
    """What a file is, by its name, else by its first bytes; None if neither tells."""
    if kind := _MORE_SUFFIXES.get(PurePath(path).suffix.lower()):
        return kind
    if found := _SHEBANG.match(head):
        return "python" if found[1] else "shell"
    return "shell" if re.search(rb"^#(?:SBATCH|PBS|BSUB)\b", head, re.MULTILINE) else None


def read_file(path: str, data: bytes) -> Reading:
    """Find the code in a file.

    Args:
        path: The file as the user named it.
        data: Its bytes.
    """
    kind = decide_kind(path, data[:4096])
    if kind is None:
        return Reading(note="neither its name nor its first line tells whether it is Python or shell; give it a suffix")
    if len(data) > MAX_BYTES:
        return Reading(
            note=f"it has {len(data) / 1e6:.1f} MB, and files above {MAX_BYTES / 1e6:.0f} MB are not looked at"
        )
    if binary := tell_binary(data):
        return Reading(note=binary, unparsed=_tell_no_text(data) if kind == "python" else None)
    return _read(path, data, kind)


def _read(path: str, data: bytes, kind: Kind) -> Reading:
    num_lines = data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    match kind:
        case "python":
            return _read_python(path, data, num_lines)
        case "shell":
            decoded = decode_any(data)
            unit = CodeUnit(path=path, language="shell", code=decoded.text)
            return Reading(units=(unit,), num_lines=num_lines, encoding=decoded.encoding)
        case "notebook":
            decoded = decode_any(data)
            units, unparsed = read_notebook(path, decoded.text)
            return Reading(units=units, unparsed=unparsed, num_lines=num_lines, encoding=decoded.encoding)
        case "markdown":
            decoded = decode_any(data)
            units = read_markdown(path, decoded.text)
            return Reading(units=units, num_lines=num_lines, encoding=decoded.encoding)


def _tell_no_text(data: bytes) -> Unparsed:
    from rankwise.lint.inputs.unparsed import Unparsed  # noqa: PLC0415 - only for texts that are broken

    at = data.find(0)
    line = data.count(b"\n", 0, at) + 1
    why, fix = (
        f"line {line} has a NUL byte (at offset {at}), so this is not text",
        "write the file again; Python itself can't run it",
    )
    if is_utf16(data):
        line, why, fix = 1, "it is UTF-16, which Python does not read", "save the file as UTF-8"
    return Unparsed(line=line, col=1, why=why, fix=fix)


def _read_python(path: str, data: bytes, num_lines: int) -> Reading:
    from rankwise.lint.inputs.unparsed import Unparsed  # noqa: PLC0415 - only for texts that are broken

    decoded = decode_python(data)
    if decoded.problem:
        wrong = Unparsed(line=decoded.line, col=1, why=decoded.problem, fix="save the file as UTF-8")
        return Reading(unparsed=wrong, num_lines=num_lines)
    unit = CodeUnit(path=path, language="python", code=decoded.text)
    return Reading(units=(unit,), num_lines=num_lines, encoding=decoded.encoding)
