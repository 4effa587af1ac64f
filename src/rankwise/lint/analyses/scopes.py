"""Which name means what: the scopes of a Python text, in one walk over its tree."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import TypeIs

ScopeKind = Literal["module", "class", "function", "comprehension"]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Names that a newer Python or an interactive shell adds to this Python's builtins.
_ALSO_BUILT_IN = [
    "ExceptionGroup",
    "BaseExceptionGroup",
    "PythonFinalizationError",
    "WindowsError",
    "display",
    "get_ipython",
    "In",
    "Out",
    "_",
    "reveal_type",
    "reveal_locals",
]
BUILTINS = frozenset(dir(builtins)) | frozenset(_ALSO_BUILT_IN)


@dataclass(slots=True, eq=False)
class Scope:
    """One scope and the names that are bound in it.

    Attributes:
        node: The module, class, function, lambda or comprehension that opens it.
        kind: What sort of scope; lambdas are functions.
        parent: The scope around it; None for the module.
        bound: For each name, the nodes that bind it, in the order of the text.
        globals: Names that a ``global`` statement here sends to the module.
        nonlocals: Names that a ``nonlocal`` statement here sends to a scope around it.
    """

    node: ast.AST
    kind: ScopeKind
    parent: Scope | None
    bound: dict[str, list[ast.AST]] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)


class Scopes:
    """All scopes of one text, where each node stands, and nodes by their type."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree, "module", None)
        self.opened: dict[ast.AST, Scope] = {tree: self.module}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.loads: list[tuple[ast.Name, Scope]] = []
        self.has_star_import = False
        self._scope: dict[ast.AST, Scope] = {}
        self._nodes: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self._imported: dict[ast.alias, str] = {}
        self._special: dict[type[ast.AST], Callable[[ast.AST, Scope], None]] = {}
        for kind, visit in _SPECIAL.items():
            self._special[kind] = visit.__get__(self)
        self._annotations = 0
        self._many(tree, tree.body, self.module)

    # Asking.

    def all(self, kind: type[Node]) -> list[Node]:
        """Every node of exactly this type, in the order of the text."""
        return self._nodes.get(kind, [])  # type: ignore[return-value]

    def scope(self, node: ast.AST) -> Scope:
        """The scope in which a node is evaluated (a function's name and defaults: the one around it)."""
        return self._scope.get(node, self.module)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, the nearest first, up to the module."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def owner(self, name: str, scope: Scope) -> Scope | None:
        """The scope whose variable a name means, read in ``scope``; None where none binds it."""
        around: Scope | None = scope
        while around is not None:
            if name in around.globals:
                around = self.module
            if name in around.bound and (around.kind != "class" or around is scope):
                return around
            around = around.parent
        return None

    def bindings(self, name: str, scope: Scope) -> list[ast.AST]:
        """The nodes that bind what a name means in ``scope``."""
        owner = self.owner(name, scope)
        return owner.bound[name] if owner else []

    def only(self, name: str, scope: Scope) -> ast.AST | None:
        """The one node that binds a name, where there is exactly one."""
        found = self.bindings(name, scope)
        return found[0] if len(found) == 1 else None

    def dotted(self, node: ast.AST) -> str:
        """The full name of something imported, ``torch.distributed.barrier``; empty where that is not certain."""
        parts: list[str] = []
        scope = self.scope(node)
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        roots = {self._imported.get(b, "") if isinstance(b, ast.alias) else "" for b in self.bindings(node.id, scope)}
        root = roots.pop() if len(roots) == 1 else ""
        return ".".join([root, *reversed(parts)]) if root else ""

    def called_class(self, node: ast.expr) -> ast.ClassDef | None:
        """The class of this text that a plain name stands for, where only one ``class`` binds it."""
        if not isinstance(node, ast.Name):
            return None
        found = self.only(node.id, self.scope(node))
        return found if isinstance(found, ast.ClassDef) else None

    def value(self, name: str, scope: Scope) -> ast.expr | None:
        """What is assigned to a name, where one plain assignment is all that binds it."""
        found = self.only(name, scope)
        statement = self.parents.get(found) if found is not None else None
        if isinstance(statement, ast.Assign) and found in statement.targets:
            return statement.value
        if isinstance(statement, ast.AnnAssign) and found is statement.target:
            return statement.value
        return None

    # The walk.

    def _one(self, parent: ast.AST, node: ast.AST, scope: Scope) -> None:
        kind = type(node)
        self.parents[node] = parent
        if kind is ast.Constant:
            return
        self._scope[node] = scope
        if kind is ast.Name:
            if type(node.ctx) is not ast.Load:  # type: ignore[attr-defined]
                self._bind(node.id, node, scope)  # type: ignore[attr-defined]
            elif not self._annotations:
                self.loads.append((node, scope))  # type: ignore[arg-type]
            return
        self._nodes[kind].append(node)
        if kind is ast.Attribute:
            self._one(node, node.value, scope)  # type: ignore[attr-defined]
            return
        special = self._special.get(kind)
        if special is not None:
            special(node, scope)
        else:
            self._fields(node, scope)

    def _fields(self, node: ast.AST, scope: Scope) -> None:
        for name in node._fields:
            value = getattr(node, name)
            if type(value) is list:
                for item in value:
                    if isinstance(item, ast.AST):
                        self._one(node, item, scope)
            elif isinstance(value, (ast.expr, ast.stmt, ast.pattern, ast.arguments)):
                self._one(node, value, scope)

    def _many(self, parent: ast.AST, nodes: Iterable[ast.AST | None], scope: Scope) -> None:
        for node in nodes:
            if node is not None:
                self._one(parent, node, scope)

    def _annotation(self, parent: ast.AST, node: ast.AST | None, scope: Scope) -> None:
        if node is not None:
            self._annotations += 1
            self._one(parent, node, scope)
            self._annotations -= 1

    def _bind(self, name: str, node: ast.AST, scope: Scope) -> None:
        if name in scope.globals:
            scope = self.module
        elif name in scope.nonlocals:
            around = self.owner(name, scope.parent or self.module)
            if around is None:
                return
            scope = around
        found = scope.bound.get(name)
        if found is None:
            scope.bound[name] = [node]
        else:
            found.append(node)

    def _open(self, node: ast.AST, kind: ScopeKind, around: Scope) -> Scope:
        self.opened[node] = opened = Scope(node, kind, around)
        return opened

    def _type_params(self, node: ast.AST, scope: Scope) -> None:
        for param in getattr(node, "type_params", ()):
            self._bind(param.name, param, scope)

    def _function(self, node: FunctionNode, scope: Scope) -> None:
        self._bind(node.name, node, scope)
        self._type_params(node, scope)
        self._many(node, node.decorator_list, scope)
        inner = self._open(node, "function", scope)
        self._arguments(node, node.args, inner, scope)
        self._annotation(node, node.returns, scope)
        self._many(node, node.body, inner)

    def _lambda(self, node: ast.Lambda, scope: Scope) -> None:
        inner = self._open(node, "function", scope)
        self._arguments(node, node.args, inner, scope)
        self._one(node, node.body, inner)

    def _arguments(self, parent: ast.AST, args: ast.arguments, inner: Scope, around: Scope) -> None:
        self.parents[args] = parent
        self._many(args, args.defaults, around)
        self._many(args, args.kw_defaults, around)
        for arg in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg):
            if arg is not None:
                self.parents[arg] = args
                self._bind(arg.arg, arg, inner)
                self._annotation(arg, arg.annotation, around)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        self._bind(node.name, node, scope)
        self._type_params(node, scope)
        self._many(node, node.decorator_list, scope)
        self._many(node, node.bases, scope)
        self._many(node, node.keywords, scope)
        self._many(node, node.body, self._open(node, "class", scope))

    def _comprehension(self, node: ast.ListComp | ast.DictComp, scope: Scope) -> None:
        inner = self._open(node, "comprehension", scope)
        for number, part in enumerate(node.generators):
            self.parents[part] = node
            self._one(part, part.iter, inner if number else scope)
            self._one(part, part.target, inner)
            self._many(part, part.ifs, inner)
        elements = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        self._many(node, elements, inner)

    def _walrus(self, node: ast.NamedExpr, scope: Scope) -> None:
        outside = scope
        while outside.kind == "comprehension" and outside.parent is not None:
            outside = outside.parent
        self.parents[node.target] = node
        self._bind(node.target.id, node.target, outside)
        self._one(node, node.value, scope)

    def _annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        self._one(node, node.target, scope)
        self._annotation(node, node.annotation, scope)
        self._many(node, (node.value,), scope)

    def _import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            self.parents[alias] = node
            root = alias.name.split(".")[0]
            self._imported[alias] = alias.name if alias.asname else root
            self._bind(alias.asname or root, alias, scope)

    def _import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            self.parents[alias] = node
            if alias.name == "*":
                self.has_star_import = True
                continue
            self._imported[alias] = "." * node.level + f"{node.module or ''}.{alias.name}".lstrip(".")
            self._bind(alias.asname or alias.name, alias, scope)

    def _named(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping, scope: Scope) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name:
            self._bind(name, node, scope)
        self._fields(node, scope)

    def _global(self, node: ast.Global, scope: Scope) -> None:
        scope.globals.update(node.names)

    def _nonlocal(self, node: ast.Nonlocal, scope: Scope) -> None:
        scope.nonlocals.update(node.names)

    def _type_alias(self, node: ast.AST, scope: Scope) -> None:
        self._type_params(node, scope)
        self._one(node, node.name, scope)  # type: ignore[attr-defined]
        self._annotation(node, node.value, scope)  # type: ignore[attr-defined]


_SPECIAL: dict[type[ast.AST], Callable[..., None]] = {
    ast.FunctionDef: Scopes._function,
    ast.AsyncFunctionDef: Scopes._function,
    ast.Lambda: Scopes._lambda,
    ast.ClassDef: Scopes._class,
    ast.NamedExpr: Scopes._walrus,
    ast.AnnAssign: Scopes._annotated,
    ast.Import: Scopes._import,
    ast.ImportFrom: Scopes._import_from,
    **dict.fromkeys((ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping), Scopes._named),
    ast.Global: Scopes._global,
    ast.Nonlocal: Scopes._nonlocal,
    **dict.fromkeys(_COMPREHENSIONS, Scopes._comprehension),
}
if hasattr(ast, "TypeAlias"):  # Python 3.12
    _SPECIAL[ast.TypeAlias] = Scopes._type_alias


@lru_cache(maxsize=4)
def scopes_of(tree: ast.Module) -> Scopes:
    """The scopes of a tree; the rules of one text share one walk."""
    return Scopes(tree)


def is_function(node: ast.AST | None) -> TypeIs[FunctionNode]:
    """Whether a node is a ``def``, plain or async."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
