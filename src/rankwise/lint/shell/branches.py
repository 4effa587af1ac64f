"""What is known of variables after code that may or may not have run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.lint.shell.expanding import changed_in
from rankwise.lint.shell.words import Hole, Word, joined

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tree_sitter import Node

    from rankwise.lint.shell.expanding import Value
    from rankwise.lint.shell.model import Setting


def added(old: Value, new: Value) -> Value:
    """What ``A+=new`` makes of a variable."""
    if isinstance(old, list) and isinstance(new, list):
        return [*old, *new]
    if isinstance(old, tuple) and isinstance(new, tuple):
        return joined([*old, *new])
    return None


def common_values(ends: list[dict[str, Value]]) -> dict[str, Value]:
    """The variables that are equal at the ends of all branches."""
    first, *others = ends
    return {
        name: value
        for name, value in first.items()
        if all(name in end and (end[name] is value or end[name] == value) for end in others)
    }


def as_known(setting: Setting, variables: Mapping[str, Value], before: Mapping[str, Setting]) -> Setting:
    """An exported variable after branches: its value is known only where all of them agree."""
    value = variables.get(setting.name)
    if isinstance(value, tuple) or before.get(setting.name) is setting:
        return setting
    word = Word(raw=setting.value.raw, parts=(Hole((setting.name,)),), span=setting.value.span)
    return replace(setting, value=word)


def assigned_in(node: Node) -> set[str]:
    """The variables that a piece of code may give a new value."""
    names: set[str] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one.type == "variable_assignment":
            name = one.child_by_field_name("name")
            names.add(_text(name) if name else "")
        elif one.type in {"compound_statement", "arithmetic_expansion", "command"}:
            text = _text(one)
            if text.startswith(("((", "$((", "let ")):
                names.update(changed_in(text))
            elif text.startswith("read "):
                names.update(text.split()[1:])
        stack.extend(one.named_children)
    return names


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")
