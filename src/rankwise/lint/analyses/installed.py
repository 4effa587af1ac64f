"""What libraries that are installed here do not have, by their text: a library is found, never imported."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.library.names import PREFIXES, canonical
from rankwise.lint.program import file_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script

#: Modules that the tables know; others may get names from their libraries' C.
_MODULES = frozenset(name.rstrip(".") for name in PREFIXES.values())
#: With one of these in its text, a module may have names that stand nowhere.
_MAKES_NAMES = re.compile(r"__getattr__|\bglobals\(|\bvars\(|sys\.modules\[__name__\]|setattr\(sys|\bexec\(")
_STAR = re.compile(r"from\s+(\S+)\s+import\s+\*")
#: Whoever asks first, may have an answer for a library that is older or newer.
_ASKS = re.compile(r"hasattr|getattr|version|find_spec", re.IGNORECASE)


def lacking_names(script: Script) -> Iterator[tuple[ast.Attribute, str]]:
    """Names that the text takes from a library which does not have them, each with its module; Python itself names an import that fails, at once."""
    scopes = scopes_of(script.tree)
    stored = {node.attr for node in scopes.all(ast.Attribute) if not isinstance(node.ctx, ast.Load)}
    told = set[tuple[str, str]]()
    for node in scopes.all(ast.Attribute):
        module = scopes.dotted(node.value) if node.attr not in stored else ""
        if module and (module, node.attr) not in told and _lacks(script, node, module, node.attr):
            told.add((module, node.attr))
            yield node, module


def _lacks(script: Script, node: ast.AST, module: str, name: str) -> bool:
    if canonical(module) not in _MODULES:
        return False
    script.read.update(path for path in [_path_of(module)] if path is not None)
    if not lacks(module, name) or is_caught(script.tree, node):
        return False
    around = scopes_of(script.tree).above(node)
    return not any(isinstance(one, (ast.If, ast.IfExp)) and _ASKS.search(ast.unparse(one.test)) for one in around)


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
