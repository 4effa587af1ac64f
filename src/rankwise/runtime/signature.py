"""Before data moves, the ranks compare what each is about to do; if they differ, all of them say who does what."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, final, get_args

import torch

from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, UsageError
from rankwise.base.rank_names import name_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType, TracebackType

    from rankwise.runtime.control import Control

Checking = Literal["full", "calls", "off"]


class Members(Protocol):
    """Those who compare: what is needed here of a ``Group``, which itself compares."""

    @property
    def rank(self) -> int:
        """Our own global rank."""

    @property
    def control(self) -> Control | None:
        """The members' side channel; None if we are not a member."""


_checking: list[Checking] = ["full"]
_OWN = "rankwise"
#: The line of the call, and the callers that are shown behind it.
_NUM_FRAMES = 3
_MAX_SHOWN, _MAX_PATHS = 4, 5
#: What the ranks rightly call from different lines: `if rank == root: x = broadcast(x) ... else: x = broadcast(None)`.
_FROM_ANYWHERE = {
    "barrier",
    "broadcast",
    "broadcast_",
    "data loader",
    "data loader step",
    "gather",
    "gather_into",
    "loss_scale",
    "reduce",
    "scatter",
}
#: How Gloo, NCCL and the kernel tell that the other end is gone.
_LOST = (
    "onnection closed",
    "onnection reset",
    "onnection refused",
    "onnection was",
    "onnection timed out",
    "ot connected",
    "ocket closed",
    "Broken pipe",
    "pair closure",
    "remote process exited",
    "ncclRemoteError",
    "communicator was aborted",
)
_LATE = ("imed out", "timeout")


def set_checking(level: Checking) -> Checking:
    """Choose how much the ranks compare before each collective.

    ``"full"``: the call, its arguments, and the line of the script that it comes from. Without the last, two
    all_reduces of equal shapes that one rank calls in the other order would be silently paired and mixed up.
    Only the line of the call itself is compared, and for calls with a root not even that: calls through a helper of
    yours, or in a loop, come from one line, and are distinguished by ``name=`` only.
    ``"calls"``: the same without the line, for scripts in which calls rightly match from different lines.
    ``"off"``: nothing, as in torch, except for what the collective must know: shapes that differ, and NaN.

    Args:
        level: The new level.

    Returns:
        The previous level.

    Raises:
        UsageError: There is no such level.

    Collective: every rank must choose the same level at the same point; a rank that compares waits for the others.
    """
    if level not in get_args(Checking):
        raise UsageError(f"there is no checking level {level!r}", hint=f"choose one of {', '.join(get_args(Checking))}")
    before, _checking[0] = _checking[0], level
    return before


def locate(name: str | None = None) -> str:
    """Return where in the user's script we are: ``train.py:10``, and the two callers behind it, which are only shown.

    Frames of the standard library and of installed packages are left out: a profiler, a debugger or a progress bar
    that runs on one rank only is no difference.

    Args:
        name: What the user calls this place; returned instead, in single quotes.
    """
    if name is not None:
        return f"'{name}'"
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _NUM_FRAMES:
        module = str(frame.f_globals.get("__name__", ""))
        is_users = module != _OWN and not module.startswith(("rankwise.", "torch."))
        if is_users and (base := _find_own_file(frame.f_code.co_filename)):
            found.append(f"{base}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "?"


@cache
def _find_own_file(path: str) -> str:
    """Return the name of a file of the user's; empty for one of Python or of an installed package."""
    if path.startswith("<frozen ") or "/site-packages/" in path or "/dist-packages/" in path:
        return ""
    paths = sysconfig.get_paths()
    if path.startswith(tuple(f"{paths[key]}{os.sep}" for key in ("stdlib", "platstdlib"))):
        return ""
    return os.path.basename(path)  # noqa: PTH119 - folders may differ between hosts


def _is_name(site: str) -> bool:
    return site.startswith("'")


def agree(
    group: Members,
    call: str,
    *,
    site: str,
    must: Mapping[str, Any],
    may: Any = None,
    fault: CollectiveError | None = None,
    timeout_s: float | None = None,
) -> list[Any] | None:
    """Make sure that all ranks of a group are about to do the same.

    A rank whose own call is wrong still takes part, so that the others read the same error and do not wait for it.

    Args:
        group: The ranks that compare.
        call: The collective's name.
        site: Where it is called from, or its name if the user gave one.
        must: What has to be equal on all ranks.
        may: What may differ (JSON) and all need to know: shapes of uneven tensors.
        fault: What is wrong with this rank's own call.
        timeout_s: Seconds to wait for the slowest rank; None: the group's.

    Returns:
        None if all is equal; else each rank's ``may``, in the order of ``group.ranks``.

    Raises:
        CollectiveError: The ranks differ in ``must``, or one's call is wrong.
        CollectiveTimeoutError: Some rank did not arrive; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    control, level = group.control, _checking[0]
    if control is None or len(control.ranks) == 1 or (level == "off" and may is None):
        if fault is not None:
            raise _place(fault, f"{call} at {show_site(site)}", group)
        return None
    is_compared = _is_name(site) or (level == "full" and call not in _FROM_ANYWHERE)
    compared: dict[str, Any] = {"call": call, "site": show_site(site) if is_compared else "", **must}
    if level == "off":
        compared = {"call": call}
    wrong, what = None if fault is None else [fault.message, fault.hint], f"{call} at {show_site(site)}"
    with naming(group.rank, what):
        text = json.dumps([compared, may, wrong])
        texts = control.compare(text, what=what, kind="collective", timeout_s=timeout_s)
        if texts is None:
            if fault is not None:
                raise _place(fault, f"{what}, on every rank", group)
            return None
        seen = [json.loads(text) for text in texts]
        # Somebody differs, in what is compared or in what may differ; lines are shown even where they are not compared.
        sites = [site] * len(seen)
        if any(one[0] != seen[0][0] for one in seen):
            sites = control.exchange(site, what=what)
    firsts = [show_site(site) for site in sites]
    if len(set(firsts)) == len(set(sites)):  # else the callers are what tells the ranks apart
        sites = firsts
    _raise_faults(control, group.rank, call, seen, sites)
    _raise_differences(control, group.rank, [one[0] for one in seen], sites)
    return [one[1] for one in seen]


@final
class naming(AbstractContextManager[None]):  # noqa: N801 - called as a function
    """Turn a lost connection, which torch tells as an address, into an error that says what was being done; it stands around each forward, where a generator would cost more than the rest.

    Args:
        rank: This rank.
        what: What is being done.
    """

    __slots__ = ("_rank", "_what")

    def __init__(self, rank: int, what: str) -> None:
        self._rank, self._what = rank, what

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Raise a CollectiveError, or a CollectiveTimeoutError, from what torch says of a connection."""
        if not isinstance(error, RuntimeError):
            return
        text = str(error)
        is_late, is_lost = any(word in text for word in _LATE), any(word in text for word in _LOST)
        if isinstance(error, torch.OutOfMemoryError) or not (is_late or is_lost):
            return
        first = text.splitlines()[0][:200]
        if is_late and not is_lost:
            raise CollectiveTimeoutError(
                f"{self._what}: {first}",
                rank=self._rank,
                hint="a rank stopped while data moved: look at the others' stacks",
            ) from error
        raise CollectiveError(
            f"{self._what}: a peer left while this rank waited for it ({first})",
            rank=self._rank,
            hint="this rank is rarely the cause: look for the rank that ended or failed first",
        ) from error


def show_site(site: str) -> str:
    """Return the line of the call alone, without its callers."""
    return site if _is_name(site) else site.partition(" < ")[0]


def _place(fault: CollectiveError, where: str, group: Members) -> CollectiveError:
    return CollectiveError(f"{where}: {fault.message}", rank=group.rank, hint=fault.hint)


def _raise_faults(control: Control, own: int, call: str, seen: list[Any], sites: list[str]) -> None:
    faults = {rank: one[2] for rank, one in zip(control.ranks, seen, strict=True) if one[2] is not None}
    if not faults:
        return
    first = next(iter(faults))
    # What a call was given may hold addresses; the first rank stands for those that made the same mistake.
    others = [rank for rank in faults if rank != first]
    more = f" ({name_ranks(others)} too)" if others else ""
    site = sites[control.ranks.index(first)]
    raise CollectiveError(f"{call} at {site}, rank {first}{more}: {faults[first][0]}", rank=own, hint=faults[first][1])


def _raise_differences(control: Control, own: int, seen: list[dict[str, Any]], sites: list[str]) -> None:
    """Raise the error for the first thing in which the calls differ, if they do."""
    keys = next((key for key in ("call", "site") if len({one.get(key) for one in seen}) > 1), None)
    key = keys or next((key for key in seen[0] if any(one.get(key) != seen[0][key] for one in seen)), None)
    if key is None:
        return
    calls = sorted({str(one["call"]) for one in seen})
    texts, hint = _TELL.get(key, _tell_plain)(key, seen)
    groups: dict[str, list[int]] = {}
    for rank, value, site in zip(control.ranks, texts, sites, strict=True):
        groups.setdefault(f"{value} from {site}" if value else site, []).append(rank)
    shown = [f"{name_ranks(ranks)}: {value}" for value, ranks in list(groups.items())[:_MAX_SHOWN]]
    if len(groups) > _MAX_SHOWN:
        rest = sorted(rank for ranks in list(groups.values())[_MAX_SHOWN:] for rank in ranks)
        shown.append(f"{len(groups) - _MAX_SHOWN} more on {name_ranks(rest)}")
    differs = f"{calls[0]}: {_NAMES.get(key, key)} differs"
    subject = "the ranks called different collectives" if key == "call" else differs
    raise CollectiveError(f"{subject}: {'; '.join(shown)}", rank=own, hint=hint)


_NAMES = {"site": "the call site", "tree": "the structure", "leaves": "a value", "op": "the operation",
          "ranks": "the list of ranks", "root": "the root", "slots": "the number of slots",
          "tied": "which tensors are the same one (its index, and the first index of it)"}  # fmt: skip


def _tell_plain(key: str, seen: list[dict[str, Any]]) -> tuple[list[str], str]:
    hints = {
        "call": "one rank took another branch, or skipped a call: all must make the same calls in the same order",
        "root": "all ranks must name the same global rank: does the root depend on the rank?",
        "op": "pass the same operation on every rank",
        "ranks": "every rank must make every group, with the same list, whether it is a member or not",
        "tied": "tie the same weights on every rank",
        "timeout": "pass the same timeout_s on every rank",
    }
    what = "" if key == "call" else f"{key} "
    return [f"{what}{one.get(key)}" for one in seen], hints.get(key, f"pass the same {key} on every rank")


def _tell_site(_: str, seen: list[dict[str, Any]]) -> tuple[list[str], str]:
    hint = (
        "the ranks are out of step, or make the same calls in different orders (dict or set order?); if it is intended, "
        "pass the same name= at both places, or set_checking('calls')"
    )
    leaves = [one.get("leaves") or [] for one in seen]
    if all(leaf == leaves[0] for leaf in leaves):
        return [""] * len(seen), hint
    return [", ".join(format_leaf(leaf) for _, leaf in text[:2]) for text in leaves], hint


def _tell_tree(key: str, seen: list[dict[str, Any]]) -> tuple[list[str], str]:
    paths = [[path for path, _ in one.get("leaves") or []] for one in seen]
    common = set(paths[0]).intersection(*paths[1:])
    if all(set(own) == common for own in paths):
        return [str(one[key]) for one in seen], "pass the same containers on every rank"
    hint = (
        "every rank must pass the same keys and lengths: fill in a zero, or None everywhere, where a rank has nothing"
    )
    lines = []
    for own in paths:
        extra = [path for path in own if path not in common]
        more = f" and {len(extra) - _MAX_PATHS} more" if len(extra) > _MAX_PATHS else ""
        lines.append(f"has {', '.join(extra[:_MAX_PATHS])}{more}" if extra else "has none of these")
    return lines, hint


def _tell_leaves(_: str, seen: list[dict[str, Any]]) -> tuple[list[str], str]:
    all_leaves = [one["leaves"] for one in seen]
    index = next(i for i in range(len(all_leaves[0])) if any(own[i] != all_leaves[0][i] for own in all_leaves))
    path, _first = all_leaves[0][index]
    facets = [own[index][1] for own in all_leaves]
    where = f"{path} is " if path else ""
    if {facet[0] for facet in facets} == {"int", "float"}:
        hint = "pass the same kind of number: start from 0.0 instead of 0 where it will be a float"
    elif len({facet[0] for facet in facets}) > 1:
        hint = "cast to one dtype on every rank, as in x.to(torch.float32), or pass the same kind of number"
    elif len({json.dumps(facet[1]) for facet in facets}) > 1:
        hint = "shapes must be equal here; for uneven ones use all_gather or gather, or reduce sums and counts instead of samples"
    else:
        hint = "move the tensor to the same kind of device on every rank"
    return [where + format_leaf(facet) for facet in facets], hint


_TELL = {"site": _tell_site, "tree": _tell_tree, "leaves": _tell_leaves}


def format_leaf(facet: Sequence[Any]) -> str:
    """Return ``float32 (3,) on cuda`` for what ``describe_leaf`` told."""
    dtype, shape, device = facet
    text = dtype if shape is None else f"{dtype} {tuple(shape)}"
    return text if device in {None, "cpu"} else f"{text} on {device}"
