"""Text that can't be parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import Finding, Found, Span
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.lint.inputs.unparsed import Unparsed
    from rankwise.lint.script import Script
    from rankwise.lint.shell.study import Shell


@rule("RW901", "error", "", "this can't be parsed as Python, so no rank can start it")
def text_is_not_python(_script: Script) -> Iterable[Found]:
    # A script that could be studied is Python; the check asks `tell` about the others.
    return ()


def tell(path: str, unparsed: Unparsed) -> Finding:
    """The one finding on a file that can't be parsed.

    Args:
        path: The file as the user named it.
        unparsed: Where and why.
    """
    return Finding(
        rule=text_is_not_python.id,
        failure_class="",
        severity="warning" if unparsed.is_newer else text_is_not_python.severity,
        message=f"this can't be parsed: {unparsed.why}",
        fix=unparsed.fix,
        path=path,
        span=Span(unparsed.line, unparsed.col, unparsed.line, unparsed.col + 1),
    )


@rule("RW902", "warning", "", "this can't be parsed as bash, so nothing in it was checked", looks_at="shell")
def text_is_not_shell(shell: Shell) -> Iterator[Found]:
    is_empty = not shell.reading.commands and not shell.reading.settings
    if not shell.has_errors or not is_empty or shell.unit.is_fragment:
        return
    line = next((number for number, text in enumerate(shell.unit.lines, start=1) if text.strip() and text[0] != "#"), 1)
    span = Span(line, 1, line, len(shell.unit.lines[line - 1]) + 1)
    yield Found(span, "this can't be parsed as bash", "run `bash -n` on it: it says what is left open")
