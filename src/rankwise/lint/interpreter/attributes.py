"""Attributes in the simulated run: of objects that are known, of libraries, and by what their names tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.lint.interpreter.defining import module_scope
from rankwise.lint.interpreter.own_values import COARSE
from rankwise.lint.interpreter.values import (
    ANY,
    Bound,
    Choice,
    Function,
    Instance,
    Items,
    Library,
    Method,
    ModuleRef,
    Object,
    Spread,
    UserClass,
    Value,
    choice_of,
    mixed,
)
from rankwise.lint.library.constructor_table import WRAPPERS
from rankwise.lint.library.hints import role_of
from rankwise.lint.library.names import (
    ACCELERATOR,
    CONTEXT,
    ENGINE,
    FABRIC,
    HF_TRAINER,
    LOADER,
    PL_MODULE,
    PL_TRAINER,
    RESOLVER,
    STRATEGY,
    canonical,
)

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable

    from rankwise.lint.interpreter.run import Run

#: What describes a tensor or a batch, and is the same on all ranks unless something is wrong already.
_SHAPES = frozenset(
    """shape dtype device ndim dim __class__ is_cuda requires_grad sharding itemsize format""".split()  # noqa: SIM905
)
_IS_MAIN = {"is_main_process": "rank", "is_global_zero": "rank", "is_local_main_process": "local_rank", "is_last_process": "last",
            "is_world_process_zero": "rank", "is_local_process_zero": "local_rank",
            "is_main": "rank", "is_local_main": "local_rank"}  # fmt: skip
_ROLES = {"process_index": "rank", "local_process_index": "local_rank", "num_processes": "world_size", "global_rank": "rank",
          "local_rank": "local_rank", "world_size": "world_size", "node_rank": "node_rank", "rank": "rank",
          "replica_id": "rank", "task_id": "rank", "num_replicas_in_sync": "world_size"}  # fmt: skip
#: Objects whose attributes tell who the rank is.
_KNOWS_RANK = frozenset({ACCELERATOR, FABRIC, PL_TRAINER, HF_TRAINER, PL_MODULE, "accelerate.PartialState",
                         "accelerate.AcceleratorState", "transformers.TrainingArguments", "lightning.pytorch.Trainer.strategy",
                         ENGINE, CONTEXT, STRATEGY, RESOLVER, "transformers.TrainerState"})  # fmt: skip
#: Attributes that give the constructor's argument of that name (and position) back.
_ARGUMENTS = {LOADER: {"dataset": 0, "batch_size": 1, "sampler": 3, "batch_sampler": 4, "collate_fn": 6}}


def guess(run: Run, path: str) -> Value:
    """What a name that nothing is known of probably is."""
    key = ("guess", path)
    found: Value | None = run.memo.get(key)
    if found is None:
        found = run.memo[key] = _guess(run, path)
    if found.spread:
        run.has_seen_rank = True
    return found


def _guess(run: Run, path: str) -> Value:
    last = path.rpartition(".")[2]
    if path in {"dist", "torch.distributed"}:
        return Value(thing=Library("torch.distributed"))
    if path.startswith(("lora.", "config.", "peft.")) and role_of(last) != "world_size":
        return Value(path=path)  # the rank of a matrix
    return run.named(last) or Value(path=path)


def attribute(run: Run, owner: Value, name: str, node: ast.AST | None) -> Value:
    """The value of ``owner.name``."""
    thing = owner.thing
    if (doing := _BY_THING.get(type(thing))) is not None:
        return doing(run, owner, thing, name, node)
    if isinstance(thing, Choice) and (found := choice_of(attribute(run, way, name, node) for way in thing.ways)):
        return Value(owner.spread, owner.origin, thing=found)
    if owner.origin == {"time"} and name in COARSE:
        return ANY
    if owner.is_known or name in _SHAPES:
        return (
            Value(owner.spread, owner.origin, thing=Method(owner, name))
            if owner.is_known
            else Value(thing=Method(owner if name == "shape" else ANY, name))
        )
    path = f"{owner.path}.{name}" if owner.path else name
    if owner.origin <= {"data", "agreed", "scattered"} and not owner.via:
        hinted = guess(run, path) if not owner.spread else ANY
        if hinted.origin or hinted.thing is not None:
            return hinted
    return Value(owner.spread, owner.origin, thing=Method(owner, name), path=path, via=owner.via)


def _of_library(run: Run, _owner: Value, thing: Library, name: str, _node: Any) -> Value:
    full = canonical(f"{thing.name}.{name}")
    if full in {"torch.distributed.GroupMember.WORLD", "torch.distributed.group.WORLD"}:
        return Value(thing=Object("world"))
    return Value(thing=Library(full))


def _of_module(run: Run, _owner: Value, thing: ModuleRef, name: str, _node: Any) -> Value:
    found = module_scope(run, thing.module).find(name)
    if found is not None:
        return found
    path = run.project.imported(name, 1, thing.module) if thing.module.path.stem == "__init__" else None
    module = run.project.load(path) if path is not None else None
    return Value(thing=ModuleRef(module)) if module is not None else guess(run, name)


def _of_object(run: Run, owner: Value, thing: Object, name: str, _node: Any) -> Value:
    if name in thing.attrs:
        return thing.attrs[name]
    if thing.kind in _KNOWS_RANK or thing.kind.endswith("State"):
        who = _who(run, name)
        if who is not None:
            return who
    part = _part_of(owner, thing, name)
    if part is not None:
        return part
    if thing.kind in _KNOWS_RANK and owner.spread:
        # Each process makes one, wherever it is made.
        owner = Value(thing=thing, via=owner.via)
    position = _ARGUMENTS.get(thing.kind, {}).get(name)
    if position is not None and thing.call is not None:
        return thing.call.arg(position, name) or ANY
    option = _option(run, thing, name)
    if option is not None:
        return option
    return Value(owner.spread, owner.origin, thing=Method(owner, name), path=name, via=owner.via)


def _option(run: Run, thing: Object, name: str) -> Value | None:
    """``args.name`` of a command line: the rank if it is called so, else what was declared."""
    if not thing.kind.endswith(("Namespace", "ArgumentParser", "namespace")):
        return None
    hinted, declared = guess(run, f"args.{name}"), thing.attrs.get(f"--{name}")
    is_hint = hinted.origin and not (type(hinted.const) is bool and _is_counted_or_named(declared))
    return hinted if is_hint else declared


def _is_counted_or_named(option: Value | None) -> bool:
    """Whether an option is declared as a number or a text: no answer to whether this is the main process."""
    given = option.made.kwargs if option is not None and option.made is not None else {}
    kind, default = given.get("type", ANY), given.get("default", ANY)
    return getattr(kind.thing, "name", "") in {"builtins.int", "builtins.str"} or type(default.const) in {int, str}


def _part_of(owner: Value, thing: Object, name: str) -> Value | None:
    """The model inside a wrapper, the strategy of a trainer."""
    if name == "state" and thing.kind == ACCELERATOR:
        return owner
    if name == "module" and thing.kind in WRAPPERS:
        inner = thing.call.args[0] if thing.call is not None and thing.call.args else ANY
        if inner.thing is not None:
            return Value(thing=inner.thing, path=inner.path)
        return Value(path="module", origin=frozenset({"module"}), thing=Method(owner, name))
    if name == "cluster_resolver" and thing.kind == STRATEGY:
        # All ranks of such a strategy train: a chief is the first of them, and no test of a rank's needs its name.
        return Value(thing=Object(RESOLVER, attrs={"task_type": Value(const="worker")}))
    if name == "task_type" and thing.kind == RESOLVER:
        return Value(spread=Spread.RANK, origin=frozenset({"rank"}))
    if name == "strategy" and thing.kind == PL_TRAINER:
        return Value(thing=Object(f"{PL_TRAINER}.strategy"))
    return None


def _who(run: Run, name: str) -> Value | None:
    if name in _IS_MAIN:
        last, role = run.virtual_rank.world_size - 1, _IS_MAIN[name]
        return run.is_rank(last) if role == "last" else run.is_rank(0, role)
    return run.role(_ROLES[name]) if name in _ROLES else None


def _of_instance(run: Run, owner: Value, thing: Instance, name: str, node: Any) -> Value:
    if name in thing.attrs:
        return thing.attrs[name]
    if name == "__class__":
        return Value(thing=thing.cls)
    # A private method is that of the class whose text calls it, whatever a subclass has.
    is_private = name.startswith("__") and not name.endswith("__")
    within = run.functions[-1].owner if is_private and run.functions else None
    found = (within or thing.cls).find(name)
    if found is not None:
        return _bound(run, owner, found, node)
    if thing.base is not None and thing.base.call is not None:
        return _of_object(run, Value(thing=thing.base), thing.base, name, node)
    bases = thing.cls.library_bases
    for base in (PL_MODULE, HF_TRAINER, PL_TRAINER):
        if base in bases:
            return _of_framework(run, owner, base, name)
    if name == "__dict__":
        return ANY
    is_open = bool(bases) or thing.cls.is_open
    hinted = guess(run, name)
    if hinted.origin or hinted.thing is not None:
        return hinted
    return Value(thing=Method(owner, name), path=name if is_open else f"self.{name}")


def _of_framework(run: Run, owner: Value, base: str, name: str) -> Value:
    if name == "trainer" and base == PL_MODULE:
        return Value(thing=run.memo.setdefault(("trainer", id(owner.thing)), Object(PL_TRAINER)))
    if name in {"args", "state"} and base == HF_TRAINER:
        return Value(thing=Object("transformers.TrainingArguments"))
    if name == "accelerator" and base == HF_TRAINER:
        return guess(run, "accelerator")
    return _who(run, name) or Value(thing=Method(Value(thing=Object(base)), name), path=name)


def _bound(run: Run, owner: Value, found: Value, node: Any) -> Value:
    function = found.thing
    if not isinstance(function, Function):
        return found
    if "staticmethod" in function.marks:
        return found
    if "classmethod" in function.marks and isinstance(owner.thing, Instance):
        owner = Value(thing=owner.thing.cls)
    bound = Value(thing=Bound(owner, function))
    if "property" in function.marks:
        return run.call(run, bound, (), {}, node)
    return bound


def _of_class(run: Run, owner: Value, thing: UserClass, name: str, _node: Any) -> Value:
    found = thing.find("forward" if name == "apply" and "torch.autograd.Function" in thing.library_bases else name)
    if found is None:
        return guess(run, name)
    if isinstance(found.thing, Function) and name == "apply" != found.thing.name:
        return Value(thing=Bound(Value(path="ctx"), found.thing))
    if isinstance(found.thing, Function) and "classmethod" in found.thing.marks:
        return Value(thing=Bound(owner, found.thing))
    return found


def _of_items(_run: Run, owner: Value, thing: Items, name: str, _node: Any) -> Value:
    value = mixed((owner,))
    return Value(value.spread, value.origin, thing=Method(owner, name), via=value.via)


def _of_super(run: Run, owner: Value, thing: Super, name: str, node: Any) -> Value:
    instance = thing.receiver.thing
    cls = instance.cls if isinstance(instance, Instance) else instance
    if isinstance(cls, UserClass):
        seen = False
        for one in cls.ancestry:
            if seen and name in one.attrs:
                return _bound(run, thing.receiver, one.attrs[name], node)
            seen = seen or one is thing.owner
        for base in sorted(cls.library_bases):
            made = Object(base)
            if base == LOADER and isinstance(instance, Instance):
                made = instance.base = instance.base or made
            return Value(thing=Method(Value(thing=made), name), path=name)
    return Value(thing=Method(ANY, name), path=name)


class Super:
    """What `super()` gives in a method of ``owner``, for ``receiver``."""

    def __init__(self, receiver: Value, owner: UserClass | None) -> None:
        self.receiver, self.owner = receiver, owner


_BY_THING: dict[type, Callable[..., Value]] = {
    Library: _of_library,
    Object: _of_object,
    Instance: _of_instance,
    ModuleRef: _of_module,
    UserClass: _of_class,
    Items: _of_items,
    Super: _of_super,
}
