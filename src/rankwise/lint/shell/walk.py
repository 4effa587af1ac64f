"""The walk through a parsed text: which commands it runs, with which variables, in which order."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rankwise.lint.shell.branches import added, as_known, assigned_in, common_values
from rankwise.lint.shell.expanding import Expander, Value, changed_in
from rankwise.lint.shell.looping import loop_values
from rankwise.lint.shell.model import Command, Reading, Reference, Setting
from rankwise.lint.shell.nested import given_scripts
from rankwise.lint.shell.words import Word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tree_sitter import Node, Parser

    from rankwise.lint.shell.source import Source

#: A loop whose body times its turns, and those of the loops around it, is longer than this is read once.
_UNROLLED_BYTES = 40_000
_DEEPEST = 60
_TEXT_IN_TEXT = 3
_BLOCKS = {
    "program", "list", "pipeline", "compound_statement", "do_group", "ERROR", "negated_command",
    "variable_assignments", "redirected_statement", "subshell", "elif_clause", "else_clause",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What stands around a node."""

    is_background: bool = False
    arms: tuple[tuple[int, int], ...] = ()
    under: tuple[Command, ...] = ()
    in_function: bool = False
    in_open_loop: bool = False
    is_doubtful: bool = False
    depth: int = 0
    turns: int = 1


@dataclass(slots=True)
class Walk:
    """One walk; it changes what it knows of variables as it goes."""

    source: Source
    parser: Parser
    reading: Reading
    variables: dict[str, Value] = field(default_factory=dict)
    exported: Mapping[str, Setting] = field(default_factory=dict)
    exports_all: bool = False
    later: list[tuple[Node, Around]] = field(default_factory=list)
    arms_seen: int = 0

    def run(self, root: Node, around: Around | None = None) -> None:
        """Walk through a tree; bodies of functions come last, with what is known at the end."""
        self._visit(root, around or Around())
        while self.later:
            bodies, self.later = self.later, []
            for name in [name for name, count in self.reading.assigned.items() if count > 1]:
                self.variables.pop(name, None)
            for body, where in bodies:
                self._visit(body, where)

    def _visit(self, node: Node, around: Around) -> None:
        if around.depth > _DEEPEST:
            return
        if node.type in _BLOCKS:
            self._block(node, around)
        elif visit := _VISITS.get(node.type):
            visit(self, node, around)

    def _block(self, node: Node, around: Around) -> None:
        children = node.children
        is_doubtful = around.is_doubtful or node.type == "ERROR"
        if node.type == "compound_statement" and self.source.data.startswith(b"((", node.start_byte):
            self._expander(around).names_in(node)
            for name in changed_in(self.source.data[node.start_byte : node.end_byte].decode(errors="replace")):
                self.variables.pop(name, None)
            return
        saved = (dict(self.variables), self.exported) if node.type == "subshell" else None
        plain = replace(around, is_doubtful=is_doubtful, depth=around.depth + 1)
        behind = plain if plain.is_background else replace(plain, is_background=True)
        for number, child in enumerate(children):
            if not child.is_named:
                continue
            then = children[number + 1].type if number + 1 < len(children) else ""
            inner = behind if then == "&" else plain
            self._visit(child, inner)
            if child.type == "heredoc_redirect":
                self._heredoc(child, inner, node.start_byte)
        if saved:
            self.variables, self.exported = saved

    def _expander(self, around: Around) -> Expander:
        def note(name: str, start: int, end: int) -> None:
            self.reading.references.append(Reference(name, self.source, start, end))

        def inner(node: Node) -> None:
            saved = dict(self.variables), self.exported
            for child in node.named_children:
                self._visit(child, replace(around, depth=around.depth + 1))
            self.variables, self.exported = saved

        return Expander(self.source, self.variables, note, inner)

    # Assignments

    def _assign(self, node: Node, around: Around, *, exported: bool = False) -> Setting | None:
        expander = self._expander(around)
        name_node = node.child_by_field_name("name")
        value_node = node.child_by_field_name("value")
        if name_node is None or name_node.type != "variable_name":
            if name_node is not None:  # A[3]=x
                self.variables.pop(expander.text(name_node).partition("[")[0], None)
            return None
        name = expander.text(name_node)
        adds = any(child.type == "+=" for child in node.children)
        value: Value
        if value_node is not None and value_node.type == "array":
            value = [word for child in value_node.named_children for word in expander.fields(child)]
        else:
            value = expander.value(value_node)
        if adds:
            value = added(self.variables.get(name), value)
        raw = expander.text(value_node) if value_node is not None else ""
        parts = value if isinstance(value, tuple) else ()
        span = expander.span(value_node) if value_node is not None else expander.span(node)
        setting = Setting(
            name=name,
            value=Word(raw=raw, parts=parts, span=span),
            span=expander.span(node),
            is_exported=exported or name in self.exported or self.exports_all,
        )
        self._keep(setting, value)
        return setting

    def _keep(self, setting: Setting, value: Value) -> None:
        name = setting.name
        self.variables[name] = value
        self.reading.assigned[name] = self.reading.assigned.get(name, 0) + 1
        self.reading.settings.append(setting)
        if setting.is_exported:
            self.exported = {**self.exported, name: setting}

    def _assignment(self, node: Node, around: Around) -> None:
        self._assign(node, around)

    def _declaration(self, node: Node, around: Around) -> None:
        words = [child for child in node.children if not child.is_named or child.type == "word"]
        texts = [self._expander(around).text(word) for word in words]
        exported = "export" in texts[:1] or any(re.fullmatch(r"-[a-zA-Z]*x[a-zA-Z]*", text) for text in texts)
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child, around, exported=exported)
            elif child.type == "variable_name" and exported:
                self._export(child, around)

    def _export(self, node: Node, around: Around) -> None:
        expander = self._expander(around)
        name = expander.text(node)
        value = self.variables.get(name)
        if isinstance(value, tuple):
            earlier = next((one for one in reversed(self.reading.settings) if one.name == name), None)
            span = earlier.span if earlier else expander.span(node)
            raw = earlier.value.raw if earlier else name
            word = Word(raw=raw, parts=value, span=earlier.value.span if earlier else span)
            setting = Setting(name=name, value=word, span=span, is_exported=True)
            self.reading.settings.append(setting)
            self.exported = {**self.exported, name: setting}

    def _unset(self, node: Node, around: Around) -> None:
        expander = self._expander(around)
        for child in node.named_children:
            name = expander.text(child)
            self.variables.pop(name, None)
            self.exported = {key: one for key, one in self.exported.items() if key != name}

    # Blocks that may or may not run

    def _if(self, node: Node, around: Around) -> None:
        arms: list[list[Node]] = [[]]
        for child in node.named_children:
            if child.type in {"elif_clause", "else_clause"}:
                arms.append([child])
            else:
                arms[-1].append(child)
        has_else = any(child.type == "else_clause" for child in node.named_children)
        self._branches(arms, around, is_complete=has_else)

    def _case(self, node: Node, around: Around) -> None:
        items = [child for child in node.named_children if child.type == "case_item"]
        self._branches([item.named_children for item in items], around, is_complete=False)

    def _branches(self, arms: list[list[Node]], around: Around, *, is_complete: bool) -> None:
        self.arms_seen += 1
        number = self.arms_seen
        before, exported = self.variables, self.exported
        ends: list[dict[str, Value]] = [] if is_complete else [before]
        exports: dict[str, Setting] | None = None
        for arm, nodes in enumerate(arms):
            self.variables, self.exported = dict(before), exported
            for node in nodes:
                where = replace(around, arms=(*around.arms, (number, arm)), depth=around.depth + 1)
                self._visit(node, where)
            ends.append(self.variables)
            if self.exported is not exported:
                exports = {**(exports or exported), **self.exported}
        self.variables = common_values(ends)
        if exports is not None:
            self.exported = {name: as_known(one, self.variables, exported) for name, one in exports.items()}
        else:
            self.exported = exported

    def _for(self, node: Node, around: Around) -> None:
        body = node.child_by_field_name("body")
        if body is None:
            return
        expander = self._expander(around)
        name, values = loop_values(node, expander)
        turns = around.turns * len(values or ())
        if values is not None and turns * (body.end_byte - body.start_byte) <= _UNROLLED_BYTES:
            for value in values:
                self.variables[name] = (value,)
                self._visit(body, replace(around, depth=around.depth + 1, turns=turns))
        else:
            self._loop(body, around, name)
        self.variables[name] = None

    def _while(self, node: Node, around: Around) -> None:
        self._loop(node, around, "")

    def _loop(self, body: Node, around: Around, name: str) -> None:
        """A loop of unknown length: what it assigns is not known in it."""
        changed = {name, *assigned_in(body)}
        for one in changed:
            self.variables[one] = None
        inner = replace(around, in_open_loop=True, depth=around.depth + 1)
        for child in body.named_children if body.type != "do_group" else [body]:
            self._visit(child, inner)
        for one in changed:
            self.variables[one] = None

    def _function(self, node: Node, around: Around) -> None:
        body = node.child_by_field_name("body")
        if body is not None:
            self.later.append((body, replace(around, in_function=True, depth=around.depth + 1)))

    # Commands

    def _command(self, node: Node, around: Around) -> None:
        expander = self._expander(around)
        own: list[Setting] = []
        words: list[Word] = []
        spans: list[Node] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                own += self._prefix(child, expander)
            elif child.type == "command_name":
                words += expander.fields(child.named_children[0]) if child.named_child_count else []
                spans.append(child)
            elif child.type == "heredoc_redirect":
                self._heredoc(child, around, node.start_byte)
            elif not child.type.endswith("_redirect"):
                words += expander.fields(child)
                spans.append(child)
        if not words:
            return
        span = self.source.span(node.start_byte, spans[-1].end_byte if spans else node.end_byte)
        command = Command(
            words=tuple(words),
            span=span,
            env={**self.exported, **{one.name: one for one in own}} if own else self.exported,
            is_background=around.is_background,
            arms=around.arms,
            under=around.under,
            in_function=around.in_function,
            in_open_loop=around.in_open_loop,
            is_doubtful=around.is_doubtful or node.has_error,
        )
        self.reading.commands.append(command)
        self._after(command, spans, around)

    def _after(self, command: Command, nodes: list[Node], around: Around) -> None:
        """What a command does to the variables, and the texts that it gives to another shell."""
        first = command.words[0].text
        if first == "set" and any(word.text in {"-a", "-o allexport"} for word in command.words[1:]):
            self.exports_all = True
        if first in {"read", "mapfile", "readarray", "getopts", "printf", "let", "eval", "source", "."}:
            for word in command.words[1:]:
                for name in [word.text or "", *changed_in(word.text or "")]:
                    self.variables.pop(name, None)
        if len(around.under) < _TEXT_IN_TEXT:
            for node in given_scripts(command, nodes):
                escaped = b'\\"$`' if node.type == "string" else b""
                self._text_in(
                    self.source.inner(node.start_byte + 1, node.end_byte - 1, unescape=escaped), command, around
                )

    def _text_in(self, source: Source, command: Command, around: Around) -> None:
        inner = Walk(
            source=source,
            parser=self.parser,
            reading=self.reading,
            variables=dict(self.variables),
            exported=command.env,
            arms_seen=self.arms_seen + 1000 * (len(around.under) + 1),
        )
        where = replace(around, under=(*around.under, command), is_background=False, depth=0)
        where = replace(where, is_background=around.is_background)
        inner.run(self.parser.parse(source.data).root_node, where)

    def _prefix(self, node: Node, expander: Expander) -> list[Setting]:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None or name.type != "variable_name":
            return []
        is_array = value is not None and value.type == "array"
        word = Word(
            raw=expander.text(value) if value else "",
            parts=() if is_array else expander.value(value),
            span=expander.span(value) if value else expander.span(node),
        )
        setting = Setting(name=expander.text(name), value=word, span=expander.span(node), is_exported=True)
        self.reading.settings.append(setting)
        return [setting]

    def _heredoc(self, node: Node, around: Around, start: int) -> None:
        """A script that is written or fed by ``<<EOF``: read it as one, if the command before takes scripts."""
        body = next((child for child in node.named_children if child.type == "heredoc_body"), None)
        command = self.reading.commands[-1] if self.reading.commands else None
        if body is None or command is None or len(around.under) >= _TEXT_IN_TEXT:
            return
        names = {(word.text or "").rsplit("/", 1)[-1] for word in command.words}
        target = self.source.data[start : body.start_byte]
        if not names & {"bash", "sh", "sbatch", "ssh", "zsh"} and not re.search(rb"\.(sh|sbatch|slurm)\b", target):
            return
        self._text_in(self.source.inner(body.start_byte, body.end_byte, unescape=b"$`\\"), command, around)


_VISITS: dict[str, Callable[[Walk, Node, Around], None]] = {
    "command": Walk._command,
    "variable_assignment": Walk._assignment,
    "declaration_command": Walk._declaration,
    "unset_command": Walk._unset,
    "if_statement": Walk._if,
    "case_statement": Walk._case,
    "for_statement": Walk._for,
    "c_style_for_statement": Walk._for,
    "while_statement": Walk._while,
    "function_definition": Walk._function,
}
