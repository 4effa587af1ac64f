"""Weights are set differently on the ranks after the model was wrapped.

**Why it breaks.** DDP broadcasts rank 0's weights once, in its constructor. What is loaded or initialised afterwards
stays on its rank: rank 0 continues from the checkpoint, the others from random weights, and averaged gradients keep the
difference forever.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
if dist.get_rank() == 0:
    model.module.load_state_dict(torch.load("last.pt", map_location="cpu", weights_only=True))
model(torch.rand(2, 4)).sum().backward()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
model.module.load_state_dict(torch.load("last.pt", map_location="cpu", weights_only=True))
model(torch.rand(2, 4)).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** All ranks load, the model is wrapped or its weights are broadcast afterwards, or all ranks have the same seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.model.values import Object, Spread
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import is_in
from rankwise.lint.topics.wrapping import refers_to, wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.wrapping import Wrap

_RANDOM = frozenset({"reset_parameters", "apply", "init_weights", "_init_weights", "initialize_weights"})
_SENDS = (
    "broadcast",
    "_sync_params_and_buffers",
    "_broadcast_coalesced",
    "sync_module_states",
    "sync_params",
    "broadcast_parameters",
)


def check(script: Script) -> Iterator[Finding]:
    """States loaded, copied or drawn on each rank in its own way."""
    told: set[int] = set()
    for wrap in wraps(script):
        if not wrap.kind.endswith("DistributedDataParallel"):
            continue
        for call, message, fix in (*_loads(wrap), *_draws(wrap), *_copies(wrap)):
            if not is_in(script.tree, call.node) or id(call.node) in told:
                continue
            told.add(id(call.node))
            is_here = is_in(script.tree, wrap.call.node)
            also = (
                [("wrapped here", script.piece.path, span_of(wrap.call.node, script.lines))]
                if is_here
                else []
            )
            yield script.finding(RULE, call.node, message, fix, also=also)


def _loads(wrap: Wrap) -> Iterator[tuple[Call, str, str]]:
    for call in wrap.calls_after():
        if call.name.rpartition(".")[2] != "load_state_dict" or not _is_its(call, wrap):
            continue
        if _is_sent(wrap, call.index) or wrap.is_wrapped_again(call.index):
            continue
        if call.guards:
            test = text_of(call.guards[-1].node)
            yield (
                call,
                f"only ranks with `{test}` load the state, after the model was wrapped: the other ranks keep different weights forever",
                f"load it on every rank, outside of `{test}`, or before the model is wrapped",
            )
        elif (own := _own_file(call)) is not None:
            yield (
                call,
                f"whether this rank loads the state depends on `{own}`, a file of its own, and the model is already wrapped: ranks continue with different weights",
                "let all ranks read one file, decide on rank 0 whether to resume, and broadcast the decision",
            )


def _is_its(call: Call, wrap: Wrap) -> bool:
    func = getattr(call.node, "func", None)
    return (
        call.receiver.thing is wrap.wrapper
        or (wrap.inner.thing is not None and call.receiver.thing is wrap.inner.thing)
        or (func is not None and call.receiver.thing is None and refers_to(func, wrap))
    )


def _own_file(call: Call) -> str | None:
    for node, value, taken in call.tests:
        if (
            taken
            and "exists" in value.origin
            and value.origin & {"rank", "local_rank"}
            and value.spread is Spread.LOCAL
        ):
            return text_of(node)
    return None


def _is_sent(wrap: Wrap, index: int) -> bool:
    return any(
        call.index > index and any(word in call.name for word in _SENDS) for call in wrap.calls_after()
    )


def _seed_differs(wrap: Wrap, before: int) -> bool:
    """Whether the last seed differs between ranks."""
    seeds = [
        call
        for call in wrap.entry.histories[0].calls
        if call.index < before
        and call.name.rpartition(".")[2] in {"manual_seed", "seed_everything", "set_seed", "manual_seed_all"}
        and call.args
    ]
    if seeds:
        return seeds[-1].args[0].spread is not Spread.EQUAL
    return wrap.entry.is_program and _is_drawn(wrap)


def _is_drawn(wrap: Wrap) -> bool:
    """Whether no seed is set, so that each process draws its own initial weights."""
    inner = wrap.inner.thing
    is_plain = isinstance(inner, Object) and inner.kind.startswith("torch.nn.")
    calls = wrap.entry.histories[0].calls
    return is_plain and not any("seed" in call.name or "load" in call.name for call in calls)


def _draws(wrap: Wrap) -> Iterator[tuple[Call, str, str]]:
    """Weights drawn anew after the wrapping, under a seed of this rank's."""
    for call in wrap.calls_after():
        word = call.name.rpartition(".")[2]
        if word not in _RANDOM or not (wrap.holds(call.receiver) or _is_its(call, wrap)):
            continue
        if (
            not _seed_differs(wrap, call.index)
            or _is_sent(wrap, call.index)
            or wrap.is_wrapped_again(call.index)
        ):
            continue
        yield (
            call,
            f"`{text_of(call.node)}` draws new weights after the model was wrapped, from a different seed on each rank: the weights differ",
            "initialise the model before it is wrapped, which broadcasts rank 0's weights",
        )


def _copies(wrap: Wrap) -> Iterator[tuple[Call, str, str]]:
    """A copy (for a moving average) taken before DDP has made the weights equal."""
    inner = wrap.inner.thing
    calls = wrap.entry.histories[0].calls
    for call in calls:
        if call.name != "copy.deepcopy" or call.index > wrap.call.index or inner is None:
            continue
        if not call.args or call.args[0].thing is not inner or not _seed_differs(wrap, call.index):
            continue
        loaded = any(
            one.name.endswith("load_state_dict") and (one.index < call.index or one.index > wrap.call.index)
            for one in calls
        )
        if loaded or _is_sent(wrap, wrap.call.index) or wrap.call.name.endswith("prepare"):
            continue
        yield (
            call,
            f"`{text_of(call.node)}` is made before DDP broadcasts rank 0's weights, and ranks draw their first weights from different seeds: the copies differ",
            "copy after the model was wrapped: `copy.deepcopy(model.module)`",
        )


RULE: Rule[Script] = Rule(
    id="RW410",
    name="state-differs-after-wrapping",
    severity="error",
    classes=("D26",),
    summary="weights are set differently on the ranks after the model was wrapped",
    check=check,
)
