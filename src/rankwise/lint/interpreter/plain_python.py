"""Functions of plain Python whose results the simulated run computes: numbers, lengths, ranges, copies, attributes by name."""

from __future__ import annotations

import ast
import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankwise.lint.interpreter.attributes import Super
from rankwise.lint.interpreter.defining import module_scope
from rankwise.lint.interpreter.values import (
    ANY,
    NUMBER,
    UNKNOWN,
    Instance,
    Items,
    Library,
    ModuleRef,
    Object,
    Role,
    Spread,
    Value,
    choice_of,
    known,
    mixed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.lint.interpreter.run import Run
    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.program import Module

_LARGE = 10_000
#: What a list, tuple, set or dict either is or is not.
_DISPLAYS = frozenset({"builtins.list", "builtins.tuple", "builtins.set", "builtins.dict", "torch.Tensor"})


def _number(kind: Callable[[Any], Any]) -> Callable[[Run, Call], Value]:
    def convert(_run: Run, call: Call) -> Value:
        value = call.args[0] if call.args else known(kind())  # type: ignore[call-arg]
        if value.is_known and isinstance(value.const, (int, float, str, bool)):
            try:
                role = value.thing if isinstance(value.thing, Role) else None
                return Value(value.spread, value.origin, kind(value.const), role)
            except (ValueError, OverflowError):
                pass
        truth = value.truth() if kind is bool else None
        thing = None if kind is str or truth is not None else NUMBER
        return Value(value.spread, value.origin, UNKNOWN if truth is None else truth, thing, value.path, value.via)

    return convert


def _len(_run: Run, call: Call) -> Value:
    value = call.args[0] if call.args else ANY
    if "__prepared__" in getattr(value.thing, "attrs", {}) or "prepared" in value.origin:
        return Value(origin=frozenset({"prepared"}), thing=NUMBER)
    if isinstance(value.thing, Items) and value.thing.is_whole:
        return Value(const=len(value.thing.values), spread=value.spread, origin=value.origin)
    if value.is_known and isinstance(value.const, (str, tuple, list, range)):
        return Value(value.spread, value.origin, len(value.const))
    # How much a batch or a list holds is the same everywhere, unless it is a share of this rank's.
    if "share" in value.origin or "files" in value.origin:
        return Value(value.spread, value.origin, thing=NUMBER)
    return Value(origin=value.origin & {"data"}, thing=NUMBER)


def _range(_run: Run, call: Call) -> Value:
    value, length = mixed(call.args), UNKNOWN
    if all(isinstance(one.const, int) for one in call.args) and call.args:
        try:
            length = len(range(*(one.const for one in call.args)))
        except (ValueError, TypeError, OverflowError):
            length = UNKNOWN
    if value.spread and length is UNKNOWN:
        value = Value(value.spread, value.origin | {"share"})
    attrs = {"length": Value(value.spread, value.origin, length), "bounds": Value(thing=Items(list(call.args)))}
    return Value(value.spread, value.origin, thing=Object("range", call, attrs))


def _fold(doing: Callable[..., Any]) -> Callable[[Run, Call], Value]:
    def fold(_run: Run, call: Call) -> Value:
        value = call.given
        consts = [one.const for one in call.args]
        if len(consts) > 1 and all(isinstance(one, (int, float)) and abs(one) < _LARGE for one in consts):
            return Value(value.spread, value.origin, doing(*consts))
        return value

    return fold


def _join_paths(_run: Run, call: Call) -> Value:
    value, parts = call.given, [one.const for one in call.args]
    if parts and not call.has_star and all(isinstance(one, str) for one in parts):
        return Value(value.spread, value.origin, posixpath.join(*parts))
    return value


def _isinstance(_run: Run, call: Call) -> Value:
    if len(call.args) == 2:
        thing, kind = call.args[0].thing, call.args[1].thing
        if isinstance(thing, Object) and isinstance(kind, Library):
            return Value(const=True) if thing.kind == kind.name else ANY
        if isinstance(thing, Items) and isinstance(kind, Library) and kind.name in _DISPLAYS:
            return Value(const=kind.name == f"builtins.{thing.kind}")
    return ANY


def _getattr(run: Run, call: Call) -> Value:
    from rankwise.lint.interpreter.attributes import attribute  # noqa: PLC0415 - shared by name only

    if len(call.args) > 1 and isinstance(call.args[0].thing, ModuleRef) and not call.args[1].is_known:
        return _any_class(run, call.args[0].thing.module)
    if len(call.args) >= 2 and isinstance(call.args[1].const, str):
        owner, name = call.args[0], call.args[1].const
        if name in getattr(owner.thing, "attrs", {}) or len(call.args) == 2 or owner.path:
            return attribute(run, owner, name, call.node)
        if isinstance(owner.thing, Instance) and name.isidentifier() and _lacks(run, owner.thing, name, call):
            return call.args[2]
    return Value(path=f"getattr.{call.args[1].const}") if len(call.args) > 1 and call.args[1].is_known else ANY


def _any_class(run: Run, module: Module) -> Value:
    """`getattr(datasets, config["name"])`: one of the classes that a module defines; those that others there derive from are not meant."""
    classes = {node.name: node for node in module.tree.body if isinstance(node, ast.ClassDef)}
    names = classes.keys() - {getattr(base, "id", "") for node in classes.values() for base in node.bases}
    found = [module_scope(run, module).find(name) for name in classes if name in names]
    return Value(thing=choice_of(value for value in found if value is not None))


def _lacks(run: Run, owner: Instance, name: str, call: Call) -> bool:
    """Whether an object surely has no such attribute: all of its class is known, and no text that was read says the name but to ask for it."""
    if owner.cls.is_open or owner.base is not None or not owner.cls.library_bases <= {"builtins.object"}:
        return False
    asks, says = rf"getattr\([\w.]+, *[\"']{name}[\"']", rf"\b{name}\b|\bsetattr\b|__dict__|__getattr|\bvars\("
    texts = {module.text for module in (call.module, *run.project.loaded())}
    return not any(re.search(says, re.sub(asks, "", text)) for text in texts)


def _hasattr(run: Run, call: Call) -> Value:
    if len(call.args) == 2 and call.args[1].const == "module":
        value = call.args[0]
        return Value(const=True) if isinstance(value.thing, Object) and value.thing.kind.endswith("Parallel") else ANY
    return ANY


def _super(run: Run, call: Call) -> Value:
    function = run.functions[-1] if run.functions else None
    if function is None or function.owner is None:
        return ANY
    receiver = call.args[1] if len(call.args) > 1 else run.selves[-1] if run.selves else ANY
    return Value(thing=Super(receiver, function.owner))


def _set(_run: Run, call: Call) -> Value:
    """The order of a set of text differs between processes (PYTHONHASHSEED), that of a set of numbers does not."""
    value = call.args[0] if call.args else ANY
    parts = [] if not isinstance(value.thing, Items) else value.thing.keys or value.thing.values
    is_range = isinstance(value.thing, Object) and value.thing.kind == "range"
    is_numbers = is_range or (bool(parts) and all(isinstance(one.const, (int, float)) for one in parts))
    items = Items([mixed((value, *parts))], kind="numbers" if is_numbers else "set", is_whole=False)
    return Value(value.spread, value.origin, thing=items)


def _sorted(_run: Run, call: Call) -> Value:
    value = call.args[0] if call.args else ANY
    thing = value.thing
    if isinstance(thing, Items):
        parts = list(thing.keys if thing.keys is not None else thing.values)
        return Value(value.spread, value.origin, thing=Items(parts, kind="list", is_whole=thing.is_whole))
    return Value(value.spread, value.origin - {"unsorted"}, thing=thing, path=value.path, via=value.via)


def _dict(_run: Run, call: Call) -> Value | None:
    """`dict(batch_size=8, shuffle=True)`, `dict(DEFAULTS, lr=0.1)`."""
    if call.has_star or len(call.args) > 1:
        return None
    parts: dict[str, Value] = {}
    if call.args:
        table = call.args[0].thing
        if not isinstance(table, Items) or not table.is_whole or table.keys is None:
            return None
        if not all(isinstance(key.const, str) for key in table.keys):
            return None
        parts = {key.const: value for key, value in zip(table.keys, table.values, strict=True)}
    parts |= call.kwargs
    return Value(thing=Items(list(parts.values()), keys=[known(name) for name in parts], kind="dict"))


def _slice(_run: Run, call: Call) -> Value:
    """`rows[slice(rank * n, (rank + 1) * n)]`: this rank's own part of the data."""
    given = call.given
    return Value(Spread.LOCAL, given.origin | {"data"}) if given.spread else given


def _copied(_run: Run, call: Call) -> Value:
    """A copy is an object of its own, alike in all that is known."""
    value = call.args[0] if call.args else ANY
    thing = value.thing
    if isinstance(thing, Object):
        return replace(value, thing=Object(thing.kind, thing.call, dict(thing.attrs)))
    if isinstance(thing, Instance):
        return replace(value, thing=Instance(thing.cls, dict(thing.attrs), thing.call))
    return value


def _partial(_run: Run, call: Call) -> Value:
    return Value(thing=Object("functools.partial", call))


def _table(_run: Run, call: Call) -> Value:
    """`defaultdict(list, given)`."""
    given = call.args[1].thing if len(call.args) > 1 else None
    values, keys = (given.values, given.keys) if isinstance(given, Items) else ([], [])
    return Value(thing=Items(list(values), keys=list(keys or ()), kind="dict", is_whole=False))


PLAIN: dict[str, Callable[[Run, Call], Value | None]] = {
    **dict.fromkeys(("builtins.dict", "collections.OrderedDict"), _dict),
    "collections.defaultdict": _table,
    "builtins.int": _number(int),
    "builtins.float": _number(float),
    "builtins.str": _number(str),
    "builtins.bool": _number(bool),
    "builtins.len": _len,
    "builtins.slice": _slice,
    **dict.fromkeys(("builtins.range", "tqdm.trange"), _range),
    "builtins.min": _fold(min),
    "builtins.max": _fold(max),
    "os.path.join": _join_paths,
    "builtins.isinstance": _isinstance,
    "builtins.getattr": _getattr,
    "builtins.hasattr": _hasattr,
    "builtins.super": _super,
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.sorted": _sorted,
    "copy.deepcopy": _copied,
    "copy.copy": _copied,
    "functools.partial": _partial,
}  # fmt: skip
