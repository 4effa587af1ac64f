"""Names that exist nowhere, or on some ranks only."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.analyses.installed import lacking_names
from rankwise.lint.analyses.job_view import is_hidden, statement_of
from rankwise.lint.analyses.scopes import FunctionNode, Scope, Scopes, is_function, scopes_of
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.analyses.undefined import function_of, is_certain, may_make_names, undefined
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.branches import asks_who
from rankwise.lint.interpreter.notes import Unbound
from rankwise.lint.interpreter.values import LITERAL_NONE, Instance, Object
from rankwise.lint.library.constructor_table import PASS_ON
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script

#: What a method's own object is called: a test of one of its attributes is no test of it.
_SELF = ast.dump(ast.Name("self", ast.Load()))


@rule("RW804", "error", "", "a name is used that exists only in another function, or nowhere", needs_ranks=False)
def name_of_another_function(script: Script) -> Iterator[Found]:
    scopes = scopes_of(script.tree)
    names = undefined(scopes)
    if script.unit.cells:
        # A notebook's magics may create names that occur nowhere else.
        names = tuple((n, at) for n, at in names if any(n.id in scope.bound for scope in scopes.opened.values()))
    if not names or script.unit.is_fragment or may_make_names(script, scopes):
        return
    marked: set[tuple[str, ast.AST]] = set()
    for name, scope in names:
        key = (name.id, function_of(scope) or script.tree)
        if key in marked or not is_certain(script, scopes, name):
            continue
        marked.add(key)
        where, fix = _where(scopes, name, scope)
        yield Found(name, f"`{name.id}` is not defined here: {where}", fix)


def _where(scopes: Scopes, name: ast.Name, scope: Scope) -> tuple[str, str]:
    """Where the name does exist, and what to do."""
    here = function_of(scope)
    reader = f"`{here.name}`" if here is not None else "this line"
    for other in scopes.opened.values():
        if name.id in other.bound and other.kind != "comprehension":
            line = getattr(other.bound[name.id][0], "lineno", 0)
            if is_function(other.node):
                return _local_of(other.node, other, name.id, line, reader)
            if isinstance(other.node, ast.ClassDef):
                owner = other.node.name
                return (f"it belongs to class {owner}, line {line}", f"write `self.{name.id}` or `{owner}.{name.id}`")
    if here is not None and here.args.args and here.args.args[0].arg == "self" and _is_attribute(scopes, name.id):
        return f"only `self.{name.id}` exists", f"write `self.{name.id}`"
    visible = [*scopes.module.bound, *((here and scopes.opened[here].bound) or ())]
    close = get_close_matches(name.id, visible, n=1, cutoff=0.8)
    if close:
        return (f"nothing here binds it; `{close[0]}` exists", f"write `{close[0]}`, or define `{name.id}` first")
    return ("nothing here binds it", f"import or define `{name.id}`, or pass it to {reader} as an argument")


def _local_of(function: FunctionNode, scope: Scope, name: str, line: int, reader: str) -> tuple[str, str]:
    is_parameter = isinstance(scope.bound[name][0], ast.arg)
    kind = "a parameter" if is_parameter else "a local variable"
    return (
        f"it is {kind} of {function.name}, line {line}",
        f"pass it to {reader} as an argument" + ("" if is_parameter else f", or return it from {function.name}"),
    )


def _is_attribute(scopes: Scopes, name: str) -> bool:
    return any(
        n.attr == name and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name) and n.value.id == "self"
        for n in scopes.all(ast.Attribute)
    )


@rule("RW818", "error", "", "a variable gets its value on some ranks only, and all ranks read it")
def value_of_some_ranks(script: Script) -> Iterator[Found]:
    lacking: defaultdict[tuple[ast.Name | ast.Attribute, str], set[int]] = defaultdict(set)
    hidden = {call.node for call in script.all_calls if is_hidden(call)}
    nones = set()
    for note in script.notes:
        if isinstance(note, Unbound) and note.module is script.module and not _may_choose(note, hidden):
            lacking[note.node, note.history.entry].add(note.history.rank)
            nones |= {note.node} if note.owner is not None else set()
    ranks = {entry.name: {history.rank for history in entry.histories} for entry in script.entries}
    reported = set()
    for (node, entry), without in lacking.items():
        having = ranks[entry] - without
        name = ast.unparse(node)
        # Two ranks there are in any job; a test on rank 2 may be of a job that has no others.
        if (
            having
            and without & {0, 1}
            and name not in reported
            and _is_stored(script.tree, _name(node))
            and not is_caught(script.tree, node)
        ):
            who = "only rank 0 has" if having == {0} else "only some ranks have"
            kind = "AttributeError" if isinstance(node, ast.Attribute) or node in nones else "NameError"
            reported.add(name)
            yield Found(
                node,
                f"{who} given `{name}` a value, and all ranks read it here: {kind} on the others",
                "read it only where it was set, or give it a value (None) on the other ranks",
                severity="error" if entry == "the program" else "warning",
            )


def _is_stored(tree: ast.Module, name: str) -> bool:
    nodes = (one for one in ast.walk(tree) if isinstance(one, (ast.Name, ast.Attribute)))
    return any(isinstance(one.ctx, ast.Store) and _name(one) == name for one in nodes)


#: With one of these in the text, attributes may come from where it does not show.
_SETS_UNSEEN = re.compile(
    r"\bsetattr\b|__setattr__|__getattr|Namespace\(|set_defaults\(|(__dict__|vars\(\w+\))(\.update|\[| = )|= (vars\(|\S+__dict__)"
)


@rule(
    "RW820",
    "error",
    "",
    "an attribute is read that nothing sets, that the library lacks, an option that does not exist, or anything of None",
)
def attribute_never_set(script: Script) -> Iterator[Found]:
    for node, library in lacking_names(script):
        yield Found(
            node,
            f"`{ast.unparse(node)}` raises AttributeError on every rank where {library} is as it is installed here: it has no such name",
            "write a name that the library has, or install the version that has this one",
            severity="warning",
        )
    notes = [one for one in script.notes if isinstance(one, Unbound) and one.owner is not None]
    modules = {call.module for call in script.all_calls} if notes else set()
    is_open = script.unit.is_fragment or any(_SETS_UNSEEN.search(module.text) for module in modules)
    handed = {
        id(value.thing)
        for call in script.all_calls
        if is_hidden(call) or call.name in PASS_ON
        for value in (call.receiver, *call.args, *call.kwargs.values())
    }
    for note in {(id(one.owner), ast.unparse(one.node)): one for one in reversed(notes)}.values():
        owner, mine = note.owner, statement_of(script.tree, note.node)
        if (
            note.module is not script.module
            or (note.history.entry, note.history.rank) != ("the program", 0)
            or not isinstance(note.node, ast.Attribute)
            or not isinstance(note.node.ctx, ast.Load)
            or is_caught(script.tree, note.node)
        ):
            continue
        if owner is LITERAL_NONE:
            what = f"`{ast.unparse(note.node.value)}` is None here"
        elif isinstance(owner, Object):
            what = f"there is no option --{note.node.attr}"
        elif isinstance(owner, Instance) and owner.cls.library_bases <= {"builtins.object"}:
            what = "nothing sets it"
        else:
            continue
        if owner is not LITERAL_NONE and (
            is_open or id(owner) in handed or any(_gives(one.tree, note.node.attr, mine) for one in modules)
        ):
            continue
        yield Found(
            note.node,
            f"`{ast.unparse(note.node)}` raises AttributeError on every rank: {what}",
            "give it a value first, or read what was meant",
        )


def _gives(tree: ast.AST, name: str, besides: ast.AST | None) -> bool:
    """Whether a text sets, declares or deletes an attribute of this name, or has the name as text; `x.n = x.n + 1` can't be the first to do so."""
    own = set(ast.walk(besides)) if besides is not None else set()
    return not own.issuperset(_givers(tree).get(name, ()))


@lru_cache(maxsize=64)
def _givers(tree: ast.AST) -> dict[str, list[ast.AST]]:
    found = defaultdict[str, list[ast.AST]](list)
    for one in ast.walk(tree):
        if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load):
            found[one.attr].append(one)
        elif isinstance(one, ast.AnnAssign):
            found[getattr(one.target, "id", "")].append(one)
        elif isinstance(one, ast.Constant):
            found[str(one.value).strip("-").replace("-", "_")].append(one)
    return found


def _name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else f".{node.attr}"


def _may_choose(note: Unbound, hidden: set[ast.AST]) -> bool:
    """Whether a test around a read asks for the rank or for what is read, or may by a call of what is not at hand."""
    read = {ast.dump(one) for one in (note.node, getattr(note.node, "value", note.node))} - {_SELF}
    return any(
        asks_who(value)
        or any(
            one in hidden or (isinstance(one, (ast.Name, ast.Attribute)) and ast.dump(one) in read)
            for one in ast.walk(test)
        )
        for test, value, _ in note.tests
    )
