"""Names that nothing in a text binds, and how sure that is."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.lint.analyses.scopes import BUILTINS, FunctionNode, Scope, Scopes, is_function
from rankwise.lint.analyses.turns import expects_error

if TYPE_CHECKING:
    from rankwise.lint.script import Script

# With one of these in the text, names may come from where the text does not show.
_MAKES_NAMES = re.compile(
    r"\bexec\(|\bglobals\(\)|\bvars\(\)|\blocals\(\)\[|\bbuiltins\b|__builtins__|__dict__(?:\.update|\[)|run_line_magic|get_ipython"
    r"|\b_convert_?\(|\bglobal_enum\b|\b_simple_enum\b|sys\.modules\[__name__\]|get_config\(\)|run_cell_magic"
)
# Other tools' words for a line whose author knows that the name comes from elsewhere.
_KNOWN_TO_AUTHOR = ("F821", "name-defined", "unknown-name", "undefined-variable", "reportUndefinedVariable")


@lru_cache(maxsize=4)
def undefined(scopes: Scopes) -> tuple[tuple[ast.Name, Scope], ...]:
    """Every read of a name that no scope around it binds; names in double underscores are left out."""
    return tuple(
        (name, scope)
        for name, scope in scopes.loads
        if name.id not in BUILTINS and scopes.owner(name.id, scope) is None and not name.id.startswith("__")
    )


def may_make_names(script: Script, scopes: Scopes) -> bool:
    """Whether the text may bind names where that does not show: star imports, ``exec``, ``globals()``, a module that is handed over."""
    return (
        scopes.has_star_import
        or bool(_MAKES_NAMES.search(script.unit.code))
        or any(_hands_module_over(statement, Path(script.unit.path)) for statement in script.tree.body)
    )


def _hands_module_over(statement: ast.stmt, path: Path) -> bool:
    """Whether it names this module to somebody who may put names into it: ``_init_api("pkg.graph")`` in graph.py, ``bind(__name__)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    mine = "." + (path.parent.name if path.stem == "__init__" else path.stem)
    return isinstance(call, ast.Call) and any(
        (isinstance(one, ast.Name) and one.id == "__name__")
        or (isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.endswith(mine))
        for one in call.args
    )


def is_certain(script: Script, scopes: Scopes, name: ast.Name) -> bool:
    """Whether reading the name fails: no ``try`` takes care of it, no test keeps the line from running."""
    if any(word in script.unit.lines[name.lineno - 1] for word in _KNOWN_TO_AUTHOR):
        return False
    if any(name.id in scope.globals for scope in scopes.opened.values()):
        return False
    below: ast.AST = name
    for above in scopes.above(name):
        if isinstance(above, ast.Try) and below in above.body and any(_takes_name_error(h) for h in above.handlers):
            return False
        if isinstance(above, (ast.With, ast.AsyncWith)) and expects_error(above):
            return False
        if isinstance(above, (ast.If, ast.IfExp)) and below is not above.test and _may_not_run(above.test):
            return False
        below = above
    return True


def function_of(scope: Scope) -> FunctionNode | None:
    """The ``def`` whose code a scope belongs to; None at module and class level."""
    around: Scope | None = scope
    while around is not None and not is_function(around.node):
        around = around.parent if around.kind != "class" else None
    return around.node if around is not None and is_function(around.node) else None


def _takes_name_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = ast.unparse(handler.type)
    return any(word in caught for word in ("NameError", "Exception", "UnboundLocalError"))


def _may_not_run(test: ast.expr) -> bool:
    if isinstance(test, ast.Constant):
        return True
    words = ast.unparse(test).lower()
    return any(word in words for word in ("py2", "py3", "python2", "python3", "version", "type_checking", " in dir("))
