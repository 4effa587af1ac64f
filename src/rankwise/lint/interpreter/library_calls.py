"""Calls of libraries in the simulated run: what tables say they do together, make, or give back."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.calls import CONSUMERS, consume
from rankwise.lint.interpreter.notes import left_on_others
from rankwise.lint.interpreter.special import SPECIAL
from rankwise.lint.interpreter.training import METHODS, forward, is_parallel, synced_forward
from rankwise.lint.interpreter.values import AGREED, ANY, Instance, Items, Object, Spread, Value, mixed
from rankwise.lint.library.collective_table import ACTS, Act
from rankwise.lint.library.constructor_table import MADE_KINDS, PASS_ON, RECOUNTS, RETURNS_SELF, WRAPPERS
from rankwise.lint.library.hints import is_same_for_all
from rankwise.lint.library.names import ACCELERATOR, DDP, ENGINE, FABRIC, FSDP, FULLY_SHARD, HF_TRAINER

if TYPE_CHECKING:
    from rankwise.lint.interpreter.run import Run, Scope
    from rankwise.lint.interpreter.values import Call


def call_library(run: Run, call: Call, scope: Scope | None) -> Value:
    """Call a function or class of a library by its canonical name."""
    run.record(call)
    if call.name in CONSUMERS:
        consume(call)
    special, had_group = SPECIAL.get(call.name), run.initialized
    result = special(run, call) if special is not None else None
    if result is None:
        act = ACTS.get(call.name)
        result = do_act(run, call, act, scope) if act is not None else _by_table(run, call)
    if call.name == "torch.distributed.init_process_group" and scope is not None:
        _learn_rank(run, call, scope)
    if scope is not None and run.initialized and not had_group:
        # Who has left the function before is no rank of the job.
        scope.num_alone = len(scope.returns), len(scope.returned)
        for test, outcome in scope.passed:
            run.settle(test, outcome)
    call.result = result
    return result


def _learn_rank(run: Run, call: Call, scope: Scope) -> None:
    """What is given as the rank is this rank, whatever it is called."""
    value, node = call.arg(4, "rank"), call.arg_node(4, "rank")
    if isinstance(node, (ast.Name, ast.Attribute)) and value is not None and not value.is_known:
        run.bind(run, scope, node, replace(run.role("rank"), origin=value.origin | {"rank"}, made=value.made))


def do_act(run: Run, call: Call, act: Act, scope: Scope | None, name: str | None = None) -> Value:
    """What a collective does to the history, to the argument it fills, and gives back."""
    if act.family == "state" and not act.is_sure and call.args and _is_sharded(call.args[0]):
        act = replace(act, is_sure=True)
    if act.family == "save" and "alone" in call.kwargs:
        act = replace(act, family="")  # a checkpoint of this rank only
    if act.family:
        run.act(act, call, name=name)
    if act.fills is not None and scope is not None:
        _fill(run, call, act.fills, scope)
    given = mixed((call.receiver, *call.args, *call.kwargs.values()))
    if act.result == "equal":
        return Value(
            origin=AGREED, thing=Object(MADE_KINDS[call.name], call) if call.name in MADE_KINDS else None, via=given.via
        )
    if act.result == "local":
        return Value(Spread.LOCAL, given.origin | {"data"})
    if act.result == "first":
        return Value(origin=AGREED, via=given.via)
    if act.result == "none":
        async_op = call.arg(act.group + 1 if act.group is not None else None, "async_op")
        if (async_op is not None and (async_op.const is not False or async_op.origin)) or call.has_star:
            return Value(thing=Object("torch.distributed.Work", call))
        return Value(const=None)
    return given


def _is_sharded(model: Value) -> bool:
    thing = model.thing
    return "__sharded__" in getattr(thing, "attrs", {}) or (isinstance(thing, Object) and thing.kind == FSDP)


def _fill(run: Run, call: Call, fills: tuple[int, str, str], scope: Scope) -> None:
    node = call.arg_node(fills[0], fills[1])
    node = node.body if isinstance(node, ast.IfExp) else node
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        return
    old = run.evaluate(run, scope, node)
    # Members of a group agree, and mostly they alone come here.
    is_equal = fills[2] == "equal"
    thing = old.thing if not isinstance(old.thing, Items) else None
    new = (
        Value(origin=AGREED, thing=thing, via=old.via)
        if is_equal
        else Value(Spread.LOCAL, frozenset({"data", "scattered", *left_on_others(run, call)}), thing=thing, via=old.via)
    )
    new = new.given_by(call)
    if old.is_known and old.const is None:
        new = replace(
            old, origin=old.origin.union(left_on_others(run, call))
        )  # the list that only the destination passes
    if isinstance(old.thing, Items) and is_equal:
        # Whoever else holds the list sees it filled, too.
        old.thing.values[:] = [Value(origin=AGREED, made=call) for _ in old.thing.values]
    if isinstance(node, ast.Name) and scope.function is not None and is_equal:
        run.memo.setdefault(("fills", scope.function.node), {})[node.id] = new
    fill(run, scope, node, new)


def fill(run: Run, scope: Scope, node: ast.expr, new: Value) -> None:
    """Give what an argument stands for a new value, which all ranks that are here get."""
    guards, run.guards = run.guards, ()
    run.bind(run, scope, _as_target(node), new)
    run.guards = guards


def _as_target(node: ast.expr) -> ast.expr:
    # A filled item of a list or an attribute of an odd object: the holder's name takes the value.
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _by_table(run: Run, call: Call) -> Value:
    name, given = call.name, mixed((*call.args, *call.kwargs.values()))
    if name in PASS_ON:
        passed = call.arg(0, "iterable") or ANY
        return passed.given_by(call) if name in RECOUNTS else passed
    if name in {"builtins.enumerate", "builtins.reversed"} and call.args:
        return Value(given.spread, given.origin, thing=Object(name.rpartition(".")[2], call, {"of": call.args[0]}))
    if name == "builtins.zip":
        return Value(given.spread, given.origin, thing=Object("zip", call, {"of": Value(thing=Items(list(call.args)))}))
    if name == FULLY_SHARD:
        return _fully_shard(call)
    last = name.rpartition(".")[2]
    if name in MADE_KINDS or name in WRAPPERS or last[:1].isupper() or _makes_model(name):
        return _made(run, call)
    if name.startswith("torch.nn.functional."):
        is_mean = last.endswith(("loss", "cross_entropy"))
        return Value(given.spread, given.origin | {"mean"} if is_mean else given.origin, via=given.via)
    return _hinted(run, call, given) or given


def _hinted(run: Run, call: Call, given: Value) -> Value | None:
    """A library that no table knows: what the function's name tells."""
    if call.name.startswith(("torch.", "builtins.", "numpy.", "os.", "math.")):
        return None
    is_same = is_same_for_all(call.name) and given.spread
    return run.named(call.name, len(call.args)) or (Value(via=given.via) if is_same else None)


def _makes_model(name: str) -> bool:
    return name.startswith(("torchvision.models.", "timm.create_model", "transformers.AutoModel")) or name.endswith(
        (".from_pretrained", ".from_config")
    )


def _made(run: Run, call: Call) -> Value:
    kind = MADE_KINDS.get(call.name, call.name)
    if kind in {DDP, FSDP}:
        run.act(Act(family="wrap", result="same"), call, name=kind.rpartition(".")[2])
    if call.name == "deepspeed.initialize":
        engine = Value(thing=Object(ENGINE, call))
        return Value(
            thing=Object(
                "parts",
                call,
                {"parts": Value(thing=Items([engine, Value(thing=Object("torch.optim.Optimizer", call))]))},
            )
        )
    given = mixed((*call.args, *call.kwargs.values()))
    # A loader over this rank's own share is as long as the share is.
    spread = given.spread if "share" in given.origin else Spread.EQUAL
    return Value(spread, given.origin, thing=Object(kind, call))


def _fully_shard(call: Call) -> Value:
    """FSDP2 changes the model in place: whatever it was is sharded from here on."""
    model = call.args[0] if call.args else ANY
    attrs = getattr(model.thing, "attrs", None)
    if isinstance(attrs, dict):
        attrs["__sharded__"] = Value(const=True)
    return model


def call_method(run: Run, call: Call, scope: Scope | None, func: Value) -> Value:
    """Call a method of a library's object, or of a value that is not known."""
    receiver, method = call.receiver, call.name
    thing = receiver.thing
    kinds = kinds_of(receiver)
    call.name = f"{kinds[0]}.{method}" if kinds else f"?.{method}"
    run.record(call)
    doing = METHODS.get(method)
    result = doing(run, call, kinds) if doing is not None else None
    if result is None:
        act = next((ACTS[name] for kind in kinds if (name := f"{kind}.{method}") in ACTS), None)
        if act is not None:
            result = do_act(run, call, act, scope, method)
        elif method in RETURNS_SELF and (thing is not None or receiver.spread or receiver.path):
            result = receiver
        else:
            result = _of_unknown(run, call, method, func)
    call.result = result
    _note_change(run, call, method, receiver)
    return result


def kinds_of(value: Value) -> list[str]:
    """Canonical names under which tables may know a value, nearest first."""
    thing = value.thing
    if isinstance(thing, Object):
        also = {"torchmetrics": "torchmetrics.Metric", "trl": HF_TRAINER}.get(thing.kind.partition(".")[0])
        return [thing.kind, *([also] if also is not None else [])]
    if isinstance(thing, Instance):
        sharded = [FSDP] if "__sharded__" in thing.attrs else []
        return [*sharded, *sorted(thing.cls.library_bases)]
    return []


def _of_unknown(run: Run, call: Call, method: str, func: Value) -> Value:
    consume(call)
    given = mixed((call.receiver, *call.args, *call.kwargs.values()))
    if isinstance(call.receiver.thing, Items):
        return _of_items(run, call, method, given)
    if call.receiver.is_known and isinstance(call.receiver.const, str):
        return _of_text(call, method, given)
    if not call.receiver.spread and (named := run.named(method)) is not None:
        return named
    if is_same_for_all(method):
        return Value(via=given.via, path=func.path)
    return Value(given.spread, given.origin, path=f"{func.path}()" if func.path else "", via=given.via)


_OF_SETS = frozenset({"union", "intersection", "difference", "symmetric_difference"})


def _of_items(run: Run, call: Call, method: str, given: Value) -> Value:
    items = call.receiver.thing
    if method == "update" and items.keys is not None and call.kwargs:
        for name, value in call.kwargs.items():
            _set_key(run, items, name, value)
        return Value(const=None)
    if method in {"append", "add", "extend", "insert", "update", "appendleft"}:
        # One by one, where no loop and no test leaves open how often, they are known.
        items.is_whole = items.is_whole and method == "append" and not (run.loops or run.tests)
        items.values.extend(run.colour(value) for value in call.args)
        if items.keys is not None:
            items.keys.extend([ANY] * len(call.args))
        return Value(const=None)
    if method == "get" and call.args and (found := items.entry(call.args[0].const)) is not None:
        return found  # type: ignore[no-any-return]
    if method in {"items", "keys", "values"}:
        parts = items.values if method == "values" else items.keys or []
        both = [
            Value(thing=Items([key, value], kind="tuple"))
            for key, value in zip(items.keys or [], items.values, strict=False)
        ]
        return Value(
            given.spread,
            given.origin,
            thing=Items(both if method == "items" else list(parts), is_whole=items.is_whole),
            via=given.via,
        )
    if method == "sort":
        items.kind = "list"
    return call.receiver if method == "copy" or (items.kind == "set" and method in _OF_SETS) else given


def _set_key(run: Run, items: Items, name: str, value: Value) -> None:
    for number, key in enumerate(items.keys or ()):
        if key.is_known and key.const == name:
            items.values[number] = run.colour(value)
            return
    items.values.append(run.colour(value))
    if items.keys is not None:
        items.keys.append(Value(const=name))


_OF_TEXT = frozenset({"isdigit", "lower", "upper", "strip", "startswith", "endswith", "split", "format", "replace"})


def _of_text(call: Call, method: str, given: Value) -> Value:
    text = call.receiver.const
    if method in _OF_TEXT and all(one.is_known for one in call.args):
        try:
            return Value(given.spread, given.origin, getattr(text, method)(*(one.const for one in call.args)))
        except Exception:  # noqa: BLE001 - whatever the user's constants raise, the result is not known
            return given
    return given


def _note_change(run: Run, call: Call, method: str, receiver: Value) -> None:
    """`metrics.update(loss)`: an object that has taken in what differs gives what differs."""
    thing = receiver.thing
    if (
        isinstance(thing, Object)
        and method in {"update", "append", "add", "add_"}
        and thing.kind not in {ACCELERATOR, FABRIC}
    ):
        given = mixed((*call.args, *call.kwargs.values()))
        if given.spread is Spread.LOCAL:
            thing.attrs["__held__"] = given


def call_object(run: Run, call: Call, thing: Object, scope: Scope | None) -> Value:
    """Call an object of a library: a wrapped model, a model, a loss, a partial."""
    if thing.kind == "functools.partial" and thing.call is not None and thing.call.args:
        first, *rest = thing.call.args
        kwargs = {**thing.call.kwargs, **call.kwargs}
        return run.call(run, first, (*rest, *call.args), kwargs, call.node, scope=scope)
    call.name = f"{thing.kind}.__call__"
    run.record(call)
    if is_parallel(call.receiver):
        call.result = forward(run, call, thing)
    else:
        synced_forward(run, call, thing)
        call.result = _plain_call(call, thing)
    return call.result


def _plain_call(call: Call, thing: Object) -> Value:
    given = mixed((*call.args, *call.kwargs.values()))
    is_model = thing.kind.startswith(("torch.nn.", "torchvision.", "timm.", "transformers.")) and given.origin
    origin = given.origin | {"data"} if is_model and given.spread else given.origin
    is_mean = thing.kind.startswith("torch.nn.") and thing.kind.endswith("Loss")
    return Value(given.spread, origin | {"mean"} if is_mean else origin, via=given.via)


def call_named(run: Run, call: Call, func: Value) -> Value:
    """Call what only has a name: `get_rank()`, `is_main_process()`, `reduce_dict(...)` of a module that is not at hand."""
    consume(call)
    path = func.path or _written(call.node)
    last = path.rpartition(".")[2]
    call.name = f"?{path}"
    run.record(call)
    given = mixed((func, *call.args, *call.kwargs.values()))
    # `get_global_rank(group, 0)` asks for another's.
    named = run.named(last, len(call.args))
    if named is not None:
        result = named
    elif "seed" in last.lower():
        run.seeds["all"] = given
        result = given
    elif _starts_group(last):
        run.initialized = True
        result = Value(path=f"{path}()")
    elif is_same_for_all(last):
        result = Value(via=given.via)
    else:
        result = Value(given.spread, given.origin, path=f"{path}()" if path else "", via=given.via)
    call.result = result
    return result


def _starts_group(last: str) -> bool:
    last = last.lower()
    return last == "ddp_setup" or (
        "dist" in last and any(word in last for word in ("init", "setup", "set_up", "start"))
    )


def _written(node: ast.AST) -> str:
    func = getattr(node, "func", None)
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
