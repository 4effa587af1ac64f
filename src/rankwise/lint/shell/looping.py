"""The values that a `for` loop goes through, where the text tells them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

    from rankwise.lint.shell.expanding import Expander

_MOST = 256


def loop_values(node: Node, expander: Expander) -> tuple[str, list[str] | None]:
    """Return the loop's variable and its values; None for values that only the run knows."""
    if node.type == "c_style_for_statement":
        return _counted(node, expander)
    name_node = node.child_by_field_name("variable")
    name = expander.text(name_node) if name_node else ""
    values: list[str] = []
    for child in node.named_children:
        if child.type in {"do_group", "compound_statement", "comment"} or child == name_node:
            continue
        found = _listed(child, expander)
        if found is None or len(values) + len(found) > _MOST:
            return name, None
        values += found
    return name, values or None


def _listed(node: Node, expander: Expander) -> list[str] | None:
    text = expander.text(node)
    if node.type == "brace_expression":
        found = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", text)
        return _range(int(found[1]), int(found[2])) if found else None
    if node.type == "command_substitution":
        return _sequence(node, expander)
    words = [word.text for word in expander.fields(node)]
    known = [text for text in words if text is not None]
    return known if len(known) == len(words) else None


def _sequence(node: Node, expander: Expander) -> list[str] | None:
    """``$(seq 0 3)``."""
    commands = [child for child in node.named_children if child.type == "command"]
    if len(commands) != 1:
        return None
    nodes = [child.named_children[0] if child.type == "command_name" else child for child in commands[0].named_children]
    words = [word.text for child in nodes for word in expander.fields(child)]
    if words[:1] != ["seq"] or len(words) not in {2, 3}:
        return None
    numbers = [int(text) for text in words[1:] if text is not None and text.isdecimal()]
    if len(numbers) != len(words) - 1:
        return None
    return _range(numbers[0] if len(numbers) == 2 else 1, numbers[-1])


def _range(first: int, last: int) -> list[str] | None:
    return [str(number) for number in range(first, last + 1)] if 0 <= last - first < _MOST else None


def _counted(node: Node, expander: Expander) -> tuple[str, list[str] | None]:
    """``for ((i = 0; i < 4; i++))``."""
    start, test = node.child_by_field_name("initializer"), node.child_by_field_name("condition")
    step = node.child_by_field_name("update")
    if start is None or test is None or step is None or test.type != "binary_expression":
        return "", None
    name, _, first = expander.text(start).replace(" ", "").partition("=")
    operator = expander.text(test.children[1]) if test.child_count == 3 else ""
    limit = expander.number(test.children[-1]) if operator in {"<", "<="} else None
    steps = {f"{name}++", f"++{name}", f"{name}+=1"}
    if not first.isdecimal() or limit is None or expander.text(step).replace(" ", "") not in steps:
        return name, None
    return name, _range(int(first), limit - (operator == "<"))
