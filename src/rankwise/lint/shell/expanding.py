"""What the shell makes of a word, as far as the text tells: variables, arrays, arithmetic, splitting at blanks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankwise.lint.shell.words import Hole, Part, Word, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from tree_sitter import Node

    from rankwise.lint.finding import Span
    from rankwise.lint.shell.source import Source

#: A scalar's value, an array's words, or None for what only the run knows.
Value = tuple[Part, ...] | list[Word] | None
_BLANKS = re.compile(r"[ \t\n]+")
_CHANGES = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_DICE = re.compile(rb"\b(RANDOM|SRANDOM|shuf|urandom|openssl\s+rand)\b|%N")


@dataclass(slots=True)
class Expander:
    """Expands nodes of one source with the variables known at this point of the walk."""

    source: Source
    variables: dict[str, Value]
    note: Callable[[str, int, int], None]
    inner: Callable[[Node], None] = field(repr=False)

    def text(self, node: Node) -> str:
        """The text of a node, as typed."""
        return self.source.data[node.start_byte : node.end_byte].decode(errors="replace")

    def span(self, node: Node) -> Span:
        """Where a node stands in the piece."""
        return self.source.span(node.start_byte, node.end_byte)

    def fields(self, node: Node) -> list[Word]:
        """The words that an argument turns into."""
        if node.type in {"word", "number"} and not node.named_child_count:
            raw = self.text(node)
            return [Word(raw=raw, parts=joined([_unescape(raw)]), span=self.span(node))]
        if (elements := self._array_of(node)) is not None:
            return elements
        atoms = self.atoms(node)
        raw, span = self.text(node), self.span(node)
        fields: list[list[Part]] = [[]]
        for part, is_split in atoms:
            if isinstance(part, str) and is_split:
                first, *rest = _BLANKS.split(part)
                fields[-1].append(first)
                fields.extend([text] for text in rest)
            else:
                fields[-1].append(part)
        words = [joined(parts) for parts in fields]
        if len(words) > 1 or any(is_split for _, is_split in atoms):
            words = [parts for parts in words if parts]
        typed = len(words) == 1
        opens = _is_open(node)
        return [
            Word(
                raw=raw,
                parts=parts,
                span=span,
                is_open=len(parts) == 1 and isinstance(parts[0], Hole) and (opens or not typed),
                is_typed=typed,
            )
            for parts in words
        ]

    def value(self, node: Node | None) -> tuple[Part, ...]:
        """The value of an assignment: never split."""
        return joined([part for part, _ in self.atoms(node)]) if node else ()

    def atoms(self, node: Node) -> list[tuple[Part, bool]]:
        """The pieces of a word; True for those that the shell splits at blanks."""
        kind = node.type
        if kind in {"word", "number"} and not node.named_child_count:
            return [(_unescape(self.text(node)), False)]
        if kind in _QUOTED:
            return [(self.text(node)[_QUOTED[kind] : -1], False)]
        if kind == "concatenation":
            return [atom for child in node.children for atom in self.atoms(child)]
        if expand := _EXPANSIONS.get(kind):
            return expand(self, node)
        if kind == "command_substitution":
            self.inner(node)
        if node.is_named:
            return [(Hole(self.names_in(node)), kind == "command_substitution")]
        return [(self.text(node), False)]

    def _simple(self, node: Node) -> list[tuple[Part, bool]]:
        return self._variable(self.text(node)[1:], node)

    def _string(self, node: Node) -> list[tuple[Part, bool]]:
        atoms: list[tuple[Part, bool]] = []
        data, at = self.source.data, node.start_byte + (2 if node.type == "translated_string" else 1)
        end = node.end_byte - 1
        for child in node.named_children:
            if child.type in {"string_content", "string"}:
                continue
            atoms.append((_unquote(data[at : child.start_byte]), False))
            atoms += [(part, False) for part, _ in self.atoms(child)]
            at = child.end_byte
        return [*atoms, (_unquote(data[at:end]), False)]

    def _variable(self, name: str, node: Node) -> list[tuple[Part, bool]]:
        named = node.named_children[0] if node.named_child_count else node
        self.note(name, named.start_byte, named.end_byte)
        value = self.variables.get(name)
        if value is None:
            return [(Hole((name,)), True)]
        if isinstance(value, list):  # an array's name alone is its first element
            return [(part, True) for part in value[0].parts] if value else []
        return [(part, True) for part in value]

    def _braced(self, node: Node) -> list[tuple[Part, bool]]:
        named = node.named_children
        name = self.text(named[0]) if named and named[0].type == "variable_name" else ""
        operator = next((self.text(child) for child in node.children[2:] if not child.is_named), "}")
        if name:
            self.note(name, named[0].start_byte, named[0].end_byte)
        known = self.variables.get(name)
        if name and (operator == "}" or (known and operator in {":-", "-", ":?", "?", ":=", "="})):
            return self._variable(name, named[0])
        return [(Hole(self.names_in(node)), True)]

    def _arithmetic(self, node: Node) -> list[tuple[Part, bool]]:
        for name in changed_in(self.text(node)):
            self.variables.pop(name, None)
        inner = [child for child in node.named_children if child.type != "comment"]
        number = self.number(inner[0]) if len(inner) == 1 else None
        return [(Hole(self.names_in(node)), False) if number is None else (str(number), False)]

    def number(self, node: Node) -> int | None:
        """The value of an arithmetic expression, if all of it is known."""
        if node.type == "binary_expression" and len(node.children) == 3:
            return self._operation(node)
        if node.type == "parenthesized_expression" and node.named_child_count == 1:
            return self.number(node.named_children[0])
        text = self.text(node)
        if node.type in {"variable_name", "word"} and not text.isdecimal():
            parts = self._variable(text, node)
        elif node.type in {"simple_expansion", "expansion", "arithmetic_expansion", "number", "word"}:
            parts = self.atoms(node)
        else:
            return None
        value = joined([part for part, _ in parts])
        known = value[0] if len(value) == 1 else None
        return int(known) if isinstance(known, str) and known.strip().isdecimal() else None

    def _operation(self, node: Node) -> int | None:
        left, right = self.number(node.children[0]), self.number(node.children[2])
        if left is None or right is None:
            return None
        operator = self.text(node.children[1])
        if operator in {"/", "%"}:
            return None if right == 0 else left // right if operator == "/" else left % right
        results = {"+": left + right, "-": left - right, "*": left * right}
        return results.get(operator)

    def _array_of(self, node: Node) -> list[Word] | None:
        """The elements, where a word is ``"${A[@]}"`` of an array that is known."""
        inner = node
        if node.type == "string" and node.named_child_count == 1 and node.end_byte - node.start_byte > 4:
            inner = node.named_children[0]
            if inner.end_byte - inner.start_byte != node.end_byte - node.start_byte - 2:
                return None
        if inner.type != "expansion" or not inner.named_child_count or inner.child_count != 3:
            return None
        first = inner.named_children[0]
        if first.type != "subscript" or not self.text(first).endswith(("[@]", "[*]")):
            return None
        value = self.variables.get(self.text(first)[:-3])
        return list(value) if isinstance(value, list) else None

    def names_in(self, node: Node) -> tuple[str, ...]:
        """The variables that a piece of text depends on, those behind known names too; dice are called RANDOM."""
        names: list[str] = []
        stack = [node]
        while stack:
            one = stack.pop()
            if one.type in {"variable_name", "special_variable_name"}:
                name = self.text(one)
                self.note(name, one.start_byte, one.end_byte)
                value = self.variables.get(name)
                deeper = (
                    [part.names for part in value or () if isinstance(part, Hole)] if value is not None else [(name,)]
                )
                names += [inner for group in deeper for inner in group]
            stack.extend(one.named_children)
        if _DICE.search(self.source.data, node.start_byte, node.end_byte):
            names.append("RANDOM")
        return tuple(dict.fromkeys(names))


def changed_in(text: str) -> list[str]:
    """The variables that a piece of arithmetic gives a new value: ``((n++))``, ``let n+=1``."""
    if "=" not in text and "++" not in text and "--" not in text:
        return []
    return [name for found in _CHANGES.finditer(text) if (name := found[1] or found[2])]


def _is_open(node: Node) -> bool:
    if node.type in {"simple_expansion", "expansion", "command_substitution"}:
        return True
    if node.type != "string" or node.named_child_count != 1:
        return False
    text = (node.text or b"").decode(errors="replace")
    return text == '"$@"' or text.endswith('[@]}"')


def _unescape(raw: str) -> str:
    return re.sub(r"\\(\n|.)", lambda found: "" if found[1] == "\n" else found[1], raw) if "\\" in raw else raw


def _unquote(data: bytes) -> str:
    text = data.decode(errors="replace")
    if "\\" not in text:
        return text
    return re.sub(r'\\(\n|[\\"$`])', lambda found: "" if found[1] == "\n" else found[1], text)


#: Strings in which nothing is expanded, and how long their opening is.
_QUOTED = {"raw_string": 1, "ansi_c_string": 2}
_EXPANSIONS: dict[str, Callable[[Expander, Node], list[tuple[Part, bool]]]] = {
    "string": Expander._string,
    "translated_string": Expander._string,
    "simple_expansion": Expander._simple,
    "expansion": Expander._braced,
    "arithmetic_expansion": Expander._arithmetic,
}
