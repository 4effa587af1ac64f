"""Random numbers that should be equal on all ranks, or should not."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import training_loops
from rankwise.lint.analyses.in_ranks import differs_deeply, is_in_ranks
from rankwise.lint.analyses.job_view import (
    is_distributed,
    line_of,
    node_in,
    once,
    places,
    places_of,
    statement_of,
    text_of,
)
from rankwise.lint.analyses.saved_files import position_of
from rankwise.lint.analyses.seeds import DRAWS, draws_in, find_seeding, last_seed, library_of
from rankwise.lint.analyses.shares import spreads_otherwise
from rankwise.lint.analyses.tensors import sources_of
from rankwise.lint.finding import Found
from rankwise.lint.library.names import LOADER, SAMPLER
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Entry, Script

_SPLIT = "torch.utils.data.random_split"
_SKLEARN = frozenset(
    f"sklearn.model_selection.{name}"
    for name in ("train_test_split", "ShuffleSplit", "StratifiedShuffleSplit", "GroupShuffleSplit")
)
_FOLDS = frozenset(f"sklearn.model_selection.{name}" for name in ("KFold", "StratifiedKFold", "StratifiedGroupKFold"))
_ORDERS = frozenset({"torch.randperm", "numpy.random.permutation", "random.sample"})
_IN_PLACE = frozenset({"random.shuffle", "numpy.random.shuffle"})
_FEEDS = frozenset({SAMPLER, LOADER, "torch.utils.data.Subset"})


@rule("RW508", "error", "X5", "ranks split or draw the data at random, each differently")
def split_differs(script: Script) -> Iterator[Found]:
    reported: set[ast.AST] = set()
    for place in once(places(script, _SPLIT, *_SKLEARN, *_FOLDS, *_ORDERS, *_IN_PLACE, anywhere=True)):
        call = place.last
        if (
            not place.is_made_by_all
            or call.guards
            or not is_distributed(place.entry)
            or not is_in_ranks(script, place.entry, call)
        ):
            continue
        if not _splits(place) or _is_agreed(place):
            continue
        reason = _reason(place)
        if reason is not None:
            severity, why = reason
            node = node_in(script, call)
            reported.add(call.node)
            message = f"each rank splits differently at `{text_of(call.node)}`: {why}"
            if node is not None:
                yield Found(node, message, _fix(call), severity=severity)
    for place in places(script, SAMPLER, anywhere=True):
        at = node_in(script, place.last) if place.is_made_by_all else None
        for call in draws_in(place.last.arg(0, "dataset")) if at is not None and at not in reported else ():
            reason = _reason(replace(place, calls=(call,))) if not call.guards else None
            if at is None or reason is None or call.node in reported or not is_in_ranks(script, place.entry, call):
                continue
            reported.add(at)
            message = f"each rank draws data of its own at `{text_of(call.node)}` (line {line_of(call)}), and gets a share of these here, not of one data set: {reason[1]}"
            # Where all are drawn from one distribution, as test data are, nothing comes of it.
            yield Found(at, message, "set one seed on all ranks before the data is drawn", severity="warning")
            break


def _splits(place: Place) -> bool:
    call = place.last
    if call.name in _FOLDS:
        shuffle = call.kwargs.get("shuffle")
        return shuffle is not None and shuffle.const is True
    if call.name == _SPLIT or call.name in _SKLEARN:
        shuffle = call.kwargs.get("shuffle")
        return shuffle is None or shuffle.const is not False
    feeds = any(other.name in _FEEDS and other.index > call.index for other in place.entry.histories[-1].calls)
    return feeds and not call.loops and _is_cut(call)


def _is_cut(call: Call) -> bool:
    """Whether a part of an order is taken: `order[:n]`."""
    name = text_of(call.arg_node(0)) if call.name in _IN_PLACE else _target(call)
    if not name:
        return False
    cuts = [
        node.slice
        for node in ast.walk(call.module.tree)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and text_of(node.value) == name
    ]
    return bool(cuts)


def _target(call: Call) -> str:
    statement = statement_of(call.module.tree, call.node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return text_of(targets[0]) if len(targets) == 1 else ""


def _is_agreed(place: Place) -> bool:
    """Whether rank 0's split is sent to the others."""
    later = place.entry.histories[-1].calls[place.last.index :]
    sent = (value for call in later if "broadcast" in call.name for value in call.args[:1])
    return any(one.made is place.last for value in sent for one in sources_of(value, cuts=False))


def _reason(place: Place) -> tuple[Severity, str] | None:
    call = place.last
    own = _own_seed(call)
    if own is not None:
        return ("error", "its seed depends on the rank") if differs_deeply(own) else None
    how = find_seeding(
        place.entry.histories[-1], call, "numpy" if call.name.startswith("sklearn") else library_of(call.name)
    )
    if how == "differs":
        return "error", "the seed that was set before it depends on the rank"
    if how == "unset" and place.entry.is_program:
        return "error", "no seed was set before it, so each process has its own"
    if how == "unknown" and place.entry.is_program and not _seen_seed(place):
        return "warning", "no seed is found before it, and without one each process has its own"
    return None


def _seen_seed(place: Place) -> bool:
    return any("seed" in call.name.lower() for call in place.entry.histories[-1].calls[: place.last.index])


def _own_seed(call: Call) -> Value | None:
    is_torch = call.name == _SPLIT
    value = call.arg(2, "generator") if is_torch else call.arg(None, "random_state", "generator", "seed")
    return None if value is None or (value.is_known and value.const is None) else value


def _fix(call: Call) -> str:
    if call.name.startswith("sklearn"):
        return "pass random_state=0, the same on all ranks"
    if call.name in {_SPLIT, "torch.randperm"}:
        return "pass generator=torch.Generator().manual_seed(0), the same on all ranks"
    return "draw from a generator with a seed that all ranks share: random.Random(0), numpy.random.default_rng(0)"


@rule("RW509", "warning", "X6", "ranks draw the same random numbers in training, because all set the same seed")
def same_noise_on_all_ranks(script: Script) -> Iterator[Found]:
    if spreads_otherwise(script.all_calls):
        return
    for entry in script.entries:
        history = entry.histories[-1]
        for _loop, inside in training_loops(history):
            draw = next((call for call in inside if _is_alike(call) and node_in(script, call) is not None), None)
            if draw is None or find_seeding(history, draw, library_of(draw.name)) != "equal":
                continue
            seed = last_seed(history, draw, library_of(draw.name))
            shown = f"`{text_of(seed.node)}`" if seed is not None and seed.name != "" else "the seed"
            message = (
                f"all ranks draw the same numbers at `{text_of(draw.node)}`, because {shown} is the same seed on all"
            )
            yield Found(node_in(script, draw) or draw.node, message, _FIX)
            return


def _is_alike(call: Call) -> bool:
    generator = call.kwargs.get("generator")
    return DRAWS.fullmatch(call.name) is not None and (generator is None or generator.const is None) and not call.guards


_FIX = "after creating the model, seed again with the rank: torch.manual_seed(seed + rank)"
_OWN = frozenset({"time", "own"})
_TEMPORARY = ("tempfile.", "os.getpid", "os.urandom")


@rule("RW517", "error", "X13", "each rank chooses a different name for the run's folder")
def folder_name_differs(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        if not is_distributed(entry) or any(call.name.startswith(_TEMPORARY) for call in entry.histories[0].calls):
            continue
        found = [place for place in once(places_of(entry)) if _is_own(script, entry, place.last)]
        used = [place for place in found if place.is_made_by_all and not _makes(place.last) and not place.last.guards]
        first = min(found, key=lambda place: place.last.index, default=None)
        node = node_in(script, first.last) if first is not None else None
        if used and node is not None:
            call = used[0].last
            shown = text_of(call.arg_node(*(position_of(call) or (None, "")))) or text_of(call.node)
            message = f"each rank has a different path in `{shown}`: its name comes from this process's own clock or random id"
            yield Found(node, message, _FIX_NAME)


def _makes(call: Call) -> bool:
    return call.name.endswith((".mkdir", ".makedirs"))


def _is_own(script: Script, entry: Entry, call: Call) -> bool:
    """Whether a call is given a path that this process has made up itself."""
    at, is_method = position_of(call), call.name.endswith((".mkdir", ".write_text"))
    path = call.arg(*at) if at is not None else call.receiver if is_method else None
    if path is None or not path.origin & _OWN or path.origin & {"host", "exists", "data"}:
        return False
    makers = [
        one
        for one in entry.histories[-1].calls
        if one.result.origin & _OWN & path.origin and one.name.startswith(("time.", "datetime.", "uuid.", "secrets."))
    ]
    return bool(makers) and all(is_in_ranks(script, entry, one) for one in (call, *makers))


_FIX_NAME = "create the name on rank 0 and send it: name = [...]; dist.broadcast_object_list(name, src=0)"
