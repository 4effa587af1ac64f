"""The code of a Markdown page: its fences, put together as their author meant them.

A tutorial splits one script over many fences, so a fence sees the names of those before it. A page may also hold several
programs, or two versions of one: a fence that starts anew, or defines again what is there, begins a new piece.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.inputs.notebook import neutralise
from rankwise.lint.inputs.unparsed import find_unparsed
from rankwise.lint.program import STARTERS, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

_PYTHON = frozenset({"python", "py", "python3", "pycon", "python-repl", "ipython", "ipython3", "pytorch"})
_SHELL = frozenset(
    """bash sh shell zsh console shell-session shellsession sh-session terminal slurm sbatch""".split()  # noqa: SIM905
)
_CONSOLES = frozenset({"console", "shell-session", "shellsession", "sh-session"})
_MARKS = re.compile(r"(?:\s*(?:>|[-*+](?=\s)|\d{1,9}[.)](?=\s)))*\s*")
_OPEN = re.compile(r"(`{3,}|~{3,})(.*)$")
_PROMPT = re.compile(r"\s*(?:[\w.@~:/()\[\]-]{0,40}[$%]|\$)\s+(?=\S)")
_PYCON = re.compile(r"\s*(?:>>>|\.\.\.)(?: |$)")
_LOOKS_PYTHON = re.compile(r"^(?:from\s+[\w.]+\s+import\b|import\s+[\w.]+)", re.MULTILINE)
_LOOKS_SHELL = re.compile(
    r"^(?:#!.*sh\b|#SBATCH\b|\$\s|(?:\w+=\S*\s+)*(?:torchrun|srun|sbatch|mpirun|python3?\s+-m\s+torch)\b)", re.MULTILINE
)
_STARTS = re.compile(rf"{STARTERS.pattern}|\bTrainer\s*\(")
_TOOLS = frozenset({"torch", "accelerate", "lightning", "pytorch_lightning", "transformers", "deepspeed", "rankwise"})


@dataclass(slots=True, kw_only=True)
class _Fence:
    """One fence: its words, and its lines as (number in the page, characters cut, text)."""

    language: str
    lines: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(text for _, _, text in self.lines)


@dataclass(slots=True, kw_only=True)
class _Facts:
    """What a Python fence, or several, have and need."""

    fences: list[_Fence] = field(default_factory=list)
    imports: list[tuple[int, int, str]] = field(default_factory=list)
    has_tools: bool = False
    has_main: bool = False
    starts: bool = False
    defines: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)


def read_markdown(path: str, text: str) -> tuple[CodeUnit, ...]:
    """Find the code in a page.

    Args:
        path: The file as the user named it.
        text: The page.

    Returns:
        Pieces whose lines are numbered as in the page.
    """
    units, now = list[CodeUnit](), _Facts()
    for fence in find_fences(text):
        language = _decide_language(fence)
        if language == "shell" and (lines := _read_shell(fence)):
            units.append(_as_unit(path, "shell", lines))
        elif language == "python":
            read = _read_python(fence)
            if read is not None:
                if now.fences and _begins_anew(read, now):
                    units.append(_join(path, now))
                    now = _Facts(imports=[] if read.has_tools else now.imports)
                _take_in(now, read)
    if now.fences:
        units.append(_join(path, now))
    return tuple(sorted(units, key=_first_line))


def find_fences(text: str) -> Iterator[_Fence]:
    """Give the fences of a page, also those in lists, quotes and tabs; an open one ends with the page."""
    now: _Fence | None = None
    mark, quotes, indent = "", 0, 0
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        if now is None:
            front = _MARKS.match(line)
            cut = front.end() if front else 0
            opened = _OPEN.match(line[cut:])
            if opened and not (opened[1][0] == "`" and "`" in opened[2]):
                mark, quotes, indent = opened[1], line[:cut].count(">"), cut
                now = _Fence(language=_tell_language(opened[2]))
            continue
        inner, cut = _cut_front(line, quotes, indent)
        if inner is None or re.fullmatch(rf"\s*{re.escape(mark[0])}{{{len(mark)},}}\s*", inner):
            yield now
            now = None
            continue
        now.lines.append((number, cut, inner))
    if now is not None:
        yield now


def _cut_front(line: str, quotes: int, indent: int) -> tuple[str | None, int]:
    """Cut the quote's marks and at most the fence's own indent; None where the quote has ended."""
    cut = 0
    if quotes:
        front = re.match(rf"(?:\s*>){{{quotes}}} ?", line)
        if front is None:
            return None, 0
        cut = front.end()
    while cut < min(indent, len(line)) and line[cut] in " \t":
        cut += 1
    return line[cut:], cut


def _tell_language(info: str) -> str:
    """The language in a fence's words: ``python title="x"``, ``{.python .numberLines}``, ``{code-cell} ipython3``, ``py:no-run``."""
    words = re.findall(r"[\w+#-]+", info.lower())
    if info.strip().startswith("{code") and len(words) > 1:
        words = [word for word in words if word not in {"code", "code-block", "code-cell"}]
    return words[0] if words else ""


def _decide_language(fence: _Fence) -> str:
    if fence.language in _PYTHON:
        return "python"
    if fence.language in _SHELL:
        return "shell"
    if fence.language:
        return ""
    if _LOOKS_SHELL.search(fence.text):
        return "shell"
    return "python" if _LOOKS_PYTHON.search(fence.text) and _is_python(fence.lines) else ""


def _read_shell(fence: _Fence) -> list[tuple[int, int, str]]:
    """The commands of a shell fence, without prompts; where there are prompts, other lines are output."""
    if fence.language not in _CONSOLES and not any(re.match(r"\s*\$ ", text) for _, _, text in fence.lines):
        return fence.lines if fence.text.strip() else []
    found, goes_on = list[tuple[int, int, str]](), False
    for number, cut, text in fence.lines:
        if prompt := _PROMPT.match(text):
            found.append((number, cut + prompt.end(), text[prompt.end() :]))
        elif goes_on:
            front = re.match(r"> ?", text)
            more = front.end() if front else 0
            found.append((number, cut + more, text[more:]))
        else:
            continue
        goes_on = text.rstrip(" ").endswith("\\")
    return found


def _read_python(fence: _Fence) -> _Facts | None:
    """The facts of a fence; None where it is no Python: output, a diff, a text with gaps to fill."""
    lines = _cut_indent(_cut_prompts(fence.lines))
    if not _is_python(lines):
        plain, _ = neutralise([text for _, _, text in lines], 1)
        lines = [(number, cut, text) for (number, cut, _), text in zip(lines, plain, strict=True)]
    kept = _Fence(language="python", lines=lines)
    return _gather(kept) if kept.text.strip() and _is_python(lines) else None


def _cut_prompts(lines: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    if not any(text.lstrip().startswith(">>> ") for _, _, text in lines):
        return lines
    found = []
    for number, cut, text in lines:
        if prompt := _PYCON.match(text):
            found.append((number, cut + prompt.end(), text[prompt.end() :]))
    return found


def _cut_indent(lines: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Cut what all lines are indented by: a fence may go on in a function's body."""
    fronts = [len(text) - len(text.lstrip()) for _, _, text in lines if text.strip()]
    least = min(fronts, default=0)
    if not least:
        return lines
    return [(number, cut + min(least, len(text)), text[least:]) for number, cut, text in lines]


def _is_python(lines: list[tuple[int, int, str]]) -> bool:
    return find_unparsed("\n".join(text for _, _, text in lines)) is None


def _gather(fence: _Fence) -> _Facts:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in strings are not ours to tell
        tree = parse(fence.text)
    facts = _Facts(fences=[fence], starts=_STARTS.search(fence.text) is not None)
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            facts.imports += fence.lines[node.lineno - 1 : node.end_lineno]
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            facts.has_tools |= any(name.partition(".")[0] in _TOOLS for name in names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            facts.defines.add(node.name)
        elif isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
            facts.has_main = True
    facts.uses = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return facts


def _begins_anew(fence: _Facts, before: _Facts) -> bool:
    if fence.defines & before.defines:
        return True
    if fence.uses & before.defines:
        return False
    if (fence.has_main and before.has_main) or (fence.starts and before.starts):
        return True
    return fence.has_tools and before.has_tools and (fence.has_main or fence.starts)


def _take_in(now: _Facts, fence: _Facts) -> None:
    now.fences += fence.fences
    now.imports += fence.imports
    now.defines |= fence.defines
    now.has_tools |= fence.has_tools
    now.has_main |= fence.has_main
    now.starts |= fence.starts


def _join(path: str, facts: _Facts) -> CodeUnit:
    # A new version of a script goes on to use the imports of the first one.
    lines = {number: (number, cut, text) for number, cut, text in facts.imports}
    for fence in facts.fences:
        lines.update({line[0]: line for line in fence.lines})
    return _as_unit(path, "python", [lines[number] for number in sorted(lines)])


def _as_unit(path: str, language: str, lines: list[tuple[int, int, str]]) -> CodeUnit:
    code = [""] * lines[-1][0]
    for number, _, text in lines:
        code[number - 1] = text
    return CodeUnit(
        path=path,
        language="shell" if language == "shell" else "python",
        code="\n".join(code) + "\n",
        indents={number: cut for number, cut, _ in lines if cut},
        is_fragment=True,
    )


def _first_line(unit: CodeUnit) -> int:
    return len(unit.code) - len(unit.code.lstrip("\n"))
