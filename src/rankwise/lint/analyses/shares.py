"""Whether a rank's part of the data is its own: what of a loader, a data set or a loop depends on the rank."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import given
from rankwise.lint.analyses.in_ranks import differs_deeply, inside
from rankwise.lint.interpreter.values import Instance, Items, Object, Spread, UserClass
from rankwise.lint.library.hints import role_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.data_flow import Pass
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Entry

#: Functions of libraries that take one rank's part of the data.
_SHARING = frozenset({"shard", "split_by_node", "split_dataset_by_node"})
_WORKERS = frozenset({"get_worker_info", "worker_info", "worker_id", "num_workers"})
#: What draws from a generator, or takes in what comes from outside: an environment, a queue, a connection.
_DRAWING = frozenset(
    """random rand randn randint randperm shuffle choice sample uniform normal normal_ uniform_ generator Generator
    default_rng rng gym env queue get recv socket""".split()  # noqa: SIM905
)
#: Torch's samplers that draw from the whole data set on each rank.
_SAMPLERS = frozenset(
    f"torch.utils.data.{name}Sampler" for name in ("Random", "Sequential", "WeightedRandom", "SubsetRandom")
)
#: Calls that spread a model in other ways than by copies: there the ranks of a part need equal batches.
_OTHER_WAYS = re.compile(r"\b(init_device_mesh|DeviceMesh|parallelize_module|pipelining|tensor\.parallel|mpu)\b")


def is_shared_out(loader: Object) -> bool:
    """Whether something that went into a loader depends on the rank, or may."""
    call = loader.call
    if call is None or call.has_star:
        return True
    if given(call, "batch_sampler") is not None or not _draws_from_all(given(call, "sampler")):
        return True
    dataset = given(call, "dataset")
    return (
        dataset is None
        or differs_deeply(dataset)
        or differs_deeply(call.kwargs.get("generator"))
        or _class_shares(dataset)
    )


def _draws_from_all(sampler: Value | None) -> bool:
    """Whether there is no sampler, or one of torch's that knows nothing of ranks."""
    if sampler is None:
        return True
    thing = sampler.thing
    return (
        isinstance(thing, Object) and thing.kind in _SAMPLERS and thing.call is not None and not differs_deeply(sampler)
    )


def _class_shares(dataset: Value) -> bool:
    return any(splits_by_rank(cls) for cls in classes_in(dataset))


def classes_in(value: Value | None) -> Iterator[UserClass]:
    """The user's classes of a data set and of the data sets in it."""
    for one in inside(value):
        if isinstance(one.thing, Instance):
            yield from one.thing.cls.ancestry


@lru_cache(maxsize=64)
def _names_in(cls: ast.ClassDef) -> frozenset[str]:
    return frozenset(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(cls)
        if isinstance(node, (ast.Name, ast.Attribute))
    )


@lru_cache(maxsize=64)
def _asks_rank(cls: ast.ClassDef) -> bool:
    names = _names_in(cls)
    return not _SHARING.isdisjoint(names) or any(role_of(name) for name in names)


def _names_of(cls: UserClass) -> frozenset[str]:
    return frozenset().union(*(_names_in(one.node) for one in cls.ancestry))


def splits_by_worker(cls: UserClass) -> bool:
    """Whether a class asks which of the loader's workers it is in."""
    return not _WORKERS.isdisjoint(_names_of(cls))


def splits_by_rank(cls: UserClass) -> bool:
    """Whether a class asks which rank it is on, or calls what takes a rank's part."""
    return any(_asks_rank(one.node) for one in cls.ancestry)


def reads_alike(node: ast.ClassDef) -> bool:
    """Whether a class neither asks for the rank nor draws: what it reads is the same on all ranks."""
    return not _asks_rank(node) and _DRAWING.isdisjoint(_names_in(node))


def draws_at_random(cls: UserClass) -> bool:
    """Whether what a class yields is drawn, or comes from elsewhere: it may be another on each rank."""
    return not _DRAWING.isdisjoint(_names_of(cls))


def is_each_ranks_own(entry: Entry, made: Call | None) -> bool:
    """Whether what a call has made is not shared: it is made for a part of this rank's work, or what is learnt is saved under each rank's name."""
    shares = {
        turns.node for history in entry.histories for _, turns in history.loops if turns.value.spread is Spread.RANK
    }
    saves = [call for call in entry.histories[-1].calls if call.name == "torch.save"]
    is_of_share = made is not None and not shares.isdisjoint(made.loops)
    return is_of_share or any(differs_deeply(call.arg(1, "f")) for call in saves)


def is_known_data(value: Value | None) -> bool:
    """Whether all of a data set's making is in sight."""
    thing = getattr(value, "thing", None)
    return isinstance(thing, (Instance, Items)) or (isinstance(thing, Object) and thing.call is not None)


def makes_its_samples(value: Value) -> bool:
    """Whether a data set of the user's makes its samples up, whatever index is asked for."""
    thing = value.thing
    if not isinstance(thing, Instance):
        return False
    method = thing.cls.find("__getitem__")
    node = getattr(method.thing, "node", None) if method is not None else None
    args = [one.arg for one in node.args.args] if node is not None else []
    if node is None or len(args) < 2:
        return False
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    return args[1] not in used


_DIVIDING = frozenset({"chunk", "tensor_split", "scatter", "shard", "broadcast"})


def loop_shares(one: Pass) -> bool:
    """Whether the loop itself takes this rank's part: `if i % world_size != rank: continue`, `x[rank::world_size]`."""
    if one.takes_share or any(call.name.endswith("backward") and call.guards for call in one.inside):
        return True
    body = getattr(one.loop, "body", [])
    for statement in body if isinstance(body, list) else []:
        for node in ast.walk(statement):
            if isinstance(node, ast.Subscript) and _names_rank(node.slice):
                return True
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _names_rank(node, world=True):
                return True
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _DIVIDING:
                return True
    return False


def _names_rank(node: ast.AST, *, world: bool = False) -> bool:
    roles = {"rank", "local_rank", "world_size"} if world else {"rank", "local_rank"}
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if name and role_of(name) in roles:
            return True
    return False


def spreads_otherwise(calls: list[Call]) -> bool:
    """Whether a script splits the model too, so that some ranks are meant to see the same data."""
    return any(_OTHER_WAYS.search(call.name) for call in calls)
