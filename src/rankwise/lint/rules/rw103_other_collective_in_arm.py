"""The two branches of a test on the rank call different collectives.

**Why it breaks.** The n-th collective of one rank pairs with the n-th of the others, whatever it is. An all_reduce that
pairs with a broadcast hangs, crashes, or silently leaves wrong numbers.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
if dist.get_rank() == 0:
    dist.broadcast(x, src=0)
else:
    dist.all_reduce(x)
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
if dist.get_rank() == 0:
    x += 1
dist.broadcast(x, src=0)
dist.destroy_process_group()
```

**When it says nothing.** Both branches call the same collectives in the same order, with other arguments (`scatter(x,
parts)` on the source, `scatter(x)` elsewhere).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.history import Op
from rankwise.lint.paths.found import all_divergences
from rankwise.lint.paths.words import also, anchor, called, tested, who, written
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script


_ON_TENSORS = frozenset(f"torch.distributed.{word}" for word in ("all_reduce", "broadcast", "reduce"))


def check(script: Script) -> Iterator[Finding]:
    """Ops of one branch that would be paired with different ops of the other."""
    told: set[frozenset[int]] = set()
    for one in all_divergences(script):
        op, instead = one.item, one.instead
        if not isinstance(op, Op) or instead is None or one.guard is None:
            continue
        pair = frozenset({id(op.call.node), id(instead.call.node)})
        at = anchor(op, one.guard, script)
        if at is None or pair in told:
            continue
        told.add(pair)
        yield script.finding(
            RULE,
            at[0],
            f"{who(one.doers, one.others, 'reach')} {called(op)} (`{tested(op, one.guard)}`), and the others {called(instead)}:"
            " the two pair, which hangs, crashes or gives wrong numbers",
            f"let every rank call {called(op)} and {called(instead)} in the same order",
            severity="error" if op.is_sure and instead.is_sure else "warning",
            failure_class=_class(op, instead),
            also=also(op, at[0], one.guard, instead),
        )
    yield from _crossed(script)


def _crossed(script: Script) -> Iterator[Finding]:
    """The same collectives on the same tensors in both branches, in another order: silent sums of different tensors."""
    arms: dict[ast.AST, dict[bool, dict[int, Call]]] = {}
    for call in script.calls:
        if (
            call.guards
            and call.name in _ON_TENSORS
            and not call.loops
            and call.arg_node(0, "tensor") is not None
        ):
            guard = call.guards[-1]
            arms.setdefault(guard.node, {}).setdefault(guard.outcome, {})[id(call.node)] = call
    for test, ways in arms.items():
        if len(ways) != 2:
            continue
        first, second = (sorted(one.values(), key=_place) for one in ways.values())
        words, others = ([(call.name, _tensor(call)) for call in one] for one in (first, second))
        if (
            words != others
            and sorted(words) == sorted(others)
            and [one for one, _ in words] == [one for one, _ in others]
        ):
            at = next(number for number, word in enumerate(words) if word != others[number])
            yield script.finding(
                RULE,
                second[at].node,
                f"ranks with `{written(test)}` reduce `{words[at][1]}` where the others reduce `{others[at][1]}`: the two are summed without an error",
                "use the same order on all ranks",
                failure_class="C3",
            )


def _place(call: Call) -> tuple[int, int]:
    return (getattr(call.node, "lineno", 0), getattr(call.node, "col_offset", 0))


def _tensor(call: Call) -> str:
    return written(call.arg_node(0, "tensor"))


def _class(op: Op, instead: Op) -> str:
    families = {op.family, instead.family}
    if "forward" in families:
        return "D17"
    if "state" in families:
        return "D28"
    return "C1" if "barrier" in families else "C8"


RULE: Rule[Script] = Rule(
    id="RW103",
    name="other-collective-in-arm",
    severity="error",
    classes=("C8", "C1", "C3", "D17", "D28"),
    summary="branches of a test on the rank call different collectives",
    check=check,
)
