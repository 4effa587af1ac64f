"""Whether a rank's part of the data is its own: what of a loader, a data set or a loop depends on the rank."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.library.hints import role_of
from rankwise.lint.model.values import Instance, Items, Object, UserClass
from rankwise.lint.topics.data_flow import given
from rankwise.lint.topics.in_ranks import differs_deeply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.topics.data_flow import Pass

#: Words in the text of a class that takes a part of the data for this rank.
_SHARES = re.compile(
    r"rank|world_?size|replica|shard|num_processes|process_index|split_by|by_node|\bdist\b|partition",
    re.IGNORECASE,
)
_WORKERS = re.compile(r"worker", re.IGNORECASE)
_RANDOM = re.compile(
    r"\brand|random|\bseed|normal_|uniform|shuffle|generator|\brng\b|np\.|gym|\benv\b|sample\(|queue|recv|socket",
    re.IGNORECASE,
)
#: Torch's samplers that draw from the whole data set on each rank.
_SAMPLERS = frozenset(
    f"torch.utils.data.{name}Sampler" for name in ("Random", "Sequential", "WeightedRandom", "SubsetRandom")
)
#: Words of a script that spreads a model in other ways than by copies: there the ranks of a part need equal batches.
_OTHER_WAYS = re.compile(
    r"tensor_parallel|parallelize_module|device_mesh|DeviceMesh|pipelin|\btp_|_tp\b|sequence_parallel|context_parallel|mpu\b"
)


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
        isinstance(thing, Object)
        and thing.kind in _SAMPLERS
        and thing.call is not None
        and not differs_deeply(sampler)
    )


def _class_shares(dataset: Value) -> bool:
    return any(_SHARES.search(text_of_class(cls)) for cls in classes_in(dataset))


def classes_in(value: Value | None, depth: int = 0) -> Iterator[UserClass]:
    """The user's classes of a data set and of the data sets in it."""
    if value is None or depth > 4:
        return
    thing = value.thing
    if isinstance(thing, Instance):
        yield from thing.cls.ancestry()
        for part in thing.attrs.values():
            yield from classes_in(part, depth + 1)
    elif isinstance(thing, Object) and thing.call is not None:
        for part in (*thing.call.args, *thing.call.kwargs.values()):
            yield from classes_in(part, depth + 1)
    elif isinstance(thing, Items):
        for part in thing.values[:16]:
            yield from classes_in(part, depth + 1)


def text_of_class(cls: UserClass) -> str:
    """A class as text, without its docstrings and comments."""
    return ast.unparse(ast.Module([part for part in cls.node.body if not isinstance(part, ast.Expr)], []))


def splits_by_worker(cls: UserClass) -> bool:
    """Whether a class asks which of the loader's workers it is in."""
    return any(_WORKERS.search(text_of_class(one)) for one in cls.ancestry())


def splits_by_rank(cls: UserClass) -> bool:
    """Whether a class asks which rank it is on, or gets a part from outside."""
    return any(_SHARES.search(text_of_class(one)) for one in cls.ancestry())


def draws_at_random(cls: UserClass) -> bool:
    """Whether what a class yields is drawn, or comes from elsewhere: it may be another on each rank."""
    return any(_RANDOM.search(text_of_class(one)) for one in cls.ancestry())


def is_known_data(value: Value | None) -> bool:
    """Whether all of a data set's making is in sight."""
    if value is None:
        return False
    thing = value.thing
    if isinstance(thing, Instance):
        return True
    return isinstance(thing, Items) or (isinstance(thing, Object) and thing.call is not None)


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
    used = {
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }
    return args[1] not in used


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
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {
                "chunk",
                "tensor_split",
                "scatter",
                "shard",
                "broadcast",
            }:
                return True
    return False


def _names_rank(node: ast.AST, *, world: bool = False) -> bool:
    roles = {"rank", "local_rank", "world_size"} if world else {"rank", "local_rank"}
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if name and role_of(name) in roles:
            return True
    return False


def spreads_otherwise(calls: list[Call], text: str) -> bool:
    """Whether a script splits the model too, so that some ranks are meant to see the same data."""
    return _OTHER_WAYS.search(text) is not None or any(
        "tensor.parallel" in call.name or "pipelining" in call.name for call in calls
    )
