"""Expressions of the simulated run: constants are computed, names and attributes looked up, the rest is mixed."""

from __future__ import annotations

import ast
import builtins
import operator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rankwise.lint.interpreter.attributes import attribute, guess
from rankwise.lint.interpreter.branches import asks_who, each_way
from rankwise.lint.interpreter.defining import function_of
from rankwise.lint.interpreter.history import Loop
from rankwise.lint.interpreter.looping import element_of, to_unroll
from rankwise.lint.interpreter.notes import (
    is_by_count,
    is_by_ranks,
    is_counted,
    note_comparison,
    note_quotient,
    note_read,
    note_test,
    note_unbound,
)
from rankwise.lint.interpreter.operators import BINARY, compare, compute, of_all
from rankwise.lint.interpreter.run import Scope
from rankwise.lint.interpreter.values import (
    ANY,
    LITERAL_NONE,
    NUMBER,
    UNKNOWN,
    Call,
    Guard,
    Items,
    Library,
    Method,
    Object,
    Role,
    Spread,
    Value,
    choice_of,
    is_number,
    known,
    mixed,
)
from rankwise.lint.library.constructor_table import PASS_ON, RECOUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.lint.interpreter.run import Run


def evaluate(run: Run, scope: Scope, node: ast.AST | None) -> Value:
    """The value of an expression."""
    if node is None:
        return ANY
    run.budget -= 1
    doing = _EXPRESSIONS.get(type(node))
    return doing(run, scope, node) if doing is not None else _parts(run, scope, node)


def _parts(run: Run, scope: Scope, node: ast.AST) -> Value:
    return mixed([evaluate(run, scope, part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)])


def _constant(_run: Run, _scope: Scope, node: ast.Constant) -> Value:
    return LITERAL_NONE if node.value is None else known(node.value)


def _name(run: Run, scope: Scope, node: ast.Name) -> Value:
    value = scope.find(node.id)
    if value is not None:
        return value
    if node.id in _BUILTINS:
        return Value(thing=Library(f"builtins.{node.id}"))
    note_unbound(run, scope, node)
    return guess(run, node.id)


def _attribute(run: Run, scope: Scope, node: ast.Attribute) -> Value:
    owner = evaluate(run, scope, node.value)
    note_read(run, scope, node, owner)
    return attribute(run, owner, node.attr, node)


def _call(run: Run, scope: Scope, node: ast.Call) -> Value:
    func = evaluate(run, scope, node.func)
    args: list[Value] = []
    has_star = False
    for one in node.args:
        if isinstance(one, ast.Starred):
            value = evaluate(run, scope, one.value)
            whole = isinstance(value.thing, Items) and value.thing.is_whole
            args.extend(value.thing.values if whole else [])
            has_star = has_star or not whole
        else:
            args.append(evaluate(run, scope, one))
    kwargs = {}
    for keyword in node.keywords:
        value = evaluate(run, scope, keyword.value)
        if keyword.arg is not None:
            kwargs[keyword.arg] = value
        else:
            has_star = not _add_table(kwargs, value) or has_star
            if (rest := mixed((value,))).spread:
                kwargs["**"] = rest  # what is made of a batch's parts differs as the batch does
    return run.call(run, func, tuple(args), kwargs, node, scope=scope, has_star=has_star)


def _add_table(kwargs: dict[str, Value], value: Value) -> bool:
    thing = value.thing
    if not isinstance(thing, Items) or thing.keys is None:
        return False
    for key, one in zip(thing.keys, thing.values, strict=False):
        if isinstance(key.const, str):
            kwargs[key.const] = one
    return thing.is_whole


def _binary(run: Run, scope: Scope, node: ast.BinOp) -> Value:
    left, right = evaluate(run, scope, node.left), evaluate(run, scope, node.right)
    if isinstance(left.thing, Items) and isinstance(node.op, ast.Add) and isinstance(right.thing, Items):
        whole = left.thing.is_whole and right.thing.is_whole and left.thing.keys is right.thing.keys is None
        return Value(thing=Items([*left.thing.values, *right.thing.values], kind=left.thing.kind, is_whole=whole))
    if isinstance(node.op, (ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor)) and (
        isinstance(left.thing, Items) or isinstance(right.thing, Items)
    ):
        parts = [one.thing for one in (left, right) if isinstance(one.thing, Items)]
        kind = "numbers" if any(one.kind == "numbers" for one in parts) else "set"
        return replace(mixed((left, right)), thing=Items([mixed((left, right))], kind=kind, is_whole=False))
    listed = left if isinstance(left.thing, Items) else right
    if isinstance(listed.thing, Items) and isinstance(node.op, ast.Mult):
        value = replace(listed, thing=Items(list(listed.thing.values), kind=listed.thing.kind, is_whole=False))
        return of_all(run, scope.module, node, (left, right), value)
    doing = BINARY.get(type(node.op))
    value = compute(doing, left, right) if doing is not None else mixed((left, right))
    note_quotient(run, scope, node, left, right)
    if isinstance(node.op, ast.Div) and is_counted(left) and is_by_count(right) and not is_by_ranks(right):
        value = replace(value, origin=value.origin | {"ratio"})
    return of_all(run, scope.module, node, (left, right), value)


def _unary(run: Run, scope: Scope, node: ast.UnaryOp) -> Value:
    value = evaluate(run, scope, node.operand)
    const: Any = UNKNOWN
    if isinstance(node.op, ast.Not):
        truth = run.truth(value)
        const = UNKNOWN if truth is None else not truth
    elif value.is_known and isinstance(value.const, (int, float)):
        const = -value.const if isinstance(node.op, ast.USub) else value.const
    result = Value(value.spread, value.origin, const, via=value.via)
    return of_all(run, scope.module, node, (value,), result)


def _compare(run: Run, scope: Scope, node: ast.Compare) -> Value:
    left = evaluate(run, scope, node.left)
    results = []
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = evaluate(run, scope, right_node)
        note_comparison(run, scope, node, left, right)
        made = Call(name="operator.Compare", node=node, module=scope.module, args=(left, right), contexts=run.contexts)
        results.append(compare(op, left, right).given_by(made))
        left = right
    if len(results) == 1:
        return results[0]
    value = mixed(results)
    truths = [result.truth() for result in results]
    const = False if False in truths else UNKNOWN if None in truths else True
    return Value(spread=value.spread, origin=value.origin, const=const)


def _boolean(run: Run, scope: Scope, node: ast.BoolOp) -> Value:
    """Operands that are decided by who the rank is guard those to their right."""
    is_and, before, open_values, seen = isinstance(node.op, ast.And), run.guards, [], []
    result: Value | None = None
    for operand in node.values:
        value = evaluate(run, scope, operand)
        seen.append(value)
        truth = run.truth(value)
        if truth is None:
            open_values.append(value)
            continue
        if truth is not is_and:
            result = value
            break
        if asks_who(value):
            run.guards = (*run.guards, Guard(operand, scope.module, value.origin, truth, len(run.stack)))
    if len(run.guards) > len(before):
        run.implied[node] = run.guards[len(before) :]
    run.guards = before
    everything = mixed(seen)
    if result is not None:
        thing = result.thing if not open_values else None
        const = result.const if result.is_known and not open_values and thing is None else not is_and
        return Value(spread=everything.spread, origin=everything.origin, const=const, thing=thing)
    if not open_values:
        last = seen[-1]
        return Value(everything.spread, everything.origin, last.const, last.thing, last.path, everything.via)
    rest = mixed(open_values)
    thing = next((value.thing for value in open_values if value.thing is not None), None)
    return Value(rest.spread, rest.origin, thing=thing, path=open_values[-1].path, via=rest.via)


def _conditional(run: Run, scope: Scope, node: ast.IfExp) -> Value:
    test = evaluate(run, scope, node.test)
    note_test(run, scope, node.test, test)
    truth = run.truth(test)
    if truth is not None:
        taken = node.body if truth else node.orelse
        if not asks_who(test):
            return evaluate(run, scope, taken)
        with run.within("guards", Guard(node.test, scope.module, test.origin, truth, len(run.stack))):
            value = evaluate(run, scope, taken)
            return value if _is_passed_on(run, scope, node) else run.colour(value)
    return each_way(
        run, scope.module, node, test, [partial(evaluate, run, scope, arm) for arm in (node.body, node.orelse)]
    )


def _is_passed_on(run: Run, scope: Scope, node: ast.IfExp) -> bool:
    """Whether both arms give the same, as `tqdm(batches)` and `batches` do."""
    return ast.dump(_passed_on(run, scope, node.body)) == ast.dump(_passed_on(run, scope, node.orelse))


def _passed_on(run: Run, scope: Scope, node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Call) and node.args and isinstance(getattr(node.func, "value", node.func), ast.Name):
        name = getattr(evaluate(run, scope, node.func).thing, "name", "")
        return _passed_on(run, scope, node.args[0]) if name in PASS_ON - RECOUNTS else node
    return node


def _display(run: Run, scope: Scope, node: ast.List | ast.Tuple | ast.Set) -> Value:
    values, is_whole = [], True
    for one in node.elts:
        if isinstance(one, ast.Starred):
            inner = evaluate(run, scope, one.value)
            if isinstance(inner.thing, Items) and inner.thing.is_whole and inner.thing.keys is None:
                values.extend(inner.thing.values)
            else:
                is_whole = False
                values.append(mixed((inner,)))
        else:
            values.append(evaluate(run, scope, one))
    kind = {ast.List: "list", ast.Tuple: "tuple", ast.Set: "set"}[type(node)]
    # The spread of the parts is found by `mixed`; a display is as different as its parts are.
    return Value(thing=Items(values, kind=kind, is_whole=is_whole))


def _dict(run: Run, scope: Scope, node: ast.Dict) -> Value:
    keys, values, is_whole = [], [], True
    for key, one in zip(node.keys, node.values, strict=True):
        value = evaluate(run, scope, one)
        if key is None:
            is_whole = (
                isinstance(value.thing, Items) and value.thing.keys is not None and value.thing.is_whole and is_whole
            )
            if isinstance(value.thing, Items) and value.thing.keys is not None:
                keys.extend(value.thing.keys)
                values.extend(value.thing.values)
        else:
            keys.append(evaluate(run, scope, key))
            values.append(value)
    return Value(thing=Items(values, keys=keys, kind="dict", is_whole=is_whole))


def _subscript(run: Run, scope: Scope, node: ast.Subscript) -> Value:
    owner, key = evaluate(run, scope, node.value), evaluate(run, scope, node.slice)
    thing = owner.thing
    if isinstance(thing, Library) and thing.name == "os.environ":
        return run.call(run, Value(thing=Library("os.environ.__getitem__")), (key,), {}, node, scope=scope)
    part = _part(thing, key)
    if part is not None:
        return part
    if isinstance(thing, Method) and thing.name == "shape" and type(key.const) is int:
        # How long the samples of a batch are differs, how many they are does not.
        of = thing.receiver if key.const else ANY
        return Value(of.spread, of.origin, thing=NUMBER)
    if isinstance(node.slice, ast.Slice) and asks_who(key):
        # `files[rank::world_size]`: a share of this rank's, perhaps longer than others'.
        return Value(key.spread, mixed((owner, key)).origin | {"share"}, path=owner.path)
    if isinstance(node.slice, ast.Slice) and node.slice.upper is not None and "share" in owner.origin:
        # `share[:n]` is what all ranks have as much of.
        return Value(Spread.LOCAL, frozenset({"data"}), path=owner.path)
    if owner.is_known and key.is_known:
        return compute(operator.getitem, owner, key)
    if isinstance(thing, Object) and "parts" in thing.attrs and isinstance(key.const, int):
        parts = thing.attrs["parts"].thing.values
        return parts[key.const] if -len(parts) <= key.const < len(parts) else ANY
    if isinstance(thing, Items) and thing.keys is not None and isinstance(key.const, str):
        owner, thing = Value(path=owner.path, via=owner.via), None  # an entry of which nothing is known
    value = mixed((owner, key))
    hinted = guess(run, f"{owner.path}.{key.const}") if isinstance(key.const, str) and thing is None else None
    if hinted is not None and hinted.origin:
        return hinted
    path = f"{owner.path}[]" if owner.path else ""
    part = Value(value.spread, value.origin, path=path, via=value.via)
    return of_all(run, scope.module, node, (owner, key), part)


def _part(thing: Any, key: Value) -> Value | None:
    """A part of a display, or of a Sequential, where it and the key are known."""
    if isinstance(thing, Object) and thing.kind == "torch.nn.Sequential" and thing.call is not None:
        parts = thing.call.args
        is_there = isinstance(key.const, int) and not thing.call.has_star and -len(parts) <= key.const < len(parts)
        return parts[key.const] if is_there else None
    if not isinstance(thing, Items):
        return None
    if not key.is_known:
        choice = choice_of(thing.values) if thing.is_whole else None
        return Value(key.spread, key.origin, thing=choice) if choice is not None else None
    if thing.keys is not None:
        return thing.entry(key.const)
    if isinstance(key.const, int) and thing.is_whole and -len(thing.values) <= key.const < len(thing.values):
        return thing.values[key.const]
    return None


def _text(run: Run, scope: Scope, node: ast.JoinedStr) -> Value:
    values = [evaluate(run, scope, part) for part in node.values]
    value = mixed(values)
    is_known = all(one.is_known for one in values)
    text = "".join(str(one.const) for one in values) if is_known else UNKNOWN
    return of_all(run, scope.module, node, tuple(values), Value(value.spread, value.origin, text))


def _formatted(run: Run, scope: Scope, node: ast.FormattedValue) -> Value:
    value = evaluate(run, scope, node.value)
    const = str(value.const) if value.is_known and node.format_spec is None else UNKNOWN
    role = value.thing if isinstance(value.thing, Role) else None
    return Value(value.spread, value.origin, const, role, made=value.made)


def _walrus(run: Run, scope: Scope, node: ast.NamedExpr) -> Value:
    value = evaluate(run, scope, node.value)
    run.bind(run, scope, node.target, value)
    return value


def _yield(run: Run, scope: Scope, node: ast.Yield) -> Value:
    value = evaluate(run, scope, node.value)
    if scope.on_yield is not None:
        scope.on_yield(run.colour(value))
    return ANY


def _yield_from(run: Run, scope: Scope, node: ast.YieldFrom) -> Value:
    value = evaluate(run, scope, node.value)
    if scope.on_yield is not None:
        scope.on_yield(element_of(value))
    return ANY


def _comprehension(run: Run, scope: Scope, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
    inner = Scope(module=scope.module, parent=scope, function=scope.function)
    sources: list[Value] = []
    asked: list[tuple[Value, Guard]] = []
    rows: list[list[Value]] = []
    with run.within("loops", node), run.gathering() as items:
        for generator in node.generators:
            source = evaluate(run, inner, generator.iter)
            sources.append(source)
            run.bind(run, inner, generator.target, element_of(source))
            for test in generator.ifs:
                _keep_test(run, inner, test, sources, asked)
        parts: Sequence[ast.expr] = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        first, element, values = node.generators[0], ANY, [ANY]
        each = to_unroll(sources[0]) if isinstance(node, ast.DictComp) and len(sources) == 1 else None
        if each is not None and not first.ifs:  # `{name: DataLoader(...) for name in ["train", "val"]}`
            for one in each:
                run.bind(run, inner, first.target, one)
                rows.append([evaluate(run, inner, part) for part in parts])
        elif all(guard.outcome for _, guard in asked):
            with run.within("guards", *(guard for _, guard in asked)):
                values = [evaluate(run, inner, part) for part in parts]
                element, only = mixed(values), values[0] if len(values) == 1 else ANY
                thing = only.thing if isinstance(only.thing, (Method, Items)) else None
                element = replace(element, made=only.made, thing=thing)
    over = replace(mixed(sources), thing=sources[0].thing) if len(sources) == 1 else mixed(sources)
    run.keep_loop(Loop(node, scope.module, over, items, None, run.guards))
    # How long it is depends on its sources and tests; what is in it, on the element.
    length = mixed([*sources, *(value for value, _ in asked)])
    is_set = isinstance(node, ast.SetComp)
    kind = "numbers" if is_set and all(map(is_number, values)) else "set" if is_set else "list"
    if rows:
        return Value(thing=Items([row[1] for row in rows], keys=[row[0] for row in rows], kind="dict"))
    if isinstance(node, ast.DictComp):
        return mixed((element, length)).given_by(values[-1].made)
    return Value(length.spread, length.origin, thing=Items([element], kind=kind, is_whole=False), via=element.via)


def _keep_test(
    run: Run, scope: Scope, test: ast.expr, open_tests: list[Value], asked: list[tuple[Value, Guard]]
) -> None:
    """Tell the test of a comprehension that asks who the rank is from those that each turn asks anew."""
    value = evaluate(run, scope, test)
    truth = value.truth()
    if truth is None or not asks_who(value):
        open_tests.append(value)
    else:
        asked.append((value, Guard(test, scope.module, value.origin, truth, len(run.stack))))


_BUILTINS = frozenset(dir(builtins))
_EXPRESSIONS: dict[type, Callable[[Run, Scope, Any], Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Call: _call,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.Compare: _compare,
    ast.BoolOp: _boolean,
    ast.IfExp: _conditional,
    ast.List: _display,
    ast.Tuple: _display,
    ast.Set: _display,
    ast.Dict: _dict,
    ast.Subscript: _subscript,
    ast.JoinedStr: _text,
    ast.FormattedValue: _formatted,
    ast.Lambda: lambda run, scope, node: Value(thing=function_of(run, scope, node)),
    ast.NamedExpr: _walrus,
    ast.Yield: _yield,
    ast.YieldFrom: _yield_from,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.Await: lambda run, scope, node: evaluate(run, scope, node.value),
}
