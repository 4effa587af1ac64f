"""Ranks read a file that rank 0 is still writing.

**Why it breaks.** The others reach the read while rank 0 is saving: ``FileNotFoundError``, ``PytorchStreamReader failed
reading zip archive``, or the file of an earlier run, silently. A barrier before the save does not help.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "best.pt")
model.load_state_dict(torch.load("best.pt", map_location="cpu"))
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "best.pt")
dist.barrier()
model.load_state_dict(torch.load("best.pt", map_location="cpu"))
dist.destroy_process_group()
```

**When it says nothing.** Any collective is called between the write and the read, or only rank 0 reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import is_distributed, is_sequence, line_of, ops, text_of
from rankwise.lint.topics.saved_files import plain_reads, reads, writes
from rankwise.lint.topics.wrapping import wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.saved_files import FileUse


def check(script: Script) -> Iterator[Finding]:
    """Reads that may run before rank 0's write is done."""
    written = [use for use in writes(script) if use.place.ranks == {0}]
    if not written:
        return
    for read in (*reads(script), *plain_reads(script)):
        if (
            not {0} < read.place.ranks | {0}
            or read.place.ranks == {0}
            or not is_distributed(read.place.entry)
        ):
            continue
        for write in written:
            if (
                write.place.entry is read.place.entry
                and is_sequence(read.place.entry, write.call, read.call)
                and write.same_file(read)
                and _races(script, write, read)
            ):
                line = line_of(write.call)
                yield script.finding(
                    RULE,
                    read.call.node,
                    f"rank 0 writes `{text_of(read.node)}` on line {line}, and the others may read it before that is done",
                    f"call dist.barrier() between line {line} and this line, on all ranks",
                )
                break


def _races(script: Script, write: FileUse, read: FileUse) -> bool:
    """Whether the others may reach the read before rank 0 has finished the write."""
    zero = next(history for history in write.place.entry.histories if history.rank == 0)
    reader = next(call for call in read.place.calls if call.rank != 0)
    other = next(history for history in read.place.entry.histories if history.rank == reader.rank)
    saving = write.place.calls[0]
    # In the order of the code: a file that is read at the start and written in the loop is another case.
    own = next((call for call in read.place.calls if call.rank == 0), None)
    if own is not None and own.index < saving.index:
        return False
    # A wrapper's constructor compares the shapes of all ranks.
    wrapping = {id(wrap.call.node) for wrap in wraps(script)}
    before, passed = (
        sum(op.call.index < call.index for op in ops(history.items))
        + sum(id(one.node) in wrapping for one in history.calls[: call.index])
        for history, call in ((zero, saving), (other, reader))
    )
    return passed <= before


RULE: Rule[Script] = Rule(
    id="RW603",
    name="read-before-written",
    severity="error",
    classes=("K2",),
    summary="ranks read a file that rank 0 is still writing",
    check=check,
)
