"""All ranks of a node download or unpack into the same folder at the same time.

**Why it breaks.** One rank reads an archive that another is still writing: ``RuntimeError: Dataset not found or
corrupted``, checksum errors, truncated files, or a server that answers the many requests with 403. It works when the
data is already there, and breaks on the next clean host. If only rank 0 downloads, the others must wait for it.

Bad:

```python
import torch.distributed as dist
from torchvision.datasets import MNIST

dist.init_process_group("gloo")
dataset = MNIST("data", download=True)
dist.destroy_process_group()
```

Good:

```python
import os

import torch.distributed as dist
from torchvision.datasets import MNIST

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
if local_rank == 0:
    MNIST("data", download=True)
dist.barrier()
dataset = MNIST("data", download=False)
dist.destroy_process_group()
```

**When it says nothing.** One rank (of each node) goes first, by a barrier, a lock or ``main_process_first``; the
process that starts the ranks has done it; each rank has its own folder; ``load_dataset`` and ``from_pretrained``, which
lock their cache.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.library.names import FABRIC
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import here
from rankwise.lint.topics.in_ranks import differs_deeply, is_in_ranks
from rankwise.lint.topics.job_view import is_distributed, once, places, starts_group, text_of
from rankwise.lint.topics.turns import is_barrier, is_caught, takes_turns, was_done_before

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_DATASETS = ("torchvision.datasets.", "torchaudio.datasets.", "torchtext.datasets.")
_FETCHES = frozenset({"urllib.request.urlretrieve", "wget.download", "gdown.download", "gdown.download_folder", "torch.hub.download_url_to_file",
                      "torchvision.datasets.utils.download_url", "torchvision.datasets.utils.download_and_extract_archive", "nltk.download",
                      "shutil.unpack_archive", "torchvision.datasets.utils.extract_archive"})  # fmt: skip
_SHELLS = frozenset(
    {"os.system", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
)
_COMMAND = re.compile(r"(^|[\s;&(/'\"])(wget|curl|unzip|tar|aria2c|gsutil|kaggle|gdown|git clone|aws s3)\s")


def check(script: Script) -> Iterator[Finding]:
    """Downloads by all ranks at once, and by rank 0 without the others waiting."""
    for place in once(places(script, anywhere=True)):
        kind = _kind(place)
        if (
            kind is None
            or not is_distributed(place.entry)
            or not is_in_ranks(script, place.entry, place.last)
        ):
            continue
        node = here(script, place.calls[0])
        if node is None:
            continue
        if not place.is_made_by_all:
            if (
                place.calls[0].rank == 0
                and place.calls[0].guards
                and (use := _use_without_wait(place)) is not None
                and here(script, use) is not None
            ):
                message = f"the other ranks don't wait for `{text_of(place.last.node)}`: they read the data (line {getattr(use.node, 'lineno', 0)}) while rank 0 downloads it"
                yield script.finding(
                    RULE,
                    node,
                    message,
                    "call dist.barrier() after the download, before any rank reads the data",
                )
            continue
        if not _collides(place) or _is_before_ranks(place):
            continue
        message = f"all ranks run `{text_of(place.last.node)}` at the same time, into the same folder"
        yield script.finding(RULE, node, message, _FIX, severity=kind)


def _kind(place: Place) -> Severity | None:
    """How bad it is if all ranks make this call; None if it downloads nothing."""
    call = place.last
    if call.name.startswith(_DATASETS) and ".utils." not in call.name:
        flags = [one.kwargs.get("download") for one in place.calls]
        return "error" if all(flag is not None and flag.const is True for flag in flags) else None
    if call.name in _FETCHES or call.name.endswith(".extractall"):
        return "warning"
    if call.name in _SHELLS:
        return "warning" if _COMMAND.search(text_of_command(call)) else None
    return None


def text_of_command(call: Call) -> str:
    """A shell command as one line, as far as its text is known."""
    node = call.arg_node(0, "args")
    parts = getattr(node, "elts", None)
    if parts is not None:
        return " ".join(str(getattr(part, "value", "x")) for part in parts) + " "
    values = getattr(node, "values", None)
    if values is not None:
        return (
            "".join(
                str(getattr(part, "value", "x")) if not hasattr(part, "conversion") else "x"
                for part in values
            )
            + " "
        )
    return f"{getattr(node, 'value', '')} "


def _collides(place: Place) -> bool:
    call = place.last
    if call.guards or takes_turns(place) or was_done_before(place) or is_caught(call.module.tree, call.node):
        return False
    if getattr(call.function, "name", "") in {"prepare_data", "download_data"}:
        return False
    return not any(
        differs_deeply(value) or value.origin & {"time", "own"}
        for value in (call.receiver, *call.args, *call.kwargs.values())
    )


def _is_before_ranks(place: Place) -> bool:
    """Whether the one process that Fabric starts the others from comes here first: it has the data when they come."""
    starts = [call for call in place.entry.histories[0].calls if starts_group(call)]
    return bool(starts) and starts[0].name == FABRIC and starts[0].index > place.calls[0].index


def _use_without_wait(place: Place) -> Call | None:
    """A call of the same class on all ranks, without a wait for rank 0 before it."""
    first = place.calls[0]
    for call in place.entry.histories[0].calls[first.index + 1 :]:
        if is_barrier(call) or any("first" in context for context in call.contexts):
            return None
        if call.name == first.name and not call.guards and first.name.startswith(_DATASETS):
            return call
    return None


_FIX = "let one rank of each node do it first, under `if local_rank == 0:`; then dist.barrier(), then read the data on all ranks"

RULE: Rule[Script] = Rule(
    id="RW515",
    name="all-ranks-download",
    severity="error",
    classes=("X11",),
    summary="all ranks download or unpack into one folder at once, or don't wait for the rank that does",
    check=check,
)
