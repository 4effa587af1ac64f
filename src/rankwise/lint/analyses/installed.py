"""What libraries that are installed here do not have, by their text: a library is found, never imported."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import has_unread
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.library.names import PREFIXES, canonical
from rankwise.lint.program import file_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.scopes import Scopes
    from rankwise.lint.script import Script

#: Modules that the tables know; others may get names from their libraries' C.
_MODULES = frozenset(name.rstrip(".") for name in PREFIXES.values())
#: With one of these in its text, a module may have names that stand nowhere.
_MAKES_NAMES = re.compile(r"__getattr__|\bglobals\(|\bvars\(|sys\.modules\[__name__\]|setattr\(sys|\bexec\(")
_STAR = re.compile(r"from\s+(\S+)\s+import\s+\*")
#: A program with one of these may have an answer for a library that is older or newer.
_ASKS = re.compile(r"(?<![a-z])version|V(ersion|ERSION)|find_spec|^AttributeError$")


def lacking_names(script: Script) -> Iterator[tuple[ast.Attribute, str]]:
    """Names that the text takes from a library which does not have them, each with its module; Python itself names an import that fails, at once."""
    scopes = scopes_of(script.tree)
    found = set[tuple[str, str]]()
    for node in scopes.all(ast.Attribute):
        module = scopes.dotted(node.value)
        if module and (module, node.attr) not in found and _lacks(script, node, module, node.attr):
            found.add((module, node.attr))
            yield node, module


def _lacks(script: Script, node: ast.AST, module: str, name: str) -> bool:
    if canonical(module) not in _MODULES or name.startswith("__"):
        return False
    script.project.read.update(path for path in [_path_of(module)] if path is not None)
    if not lacks(module, name) or is_caught(script.tree, node):
        return False
    modules = script.project.loaded()
    trees = [script.tree, *(one.tree for one in modules)]
    return not any(has_unread(tree, modules) or _may_know(tree, module, name) for tree in trees)


def _may_know(tree: ast.Module, module: str, name: str) -> bool:
    """Whether a text may give a module a name, or asks which version of its library is installed, or what that has."""
    scopes, library = scopes_of(tree), module.partition(".")[0]
    for one in ast.walk(tree):
        match one:
            case ast.Constant(value=str(text)) if text.rpartition(".")[2] == name:
                return True
            case ast.keyword(arg=word) if word == name:
                return True
            case ast.Attribute(attr=word, ctx=ast.Store() | ast.Del()) if word == name:
                return True
            case ast.Call(func=ast.Name(id="hasattr"), args=[asked, *_]) if scopes.dotted(asked).startswith(library):
                return True
            case ast.Name(id=word) | ast.Attribute(attr=word) if _ASKS.search(word) and not _is_shown(scopes, one):
                return True
    return False


def _is_shown(scopes: Scopes, node: ast.AST) -> bool:
    """Whether a value is only handed to a call of which nothing comes back, as to ``print``."""
    around = [*takewhile(lambda one: not isinstance(one, ast.stmt), scopes.above(node))]
    is_call = bool(around) and isinstance(around[-1], ast.Call) and isinstance(scopes.parents[around[-1]], ast.Expr)
    return is_call and not any(isinstance(one, ast.Compare) for one in around)


@lru_cache(maxsize=4096)
def lacks(module: str, name: str) -> bool:
    """Whether an installed module surely has no such name: neither it nor what it takes all names from has the word."""
    path = _path_of(module)
    text = path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
    if path is None or not text or re.search(rf"\b{name}\b", text) or _MAKES_NAMES.search(text):
        return False
    is_package = path.stem == "__init__"
    if is_package and any(path.parent.glob(f"{name}*")):
        return False
    package = module if is_package else module.rpartition(".")[0]
    return all(lacks(resolve_name(star, package), name) for star in _STAR.findall(text))


def versions() -> list[str]:
    """Where the libraries lie that `lacking_names` reads, and which versions they are."""
    paths = [path for top in sorted({name.partition(".")[0] for name in _MODULES}) if (path := _path_of(top))]
    return [str(one) for path in paths for one in (path, *sorted(path.parents[1].glob(f"{path.parent.name}-*info")))]


@lru_cache(maxsize=256)
def _path_of(module: str) -> Path | None:
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or Path(spec.origin).name != "__init__.py":
        return None
    return file_of(Path(spec.origin).parent, rest)
