"""Scenes for the rules of the verdict: a few lines say what each rank did, and where it stands."""

from __future__ import annotations

from typing import Any

from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Child, Evidence, Group, Op, RankFacts, Scene

NOW_S = 1000.0
_TORCH = "/env/lib/python3.11/site-packages/torch"
_DISTRIBUTED = f"{_TORCH}/distributed/distributed_c10d.py"
_GRAPH = f"{_TORCH}/autograd/graph.py"
_DDP = f"{_TORCH}/nn/parallel/distributed.py"


def op(name: str = "all_reduce", seq: int = 0, at: int | str = 7, shape: tuple[int, ...] = (4,), **facts: Any) -> Op:
    """Return a collective that is over; ``seq`` 0 is numbered by `rank`."""
    site = f"/job/train.py:{at}" if isinstance(at, int) else at
    filled = {"dtypes": ("float32",), "is_over": True, "group": "0", **facts}
    shapes = () if name == "barrier" else (shape,)
    return Op(name=name, seq=seq, site=site, shapes=shapes, **filled)


def gradient(at: int = 7, shape: tuple[int, ...] = (20,), **facts: Any) -> Op:
    """Return a bucket of DDP's gradients."""
    return op(
        "all_reduce",
        at=at,
        shape=shape,
        source="native",
        inside=("backward", "_engine_run_backward"),
        **facts,
    )


def buffers(at: int = 6, **facts: Any) -> Op:
    """Return the broadcast of DDP's buffers before a forward pass."""
    inside = ("_call_impl", "forward", "_pre_forward", "_sync_buffers")
    return op("broadcast", at=at, shape=(5,), source="native", inside=inside, **facts)


def stack(*frames: tuple[str, int, str], at: int = 7, function: str = "<module>") -> Stack:
    """Return a stack whose innermost line of the user's is ``at``; ``frames`` are inside it, innermost first."""
    inside = [Frame(file=file, line=line, function=name) for file, line, name in frames]
    return Stack(frames=(*inside, Frame(file="/job/train.py", line=at, function=function)))


def in_call(name: str = "all_reduce", at: int = 7) -> Stack:
    """Return the stack of a rank inside a function of torch.distributed."""
    return stack((_DISTRIBUTED, 2810, name), (f"{_TORCH}/distributed/c10d_logger.py", 83, "wrapper"), at=at)


def in_backward(at: int = 7) -> Stack:
    """Return the stack of a rank inside a backward pass."""
    return stack((_GRAPH, 979, "_engine_run_backward"), (f"{_TORCH}/_tensor.py", 625, "backward"), at=at)


def in_forward(at: int = 6) -> Stack:
    """Return the stack of a rank that broadcasts DDP's buffers."""
    return stack((_DDP, 2160, "_sync_module_states"), (_DDP, 1600, "_pre_forward"), at=at)


def in_wrapping(at: int = 5) -> Stack:
    """Return the stack of a rank inside DDP's constructor."""
    return stack(
        (f"{_TORCH}/distributed/utils.py", 283, "_verify_param_shape_across_processes"),
        (_DDP, 870, "__init__"),
        at=at,
    )


def in_loader(at: int = 4) -> Stack:
    """Return the stack of a rank that waits for a batch."""
    file = f"{_TORCH}/utils/data/dataloader.py"
    return stack(
        ("/env/lib/python3.11/threading.py", 320, "wait"),
        (file, 1300, "_try_get_data"),
        (file, 1450, "_get_data"),
        at=at,
    )


def elsewhere(at: int = 9) -> Stack:
    """Return the stack of a rank in a line of the user's own."""
    return stack(at=at)


def rank(
    number: int,
    *ops: Op,
    at: Stack | None = None,
    groups: tuple[Group, ...] | None = None,
    world: int = 2,
    backend: str = "gloo",
    is_asleep: bool = True,
    **facts: Any,
) -> RankFacts:
    """Return the facts of a rank: its operations get numbers in their groups, in their order.

    Args:
        number: The rank.
        ops: What it did, the last one of them open if its stack is in a collective.
        at: Its stack.
        groups: Its groups beside the one of all ranks.
        world: How many ranks there are.
        backend: Of the group of all ranks.
        is_asleep: Whether it has not moved for long; else it uses a whole core.
        facts: More of RankFacts, and of Evidence: has_left, steps, dumped_s.
    """
    counts: dict[str, int] = {}
    numbered = []
    for one in ops:
        seq = one.seq
        if not seq:
            key = f"{one.group} {one.name} {one.peer}" if one.is_message else one.group
            seq = counts[key] = counts.get(key, 0) + 1
        values = {name: getattr(one, name) for name in Op.__slots__}
        numbered.append(Op(**{**values, "seq": seq}))
    known = {"0": Group(name="0", ranks=tuple(range(world)), backend=backend)}
    known |= {group.name: group for group in groups or ()}
    own = {name: facts.pop(name) for name in ("has_left", "steps", "dumped_s", "has_joined") if name in facts}
    evidence = Evidence(
        ops=tuple(numbered), groups=known, **{"has_joined": True, "dumped_s": NOW_S, "stacks_s": NOW_S, **own}
    )
    idle = {"still_s": 10.0, "cpu_share": 0.0} if is_asleep else {"still_s": 0.0, "cpu_share": 0.98}
    return RankFacts(rank=number, pid=4000 + number, **{"evidence": evidence, "stack": at, **idle, **facts})


def ended(number: int, *ops: Op, code: int = 0, ended_s: float = NOW_S - 5, **facts: Any) -> RankFacts:
    """Return the facts of a rank that has ended."""
    return rank(number, *ops, state="ended", code=code, ended_s=ended_s, **{"dumped_s": ended_s, **facts})


def scene(*ranks: RankFacts, **facts: Any) -> Scene:
    """Return a scene of all its ranks."""
    return Scene(ranks=ranks, **{"world_size": len(ranks), "now_s": NOW_S, **facts})


def workers(*states: str) -> tuple[Child, ...]:
    """Return data-loading workers by the kernel's letters."""
    return tuple(Child(pid=9000 + number, name="pt_data_worker", state=state) for number, state in enumerate(states))
