"""Files and folders that all ranks prepare at once."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.lint.analyses.in_ranks import differs_deeply, is_in_ranks
from rankwise.lint.analyses.job_view import all_once, is_distributed, node_in, starts_group, text_of
from rankwise.lint.analyses.turns import is_barrier, is_caught, takes_turns, was_done_before
from rankwise.lint.finding import Edit, Found, Span, span_of
from rankwise.lint.interpreter.values import ANY, Items
from rankwise.lint.library.names import FABRIC, PL_MODULE
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

_DATASETS = ("torchvision.datasets.", "torchaudio.datasets.", "torchtext.datasets.")
_FETCHES = frozenset({"urllib.request.urlretrieve", "wget.download", "gdown.download", "gdown.download_folder", "torch.hub.download_url_to_file",
                      "torchvision.datasets.utils.download_url", "torchvision.datasets.utils.download_and_extract_archive", "nltk.download",
                      "shutil.unpack_archive", "torchvision.datasets.utils.extract_archive"})  # fmt: skip
_SHELLS = frozenset(
    {"os.system", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
)
_COMMAND = re.compile(r"(^|[\s;&(/'\"])(wget|curl|unzip|tar|aria2c|gsutil|kaggle|gdown|git clone|aws s3)\s")


@rule(
    "RW515",
    "error",
    "X11",
    "all ranks download or unpack into one folder at once, or don't wait for the rank that does",
)
def all_ranks_download(script: Script) -> Iterator[Found]:
    for place in all_once(script, anywhere=True):
        kind = _kind(place)
        if kind is None or not is_distributed(place.entry) or not is_in_ranks(script, place.entry, place.last):
            continue
        node = node_in(script, place.calls[0])
        if node is None:
            continue
        if not place.is_made_by_all:
            if (
                place.calls[0].rank == 0
                and place.calls[0].guards
                and (use := _use_without_wait(place)) is not None
                and node_in(script, use) is not None
            ):
                message = f"the other ranks don't wait for `{text_of(place.last.node)}`: they read the data (line {getattr(use.node, 'lineno', 0)}) while rank 0 downloads it"
                yield Found(node, message, "call dist.barrier() after the download, before any rank reads the data")
            continue
        if not _collides(place) or _is_before_ranks(place):
            continue
        message = f"all ranks run `{text_of(place.last.node)}` at the same time, into the same folder"
        yield Found(node, message, _FIX, severity=kind)


def _kind(place: Place) -> Severity | None:
    """How bad it is if all ranks make this call; None if it downloads nothing."""
    call = place.last
    if call.name.startswith(_DATASETS) and ".utils." not in call.name:
        flags = [one.kwargs.get("download", ANY) for one in place.calls]
        if all(flag.const is True for flag in flags):
            return "error"
        # Behind a test whether it is there, only ranks that ask at the same moment all find that it is not.
        return "warning" if all("exists" in flag.origin and flag.const is not False for flag in flags) else None
    if call.name in _FETCHES or call.name.endswith(".extractall"):
        return "warning"
    if call.name in _SHELLS:
        return "warning" if _COMMAND.search(" ".join(_words(call.arg(0, "args"))) + " ") else None
    return None


def _words(value: Value | None) -> list[str]:
    """A shell command's words, as far as they are known."""
    parts = value.thing.values if value is not None and isinstance(value.thing, Items) else [value]
    return [str(one.const) if one is not None and one.is_known else "x" for one in parts]


def _collides(place: Place) -> bool:
    call = place.last
    if call.guards or takes_turns(place) or was_done_before(place) or is_caught(call.module.tree, call.node):
        return False
    owner = getattr(call.function, "owner", None)
    # Lightning calls this hook on one rank of each node; a class that is not at hand may be its heir.
    is_heir = owner is not None and (owner.is_open or _LIGHTNING & owner.library_bases)
    if is_heir and call.function.name == "prepare_data":
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
_LIGHTNING = frozenset({PL_MODULE, "lightning.pytorch.LightningDataModule"})
_MAKES = frozenset({"os.makedirs", "os.mkdir"})
_OWN = frozenset({"time", "own", "random", "host"})


@rule("RW516", "error", "X12", "all ranks create or remove the same folder, and only the first one can", fixable=True)
def folder_made_by_all_ranks(script: Script) -> Iterator[Found]:
    for place in all_once(script, anywhere=True):
        call = place.last
        what = _what(call)
        if what is None or not place.is_made_by_all or call.guards or not is_distributed(place.entry):
            continue
        if (
            not is_in_ranks(script, place.entry, call)
            or differs_deeply(what)
            or what.origin & _OWN
            or not (place.entry.is_program or what.is_known)  # whoever calls it may give each rank its own
        ):
            continue
        if any(one.name.startswith("tempfile.") for one in place.entry.histories[0].calls):
            continue
        if takes_turns(place) or was_done_before(place) or is_caught(call.module.tree, call.node):
            continue
        node = node_in(script, call)
        if node is not None:
            # Behind a test whether it is there, only ranks that ask at the same moment all find that it is not.
            asks = any("exists" in value.origin for _, value, _ in call.tests)
            yield replace(_finding(script, call, node), severity="warning" if asks else None)


def _what(call: Call) -> Value | None:
    """The folder that a call creates or removes, if it fails when another rank was faster."""
    if call.name in _MAKES:
        exist = call.arg(2, "exist_ok") if call.name == "os.makedirs" else None
        return call.arg(0, "name", "path") if exist is None or exist.const is False else None
    if call.name.endswith(".mkdir") and (call.name.startswith(("?.", "pathlib."))):
        exist = call.arg(2, "exist_ok")
        return call.receiver if exist is None or exist.const is False else None
    if call.name == "shutil.rmtree":
        ignores = call.arg(1, "ignore_errors")
        return call.arg(0, "path") if ignores is None or ignores.const is False else None
    return None


def _finding(script: Script, call: Call, node: ast.AST) -> Found:
    shown = text_of(call.node)
    if call.name == "shutil.rmtree":
        message = (
            f"all ranks run `{shown}`: one removes what another has just created, or fails half way (FileNotFoundError)"
        )
        return Found(node, message, "let rank 0 remove and create the folder, and call dist.barrier() after it")
    message = f"all ranks run `{shown}`, and only the first one can: FileExistsError on the others"
    if call.name == "os.mkdir":
        return Found(node, message, f"os.makedirs({text_of(call.arg_node(0))}, exist_ok=True)")
    return Found(node, message, "pass exist_ok=True", edits=_edits(script, call))


def _edits(script: Script, call: Call) -> list[Edit]:
    node = call.node
    if (
        call.module is not script.module
        or not isinstance(node, ast.Call)
        or any(isinstance(one, ast.Starred) for one in node.args)
    ):
        return []
    if len(node.args) > (1 if call.name == "os.makedirs" else 2) or any(
        one.arg in {None, "exist_ok"} for one in node.keywords
    ):
        return []
    parts = [*node.args, *(one.value for one in node.keywords)]
    if not parts:
        span = span_of(node, script.unit.lines)
        return [Edit(span=Span(span.end_line, span.end_col - 1, span.end_line, span.end_col - 1), text="exist_ok=True")]
    last = max((span_of(part, script.unit.lines) for part in parts), key=lambda span: (span.end_line, span.end_col))
    if script.unit.lines[last.end_line - 1][last.end_col - 1 : last.end_col] not in {")", ","}:
        return []
    return [Edit(span=Span(last.end_line, last.end_col, last.end_line, last.end_col), text=", exist_ok=True")]
