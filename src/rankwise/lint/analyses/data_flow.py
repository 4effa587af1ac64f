"""Which loader feeds which loop, with which sampler and data set: what the rules on data ask."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.analyses.in_ranks import WHO
from rankwise.lint.analyses.job_view import function_of, ops, text_of
from rankwise.lint.interpreter.functions import has_yield
from rankwise.lint.interpreter.history import Fork
from rankwise.lint.interpreter.looping import generator_of
from rankwise.lint.interpreter.values import Instance, Items, Object, Value, object_of
from rankwise.lint.library.constructor_table import PASS_ON
from rankwise.lint.library.names import ACCELERATOR, DDP, FABRIC, LOADER, SAMPLER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.lint.interpreter.history import History, Item
    from rankwise.lint.interpreter.values import Call, Guard
    from rankwise.lint.program import Module
    from rankwise.lint.script import Entry, Script

ITERABLE = "torch.utils.data.IterableDataset"
#: Where a DataLoader takes what.
AT = {
    "dataset": 0,
    "shuffle": 2,
    "sampler": 3,
    "batch_sampler": 4,
    "num_workers": 5,
    "drop_last": 8,
    "worker_init_fn": 10,
}
#: Where a DistributedSampler takes what.
SAMPLER_AT = {"dataset": 0, "num_replicas": 1, "rank": 2, "shuffle": 3, "seed": 4, "drop_last": 5}
_HARMLESS = ("builtins.", "tqdm.", "torch.optim.", "user.", "rich.", "logging.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One loop over a loader, as one rank makes it.

    Attributes:
        loader: What it goes over.
        loop: The loop.
        over: What stands behind its ``in``.
        module: Where it stands.
        around: The loops around it, outermost first, those of the calling functions too.
        entry: The program, or a function that it does not call.
        history: What this rank does.
        inside: All library calls of one turn.
        syncs: Whether a backward pass in it is made together with the other ranks.
        guards: Tests on the rank that enclose it.
        takes_share: Whether a rank leaves out turns that are another's.
    """

    loader: Object
    loop: ast.AST
    over: ast.AST
    module: Module
    around: tuple[ast.AST, ...]
    entry: Entry
    history: History
    inside: tuple[Call, ...]
    syncs: bool
    guards: tuple[Guard, ...]
    takes_share: bool

    @property
    def trains(self) -> bool:
        """Whether a model learns in it."""
        return self.syncs or any(_teaches(call) for call in self.inside)


def passes(script: Script) -> list[Pass]:
    """All loops over loaders that are seen, of each rank."""
    found: list[Pass] | None = script.memo.get("passes")
    if found is None:
        found = script.memo["passes"] = [
            one for entry in script.entries for history in entry.histories for one in _passes(entry, history)
        ]
    return found


def _teaches(call: Call) -> bool:
    last = call.name.rpartition(".")[2]
    if last in {"backward", "manual_backward"}:
        return True
    receiver = call.receiver
    owner = receiver.thing.kind if isinstance(receiver.thing, Object) else receiver.path
    return last == "step" and any(word in owner.lower() for word in ("optim", "scaler", "opt."))


def _passes(entry: Entry, history: History) -> Iterator[Pass]:
    inside: dict[ast.AST, list[Call]] = defaultdict(list)
    for call in history.calls:
        for loop in call.loops:
            inside[loop].append(call)
    loops = {turns.node: turns for _, turns in history.loops}
    found = [
        (loader, turns.node, _over(turns.node), turns, around)
        for around, turns in history.loops
        for loader in loaders_in(turns.value)
    ]
    # `batches = iter(loader)` in a loop whose turns, or parts of them, take `next(batches)`.
    begun = [
        (loader, call)
        for call in history.calls
        if call.name == "builtins.iter" and call.loops and call.args
        for loader in loaders_in(call.args[0])
    ]
    for loader, call in begun:
        turns = loops.get(call.loops[-1])
        if turns is not None and any(
            one.name == "builtins.next" and loader in loaders_in(one.args[0]) for one in inside[turns.node] if one.args
        ):
            found.append((loader, call.node, call.node, turns, call.loops))
    seen: set[tuple[int, int]] = set()
    for loader, node, over, turns, around in found:
        if (id(loader), id(node)) in seen:
            continue
        seen.add((id(loader), id(node)))
        tree, chain = turns.module.tree, around if around[-1:] == (turns.node,) else (*around, turns.node)
        is_fed = any(generator_of(loops[one].value)[0] is not None for one in around if one in loops)
        if around and not is_fed and has_yield(turns.node) and not any(map(_teaches, inside[turns.node])):
            # A generator that `next` runs: its own loops begin it anew, and what learns is in the loop around that.
            within = tuple(one for one in around if function_of(tree, one) is function_of(tree, node))
            turns, around, chain = loops.get(around[0], turns), within, around[:1]  # noqa: PLW2901 - the same pass, seen from there
        # The loop of a generator is another one for each loop that it feeds.
        calls = tuple(call for call in inside.get(turns.node, ()) if call.loops[: len(chain)] == chain)
        yield Pass(loader=loader, loop=node, over=over, module=turns.module, around=around, entry=entry,
                   history=history, inside=calls, syncs=any(op.family == "backward" and not op.in_group for op in ops(turns.items)), guards=turns.guards,
                   takes_share=_takes_share(turns.items))  # fmt: skip


def _over(loop: ast.AST) -> ast.AST:
    generators = getattr(loop, "generators", None)
    over: ast.AST = generators[0].iter if generators else getattr(loop, "iter", loop)
    return over


def _takes_share(items: Iterable[Item]) -> bool:
    """`if i % world_size != rank: continue`."""
    return any(
        isinstance(item, Fork)
        and item.value.origin & WHO
        and any(arm.exit is not None and arm.exit.kind == "continue" for arm in item.arms)
        for item in items
    )


def loaders_in(value: Value) -> list[Object]:
    """The loaders that a loop over this value goes over: itself, enumerated, zipped."""
    thing = object_of(value)
    if not isinstance(thing, Object):
        return []
    if thing.kind == LOADER:
        return [thing] if thing.call is not None else []
    if thing.kind in {"enumerate", "reversed", "zip"}:
        inner = thing.attrs["of"]
        parts = inner.thing.values if isinstance(inner.thing, Items) else [inner]
        return [one for part in parts for one in loaders_in(part)]
    return []


def is_stream(dataset: Value) -> bool:
    """Whether it is a stream of a class of the user's."""
    return isinstance(dataset.thing, Instance) and ITERABLE in dataset.thing.cls.library_bases


def hf_stream(dataset: Value) -> Call | None:
    """The call of `load_dataset(..., streaming=True)` that a data set comes from, if nothing has split it since."""
    thing = dataset.thing
    return thing.call if isinstance(thing, Object) and thing.kind == "datasets.IterableDataset" else None


def given(call: Call, name: str) -> Value | None:
    """An argument of a DataLoader's call; None if it was left out or is None."""
    value = call.arg(AT[name], name)
    return None if value is None or (value.is_known and value.const is None) else value


def sampler_of(loader: Object) -> Object | None:
    """The DistributedSampler that a loader draws from, by itself or through a batch sampler."""
    call = loader.call
    if call is None:
        return None
    value = given(call, "sampler")
    if value is None:
        batches = given(call, "batch_sampler")
        inner = batches.thing if batches is not None else None
        if isinstance(inner, Object) and inner.call is not None:
            value = inner.call.arg(0, "sampler")
    thing = value.thing if value is not None else None
    return thing if isinstance(thing, Object) and thing.kind == SAMPLER and thing.call is not None else None


def is_prepared(loader: Object) -> bool:
    """Whether a framework has taken the loader over, and cares for its share and its order."""
    return "__prepared__" in loader.attrs


def shown(one: Pass) -> str:
    """What a pass goes over, for messages: ``loader`` of ``enumerate(loader)``."""
    node = one.over
    while (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"enumerate", "tqdm", "iter"}
        and node.args
    ):
        node = node.args[0]
    return text_of(node)


def is_given_away(one: Pass) -> bool:
    """Whether the loader goes through a function whose text is not at hand, and may come back as another."""
    for call in one.history.calls:
        if call.name.startswith(_HARMLESS) or call.name in PASS_ON:
            continue
        if any(object_of(value) is one.loader for value in (*call.args, *call.kwargs.values())):
            return True
    return False


def epoch_loops(one: Pass, made: Call | None) -> list[ast.AST]:
    """Loops around a pass that go over the same samples again: more than one turn, and not around what ``made`` them, unless where they lack."""
    before = made.loops if made is not None else ()
    kept = [loop for loop in one.around if loop not in before or _is_made_where_lacking(loop, one, made)]
    return [loop for loop in kept if not _is_once(loop) and not _goes_over_loaders(loop, one.over)]


def _is_made_where_lacking(loop: ast.AST, one: Pass, made: Call | None) -> bool:
    """``if loader is None: loader = make()`` in a loop: later turns go over what the first has made."""
    nodes = {made.node, *(site.node for site in made.stack)} if made is not None else set()
    tests = [node for node in ast.walk(loop) if isinstance(node, ast.If) and not nodes.isdisjoint(ast.walk(node))]
    return any(
        isinstance(part, ast.expr) and text_of(part) == shown(one) for node in tests for part in ast.walk(node.test)
    )


def _is_once(loop: ast.AST) -> bool:
    over = getattr(loop, "iter", None)
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "range":
        return len(over.args) == 1 and isinstance(over.args[0], ast.Constant) and over.args[0].value in (0, 1)
    return isinstance(over, (ast.List, ast.Tuple)) and len(over.elts) < 2


def _goes_over_loaders(loop: ast.AST, over: ast.AST) -> bool:
    target = getattr(loop, "target", None)
    if target is None:
        return False
    names = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(over))


def training_loops(history: History) -> Iterator[tuple[ast.AST, list[Call]]]:
    """Outermost loops in which a model that ranks share learns, with all library calls in them."""
    if not any(call.name in {DDP, f"{ACCELERATOR}.prepare", f"{FABRIC}.setup"} for call in history.calls):
        return
    loops = {call.loops[0]: None for call in history.calls if call.loops and call.name.endswith("backward")}
    for loop in loops:
        yield loop, [call for call in history.calls if loop in call.loops]
