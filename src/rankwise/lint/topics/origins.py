"""Where a value comes from: the calls that made it, followed through names, attributes, arguments and returns."""

from __future__ import annotations

import ast

from rankwise.lint.topics.classes import methods, self_attribute, self_attributes
from rankwise.lint.topics.scopes import FunctionNode, Scopes, is_function

# Calls that give back their first argument, or the object they are called on, perhaps wrapped.
_WRAPPERS = frozenset(["DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "compile", "convert_sync_batchnorm", "fully_shard"])  # fmt: skip
_SAME_OBJECT = frozenset(["to", "cuda", "cpu", "train", "eval", "float", "double", "half", "requires_grad_"])
_MAX_DEPTH = 12


class Origins:
    """Follows values in one text; what it cannot follow with certainty has no origin."""

    def __init__(self, scopes: Scopes) -> None:
        self._scopes = scopes
        self._visiting: set[ast.AST] = set()

    def of(self, node: ast.expr) -> list[ast.Call] | None:
        """The calls that may have made a value, all of them; None where that is not certain."""
        if node in self._visiting:
            return []
        if len(self._visiting) > _MAX_DEPTH:
            return None
        self._visiting.add(node)
        try:
            return self._of(node)
        finally:
            self._visiting.discard(node)

    def _of(self, node: ast.expr) -> list[ast.Call] | None:
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Name):
            return self._all(
                [self._of_binding(b) for b in self._scopes.bindings(node.id, self._scopes.scope(node))]
            )
        found = self_attribute(self._scopes, node)
        if found is not None:
            stores = [n for n in self_attributes(self._scopes, *found) if not isinstance(n.ctx, ast.Load)]
            return self._all([self._of_binding(s) for s in stores])
        return None

    def _of_call(self, call: ast.Call) -> list[ast.Call] | None:
        scopes = self._scopes
        word = scopes.dotted(call.func)
        if word.startswith("torch.") and word.rpartition(".")[2] in _WRAPPERS:
            return self.of(call.args[0]) if call.args else None
        if not word and isinstance(call.func, ast.Attribute) and call.func.attr in _SAME_OBJECT:
            return self.of(call.func.value)
        function = scopes.called_function(call.func)
        if function is None:
            return [call]
        return self._of_returns(function, None)

    def _of_returns(self, function: FunctionNode, element: int | None) -> list[ast.Call] | None:
        inside = self._scopes.opened[function]
        found: list[list[ast.Call] | None] = []
        for statement in self._scopes.all(ast.Return):
            if self._scopes.scope(statement) is inside:
                value = statement.value
                if element is not None:
                    is_fit = isinstance(value, ast.Tuple) and element < len(value.elts)
                    value = value.elts[element] if is_fit else None  # type: ignore[union-attr]
                found.append(self.of(value) if value is not None else None)
        return self._all(found)

    def _of_binding(self, binder: ast.AST) -> list[ast.Call] | None:
        parent = self._scopes.parents.get(binder)
        if isinstance(binder, ast.arg):
            return self._of_parameter(binder)
        if isinstance(parent, (ast.Assign, ast.AnnAssign)):
            return self.of(parent.value) if parent.value is not None else []
        statement = self._scopes.parents.get(parent) if isinstance(parent, ast.Tuple) else None
        if isinstance(statement, ast.Assign) and isinstance(parent, ast.Tuple):
            return self._of_element(statement.value, parent.elts.index(binder))  # type: ignore[arg-type]
        return None

    def _of_element(self, value: ast.expr, number: int) -> list[ast.Call] | None:
        if isinstance(value, ast.Tuple) and number < len(value.elts):
            return self.of(value.elts[number])
        function = self._scopes.called_function(value.func) if isinstance(value, ast.Call) else None
        return self._of_returns(function, number) if function is not None else None

    def _of_parameter(self, param: ast.arg) -> list[ast.Call] | None:
        args = self._scopes.parents[param]
        function = self._scopes.parents[args]
        if not is_function(function) or not isinstance(args, ast.arguments) or param not in args.args:
            return None
        position = args.args.index(param)
        holder = self._scopes.parents.get(function)
        if isinstance(holder, ast.ClassDef):
            is_constructor = function.name == "__init__" or (
                function.name == "init" and "__init__" not in methods(holder)
            )
            return self._of_handed(holder, param.arg, position - 1) if is_constructor else None
        return self._of_handed(function, param.arg, position)

    def _of_handed(
        self, called: FunctionNode | ast.ClassDef, name: str, position: int
    ) -> list[ast.Call] | None:
        """What the text hands over for a parameter; not certain if the callable is used in another way too."""
        owner = self._scopes.scope(called)
        found: list[list[ast.Call] | None] = []
        for load, at in self._scopes.loads:
            if load.id != called.name or self._scopes.owner(load.id, at) is not owner:
                continue
            call = self._scopes.parents[load]
            if not (isinstance(call, ast.Call) and call.func is load):
                return None
            given = {k.arg: k.value for k in call.keywords}.get(name)
            if given is None and position < len(call.args):
                given = call.args[position]
            found.append(self.of(given) if given is not None else None)
        return self._all(found)

    @staticmethod
    def _all(found: list[list[ast.Call] | None]) -> list[ast.Call] | None:
        if not found or None in found:
            return None
        return [call for calls in found for call in calls or ()]

    def last_layer(self, call: ast.Call) -> ast.Call | None:
        """The layer whose result a module made by this call returns; None where that is not certain."""
        word = self._scopes.dotted(call.func)
        if word == "torch.nn.Sequential":
            last = call.args[-1] if call.args else None
            return self._last_of(last) if isinstance(last, ast.expr) else None
        if word:
            return call
        cls = self._scopes.called_class(call.func)
        forward = methods(cls).get("forward") if cls is not None else None
        returned = self._returned(forward) if forward is not None else None
        if isinstance(returned, ast.Call) and self_attribute(self._scopes, returned.func) is not None:
            return self._last_of(returned.func)
        return None

    def _last_of(self, node: ast.expr) -> ast.Call | None:
        made = self.of(node)
        if made is None or len(made) != 1:
            return None
        word = self._scopes.dotted(made[0].func)
        return (
            made[0]
            if word.startswith("torch.nn.") and word != "torch.nn.Sequential"
            else self.last_layer(made[0])
        )

    def _returned(self, forward: FunctionNode) -> ast.expr | None:
        """The expression that a forward without branches returns, through a last assignment to a name."""
        returns = [
            r for r in self._scopes.all(ast.Return) if self._scopes.scope(r) is self._scopes.opened[forward]
        ]
        if len(returns) != 1 or returns[0] is not forward.body[-1]:
            return None
        value = returns[0].value
        before = forward.body[-2] if len(forward.body) > 1 else None
        if isinstance(value, ast.Name) and isinstance(before, ast.Assign) and len(before.targets) == 1:
            target = before.targets[0]
            return before.value if isinstance(target, ast.Name) and target.id == value.id else None
        return value
