"""All ranks send before they receive, or all receive before they send.

**Why it breaks.** `dist.send` may block until the other side receives. If every rank is in `send`, none reaches `recv`:
large tensors hang (small ones may pass, until they grow). With `recv` first it always hangs.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
peer = dist.get_rank() ^ 1
mine, other = torch.rand(1000), torch.empty(1000)
dist.send(mine, dst=peer)
dist.recv(other, src=peer)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
peer = dist.get_rank() ^ 1
mine, other = torch.rand(1000), torch.empty(1000)
request = dist.isend(mine, dst=peer)
dist.recv(other, src=peer)
request.wait()
dist.destroy_process_group()
```

**When it says nothing.** Ranks take turns (by parity, or as a pipeline), or use `isend` or `batch_isend_irecv`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import D, word_of
from rankwise.lint.topics.job_view import is_distributed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script

_POINTS = frozenset(
    D + word
    for word in (
        "send",
        "recv",
        "isend",
        "irecv",
        "batch_isend_irecv",
        "send_object_list",
        "recv_object_list",
    )
)
_SENDS, _RECEIVES = frozenset({"send", "send_object_list"}), frozenset({"recv", "recv_object_list"})


def check(script: Script) -> Iterator[Finding]:
    """Entries in which each rank's first message is a blocking call of the same kind."""
    for entry in script.entries:
        firsts = _firsts(entry)
        if len(firsts) < 4 or not is_distributed(entry):
            continue
        words = {word_of(one[0]) for one in firsts}
        here = firsts[0][0]
        if here.module is not script.module or any(one[0].tests for one in firsts):
            continue
        if words <= _SENDS and all(_then(calls, _RECEIVES) for calls in firsts):
            yield _finding(script, here, "send", "receives")
        elif words <= _RECEIVES and all(_then(calls, _SENDS) for calls in firsts):
            yield _finding(script, here, "recv", "sends")


def _firsts(entry: Entry) -> list[list[Call]]:
    found = [[call for call in history.calls if call.name in _POINTS] for history in entry.histories]
    return found if all(found) else []


def _then(calls: list[Call], words: frozenset[str]) -> bool:
    return any(word_of(one) in words for one in calls[1:])


def _finding(script: Script, call: Call, word: str, later: str) -> Finding:
    return script.finding(
        RULE,
        call.node,
        f"every rank blocks in this {word} before it {later}, so no rank ever reaches what its peer waits for",
        "use `request = dist.isend(...)`, then `recv`, then `request.wait()`; or let even ranks send first and odd ranks receive first",
    )


RULE: Rule[Script] = Rule(
    id="RW313",
    name="all-send-first",
    severity="error",
    classes=("C9",),
    summary="all ranks send before they receive, or receive before they send",
    check=check,
)
