"""`rankwise rules` lists what the check knows; `rankwise rule NAME` shows the page of whatever a report names, or what an error text means."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rankwise.base import terminal
from rankwise.base.errors import UsageError
from rankwise.base.flags import Parser
from rankwise.cli.error_text import find_known, read_log
from rankwise.cli.pages import find_close, find_page, list_names
from rankwise.cli.prose import page_width, write_page
from rankwise.doctor.units import align
from rankwise.lint import registry
from rankwise.lint.reporters.text_form import SEVERITY_STYLE, paint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.lint.rule import Rule


def main(argv: Sequence[str]) -> int:
    """Show all rules; return the exit code."""
    parser = Parser(prog="rankwise rules", description="List what `rankwise check` finds.")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="A table, or a JSON list.")
    args = parser.parse_args(list(argv))
    _show_all(registry.all_rules(), args.format)
    return 0


def main_one(argv: Sequence[str]) -> int:
    """Show the page of one rule, or what an error text means; return the exit code."""
    parser = Parser(
        prog="rankwise rule",
        description="Explain what a report, the check or the doctor has named, or what an error text means: who is at fault, and what to do. "
        "`rankwise rule < LOG` finds the known errors in a log.",
    )
    parser.add_argument(
        "rule",
        nargs="*",
        metavar="NAME or TEXT",
        help="A rule of the check (RW101; RW1 lists a chapter), a rule of the hang verdict (mispaired_gradients), a failure class (D14), a probe (gloo-variables); "
        "or the line that torch, NCCL, Gloo or Python printed, in quotes. Without it, a log is read from standard input.",
    )
    parser.add_argument("--format", choices=["text", "json"], default="text", help="A page, or a JSON object.")
    args = parser.parse_args(list(argv))
    name = " ".join(args.rule)
    if not name:
        if sys.stdin is None or sys.stdin.isatty():
            parser.error("pass a name or an error text, or a log on standard input: rankwise rule < LOG")
        text, left_out = read_log(sys.stdin.buffer)
        if not text.strip():
            parser.error("standard input is empty: pass a name, an error text or a log")
        return _show_known(text, args.format, left_out=left_out)
    if rules := _find_chapter(name):
        _show_all(rules, args.format)
        return 0
    page = find_page(name)
    if page is not None:
        print(json.dumps({"name": name, "page": page}, indent=1) if args.format == "json" else _show(page))
        return 0
    if " " in name or find_known(name):
        return _show_known(name, args.format)
    rule = _find_rule(name)
    if args.format == "json":
        print(json.dumps({**_to_json(rule), "page": registry.page(rule)}, indent=1))
    else:
        width = page_width()
        print("\n".join(_write_page(rule, width=width, color=terminal.has_colour(1))))
    return 0


def _show_known(text: str, format: str, *, left_out: int = 0) -> int:  # noqa: A002 - the name of the flag
    """Show what the known errors in a text mean; with one of them, its page as well."""
    known, is_log = find_known(text), "\n" in text.strip()
    if not known:
        raise UsageError(
            "no known error text is in this log" if is_log else "this is not a known error text",
            hint="`rankwise run` names the rank that failed first, whatever its error",
        )
    if format == "json":
        print(json.dumps([{**asdict(one), "line": one.line + left_out} for one in known], indent=1))
        return 0
    color = terminal.has_colour(1)
    pages = [page for id_ in known[0].classes if (page := find_page(id_))] if len(known) == 1 else []
    for one in known:
        place = f"line {one.line + left_out}: " if is_log else ""
        rows = [] if pages else [("class", " or ".join(f"{id_} (rankwise rule {id_})" for id_ in one.classes))]
        rows = [("at fault", one.at_fault), ("do", one.fix), *rows]
        print(place + paint(one.text, "bold", color=color))
        print("".join(f"{line}\n" for name, words in rows if words for line in _write_row(name, words)))
    if pages:
        print("\n\n".join(map(_show, pages)))
    return 0


def _write_row(name: str, words: str) -> list[str]:
    """Return a row of a report's form."""
    return textwrap.wrap(
        words, page_width(), initial_indent=f"  {name:<10}", subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def _show(page: str) -> str:
    """Return a page as lines for the terminal, its title in bold."""
    color = terminal.has_colour(1)
    title, _, rest = page.partition("\n")
    lines = write_page(rest, width=page_width(), color=color)
    return "\n".join([paint(title.lstrip("# "), "bold", color=color), "", *lines]).rstrip()


def _find_rule(name: str) -> Rule[Any]:
    try:
        return registry.rule(name)
    except UsageError as error:
        close = find_close(name)
        if not close:
            raise
        raise UsageError(error.message, hint=f"did you mean {' or '.join(close)}?") from None


def _find_chapter(word: str) -> tuple[Rule[Any], ...]:
    """The rules whose ids begin so: RW8, rw10."""
    if re.fullmatch(r"rw\d{1,2}", word.strip().lower()) is None:
        return ()
    return tuple(rule for rule in registry.all_rules() if rule.id.lower().startswith(word.strip().lower()))


def _show_all(rules: Sequence[Rule[Any]], format: str) -> None:  # noqa: A002 - the name of the flag
    if format == "json":
        print(json.dumps([_to_json(rule) for rule in rules], indent=1))
    else:
        lines = _write_table(rules, color=terminal.has_colour(1))
        print(terminal.wrap("\n".join(lines), terminal.width(1)))


def _to_json(rule: Rule[Any]) -> dict[str, object]:
    return {
        "id": rule.id,
        "name": rule.name,
        "classes": list(rule.classes),
        "severity": rule.severity,
        "fixable": rule.fixable,
        "summary": rule.summary,
        "chapter": registry.chapter(rule.id),
        "looks_at": rule.looks_at,
    }


def _write_table(rules: Sequence[Rule[Any]], *, color: bool) -> Iterator[str]:
    rows = [
        (rule.id, rule.severity, ", ".join(rule.classes) or "-", "fix" if rule.fixable else "", rule.name, rule.summary)
        for rule in rules
    ]  # fmt: skip
    head, *lines = align([("id", "severity", "class", "", "name", "what is wrong"), *rows])
    yield paint(head, "bold", color=color)
    for title, group in groupby(zip(rules, lines, strict=True), key=lambda each: registry.chapter(each[0].id)):
        yield from ("", paint(title, "bold", color=color))
        yield from (line for _, line in group)
    yield from ("", "fix: `rankwise check --fix` fixes it; `rankwise rule ID` explains a rule")
    if rules == registry.all_rules():
        others = ", ".join(name for name in list_names() if not re.fullmatch(r"[A-Z]\d+", name))
        yield from textwrap.wrap(
            f"It explains failure classes (I1 … R{{n}}), rules of the hang verdict and probes of the doctor, too: {others}",
            page_width(),
            break_on_hyphens=False,
        )


def _write_page(rule: Rule[Any], *, width: int, color: bool) -> Iterator[str]:
    kind = paint(f"{rule.severity}", SEVERITY_STYLE[rule.severity], color=color)
    classes = f"class {', '.join(rule.classes)}" if rule.classes else ""
    facts = [kind, classes, "fixable with `--fix`" if rule.fixable else ""]
    yield f"{paint(f'{rule.id} {rule.name}', 'bold', color=color)}: {'; '.join(one for one in facts if one)}"
    yield ""
    yield from write_page(registry.page(rule), width=width, color=color)
    yield f"Silence it on one line: # noqa: {rule.id}"
