"""Write docs/rules/check/README.md, the table of the rules of `rankwise check`, and the first and last lines of each rule's page."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.lint import registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.rule import Rule

DOCS = Path(__file__).parent
TARGET = DOCS / "rules" / "check"

sys.path.insert(0, str(DOCS))
from generated_pages import find_anchors, write_pages  # noqa: E402 - files beside this one
from undecided import UNDECIDED  # noqa: E402

_HEAD = """\
# Rules of the check

What `rankwise check` finds in a script, a notebook, a shell script, a page or a command line before anything runs. How to use it: [Check before you run](../../howto/check.md).
`rankwise rule RW101` shows a page on the terminal.

An *error* breaks, hangs or is silently wrong. A *warning* does so in some settings. A *hint* is worth a look and does not fail the check.
*fix* means that `rankwise check --fix` fixes it where that is safe. The classes are those of [failure classes](../../reference/failure-classes.md).
"""
_UNDECIDED_HEAD = """\
## What no rule finds

The code alone does not show these mistakes, or not without false alarms.

| class | | why there is no rule |
|---|---|---|"""


def link_class(id_: str, anchors: dict[str, str]) -> str:
    """Return a failure class as a link to its entry.

    Raises:
        KeyError: It has none: write one.
    """
    return f"[{id_}](../../reference/failure-classes.md#{anchors[id_]})"


def render_page(rule: Rule[Any], anchors: dict[str, str]) -> str:
    """Return the page of a rule: what is written by hand, between what its rule says."""
    classes = ", ".join(link_class(one, anchors) for one in rule.classes)
    facts = [
        f"**{rule.severity}**",
        f"class {classes}" if classes else "",
        "fixable with `--fix`" if rule.fixable else "",
        f"`{rule.name}`",
    ]
    return (
        f"# {rule.id}: {rule.summary[0].upper()}{rule.summary[1:]}\n\n{' · '.join(one for one in facts if one)}\n\n"
        f"{registry.page(rule)}\n"
        f"**To silence it** on one line, end the line with `# noqa: {rule.id}`. [All rules](README.md)\n"
    )


def render_table() -> str:
    """Return the page with all rules, by chapter, and what no rule finds."""
    anchors = find_anchors()
    return "\n".join([_HEAD.rstrip(), *_render_chapters(anchors), *_render_undecided(anchors)]) + "\n"


def _render_chapters(anchors: dict[str, str]) -> Iterator[str]:
    for title, rules in groupby(registry.all_rules(), key=lambda rule: registry.chapter(rule.id)):
        yield from (
            "",
            f"## {title}",
            "",
            "| rule | what is wrong | severity | class | |",
            "|---|---|---|---|---|",
        )
        for rule in rules:
            classes = ", ".join(link_class(one, anchors) for one in rule.classes)
            summary = rule.summary.replace("|", "\\|")
            yield f"| [{rule.id}]({rule.id}.md) | {summary} | {rule.severity} | {classes} | {'fix' if rule.fixable else ''} |"


def _render_undecided(anchors: dict[str, str]) -> Iterator[str]:
    found = {one for rule in registry.all_rules() for one in rule.classes}
    left = {id_: told for id_, told in UNDECIDED.items() if id_ not in found}
    if left:
        yield from ("", _UNDECIDED_HEAD)
        for id_, (name, reason) in left.items():
            shown = link_class(id_, anchors) if id_ in anchors else id_
            yield f"| {shown} | {name} | {reason} |"


def render() -> dict[str, str]:
    """Return all pages by their names."""
    anchors = find_anchors()
    pages = {f"{rule.id}.md": render_page(rule, anchors) for rule in registry.all_rules()}
    return {"README.md": render_table(), **pages}


def main() -> None:
    """Write the pages, and remove those of rules that are gone."""
    write_pages(TARGET, render())


if __name__ == "__main__":
    main()
