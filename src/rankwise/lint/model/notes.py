"""Small things that the run on paper notices by the way, for rules: comparisons of text with a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

    from rankwise.lint.model.run import Run, Scope
    from rankwise.lint.model.values import Value
    from rankwise.lint.program import Module


@dataclass(frozen=True, slots=True)
class TextComparison:
    """A comparison of a text that came from the environment with a number: never equal."""

    node: ast.Compare
    module: Module
    text: Value
    number: Value


def note_comparison(run: Run, scope: Scope, node: ast.Compare, left: Value, right: Value) -> None:
    """Keep a comparison of a rank that is still text with a number."""
    for text, number in ((left, right), (right, left)):
        if (
            isinstance(text.const, str)
            and text.origin
            and isinstance(number.const, (int, float))
            and text.const.isdigit()
        ):
            run.notes.append(TextComparison(node, scope.module, text, number))
