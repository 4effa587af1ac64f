"""Why a text is no Python: what a reader who pasted it can mend."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.program import parse

if TYPE_CHECKING:
    from collections.abc import Callable

_QUOTES = dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb\u300c\u300d", '"') | dict.fromkeys(
    "\u2018\u2019\u201a\u2032", "'"
)
# Full-width forms stand in the order of ASCII; of letters and digits Python takes them.
_WIDE = {chr(one + 0xFEE0): chr(one) for one in range(0x21, 0x7F) if not chr(one).isalnum()}
_WIDE |= {"\u3002": ".", "\u3001": ",", "\u3010": "[", "\u3011": "]"}
_DASHES = dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")
_BLANKS = dict.fromkeys("\u00a0\u3000\u2002\u2003\u2009\u202f\u200b\u2060\ufeff", " ")
_PROMPT = re.compile(r"\s*(?:>>>(?:\s|$)|In \[\d+\]:)")
_NEWER = re.compile(r"\s*(?:async\s+)?(?:def|class)\s+\w+\[|\s*type\s+\w+(?:\[.*\])?\s*=")
_FENCE = re.compile(r"\s*(?:```|~~~)")
_ASCII = str.maketrans(_QUOTES | _WIDE | _DASHES | _BLANKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unparsed:
    """Where a text stops to be Python.

    Attributes:
        line: From 1.
        col: From 1, in characters.
        why: What is there, as a part of a sentence.
        fix: What to do, as one line.
        is_known: Whether ``why`` names a cause beyond what Python's parser says.
        is_newer: Whether a newer Python than this reads it.
    """

    line: int
    col: int
    why: str
    fix: str
    is_known: bool = False
    is_newer: bool = False


def find_unparsed(code: str) -> Unparsed | None:
    """Tell where and why a text is no Python; None if it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in strings are not ours to tell
            parse(code)
    except SyntaxError as error:
        return explain(code, error)
    return None


def explain(code: str, error: SyntaxError) -> Unparsed:
    """Tell a user why Python's parser refused a text.

    Args:
        code: The text.
        error: What the parser said.
    """
    lines = code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    line = min(max(error.lineno or 1, 1), len(lines))
    col = max(error.offset or 1, 1)
    text = lines[line - 1]
    # The parser often stops a line behind the slip, as an open bracket or quote hides it.
    for number in [line, *range(line - 1, max(0, line - 4), -1)]:
        for tell in _TELLERS:
            if found := tell(lines[number - 1], number):
                return found
    if isinstance(error, TabError) or "inconsistent use of tabs" in str(error.msg):
        return _known(line, 1, "tabs and spaces are mixed in one block's indent", "indent with four spaces only")
    if (first := _find_pasted(lines)) is not None:
        return first
    if isinstance(error, IndentationError) and "\t" in text[: len(text) - len(text.lstrip())]:
        return _known(line, 1, f"{error.msg}; this line is indented by tabs", "indent with four spaces only")
    why = str(error.msg or "invalid syntax")
    if sys.version_info < (3, 12) and _NEWER.match(text):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Unparsed(
            line=line,
            col=min(col, len(text) + 1),
            why=f"type parameters need Python 3.12, and this is {version}",
            fix="run the check with the Python that runs the script",
            is_newer=True,
        )
    return Unparsed(
        line=line, col=min(col, len(text) + 1), why=why, fix="fix this line; Python itself can't run the file"
    )


def is_slip(code: str) -> bool:
    """Whether a text is no Python, and would be with plain characters: so it was meant as a program.

    A line of output, or a sentence, may also have a typographic quote; it is no program without it.
    """
    lines = [_to_plain(line) for line in code.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = parse("\n".join(lines))
    except SyntaxError:
        return False
    return any(_is_code(node) for node in ast.walk(tree))


def _to_plain(text: str) -> str:
    """A line with plain characters outside of its strings and its comment."""
    chars = list(text)
    for col, char in _outside_strings(text):
        chars[col - 1] = char.translate(_ASCII)
    return "".join(chars)


def _is_code(node: ast.AST) -> bool:
    """Whether no output looks like this: a heading with a colon is an annotation, and a word with brackets a call."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).isascii()
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.For, ast.If, ast.With)
    return isinstance(node, kinds)


def _known(line: int, col: int, why: str, fix: str) -> Unparsed:
    return Unparsed(line=line, col=col, why=why, fix=fix, is_known=True)


def _tell_prompt(text: str, number: int) -> Unparsed | None:
    if not _PROMPT.match(text):
        return None
    col = len(text) - len(text.lstrip()) + 1
    return _known(
        number,
        col,
        f"{text.strip().split()[0]!r} is the prompt of a console",
        "remove the prompts and the output from the text",
    )


def _tell_fence(text: str, number: int) -> Unparsed | None:
    if not _FENCE.match(text):
        return None
    return _known(
        number,
        1,
        f"{text.strip()!r} is a Markdown fence",
        "remove this line, which belongs to the Markdown page",
    )


def _tell_characters(text: str, number: int) -> Unparsed | None:
    """A typographic character that stands outside of strings and comments."""
    for col, char in _outside_strings(text):
        for kind, table in (
            ("quote", _QUOTES),
            ("full-width character", _WIDE),
            ("dash", _DASHES),
            ("space", _BLANKS),
        ):
            if char in table:
                name = f"U+{ord(char):04X}"
                shown = f"{char} ({name})" if char.isprintable() else name
                plain = "a plain space" if table is _BLANKS else table[char]
                what = kind if kind == "full-width character" else f"typographic {kind}"
                return _known(
                    number,
                    col,
                    f"{shown} is a {what}, which Python does not accept",
                    f"type {plain} instead, in the whole file",
                )
    return None


def _outside_strings(text: str) -> list[tuple[int, str]]:
    """Characters of a line with their columns, without what stands in plain quotes or behind a #."""
    found, quote = [], ""
    for col, char in enumerate(text, start=1):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#":
            break
        elif not char.isascii():
            found.append((col, char))
    return found


def _find_pasted(lines: list[str]) -> Unparsed | None:
    """Lines of a pasted page or console anywhere: the parser stops at their output, or at a bracket before them."""
    reported = (
        tell(text, number) for number, text in enumerate(lines, start=1) for tell in (_tell_prompt, _tell_fence)
    )
    return next((found for found in reported if found is not None), None)


_TELLERS: tuple[Callable[[str, int], Unparsed | None], ...] = (_tell_prompt, _tell_fence, _tell_characters)
