"""Files that a script writes or reads as checkpoints: which calls do it, which file it is, whether ranks share it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import all_once, once, places, text_of
from rankwise.lint.analyses.tensors import sources_of
from rankwise.lint.interpreter.values import ANY, Instance, Items, Object
from rankwise.lint.library.constructor_table import WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

#: Where a writer takes its path.
_WRITERS: dict[str, tuple[int, str]] = {"torch.save": (1, "f"), "safetensors.torch.save_file": (1, "filename"),
                                        "safetensors.torch.save_model": (1, "filename"), "numpy.save": (0, "file"), "numpy.savez": (0, "file"),
                                        "numpy.savez_compressed": (0, "file")}  # fmt: skip
_READERS: dict[str, tuple[int, str]] = {
    "torch.load": (0, "f"),
    "safetensors.torch.load_file": (0, "filename"),
    "numpy.load": (0, "file"),
    "torch.jit.load": (0, "f"),
}
#: Folders that each node has of its own.
_NODE_LOCAL = re.compile(r"^/(tmp|scratch|local|dev/shm|var/tmp|mnt/(local|nvme|ssd)|raid|ssd|nvme)\b")
#: Where writers of results take theirs.
_RESULTS = {
    "matplotlib.pyplot.savefig": (0, "fname"),
    "numpy.savetxt": (0, "fname"),
    "torchvision.utils.save_image": (1, "fp"),
    "cv2.imwrite": (0, "filename"),
}
#: Devices of the system's; below /dev/shm are files like others.
_DEVICE = re.compile(r"^/dev/(?!shm/)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileUse:
    """A call that writes or reads a file.

    Attributes:
        place: The call, and all ranks that make it.
        path: Which file, as the last rank sees it.
        node: How the path is written.
    """

    place: Place
    path: Value
    node: ast.AST

    @property
    def call(self) -> Call:
        """The call, as the last rank makes it."""
        return self.place.last

    def is_shared(self) -> bool:
        """Whether ranks mean the same file, as far as is known: all, or all but one that chose another."""
        position, name = position_of(self.call) or (0, "path")
        num, given = len(self.place.calls), (call.arg(position, name) for call in self.place.calls)
        # A folder of the host's is that of all ranks on it.
        values = [value for value in given if value is not None and (not value.spread or value.origin == {"host"})]
        if len(values) < min(num, max(2, num - 1)):
            return False
        return len({str(value.const) for value in values if value.is_known}) < 2

    def is_node_local(self) -> bool:
        """Whether each node seems to have such a file of its own."""
        return "env" in self.path.origin or _NODE_LOCAL.match(str(self.path.const)) is not None

    def changes_with_loop(self) -> bool:
        """Whether the path has a part that changes from turn to turn."""
        names = {name.id for name in ast.walk(self.node) if isinstance(name, ast.Name)}
        targets = {
            name.id
            for loop in self.call.loops
            if isinstance(loop, (ast.For, ast.AsyncFor))
            for name in ast.walk(loop.target)
            if isinstance(name, ast.Name)
        }
        return bool(names & targets)


#: Methods that take a folder or a file first, and calls that do neither write nor read it as a whole.
_METHODS = frozenset({"save_pretrained", "from_pretrained", "save_state", "load_state", "save_checkpoint"})
_OTHERS = _RESULTS | {
    "builtins.open": (0, "file"),
    "os.makedirs": (0, "name"),
    "os.mkdir": (0, "path"),
    "os.listdir": (0, "path"),
    "torch.distributed.checkpoint.save": (None, "checkpoint_id"),
    "torch.utils.tensorboard.SummaryWriter": (0, "log_dir"),
}


def position_of(call: Call) -> tuple[int | None, str] | None:
    """Where a call takes the path of a file or folder; None if it takes none."""
    if call.name.rpartition(".")[2] in _METHODS:
        return 0, "save_directory"
    return _WRITERS.get(call.name) or _READERS.get(call.name) or _OTHERS.get(call.name)


def same_file(one: Call, other: Call) -> bool:
    """Whether two calls mean the same file, by how its path was computed, or else by how it is written."""
    at, its_at = (position_of(call) or (0, "f") for call in (one, other))
    mine, its, node = one.arg(*at) or ANY, other.arg(*its_at) or ANY, one.arg_node(*at)
    same = is_alike(mine, its)
    if same is not None or mine.is_known or its.is_known or isinstance(node, ast.Constant):
        return bool(same)
    return text_of(node) == text_of(other.arg_node(*its_at))


def is_alike(one: Value, other: Value) -> bool | None:
    """Whether two values are equal by what they were computed from; None if that is not known."""
    if one is other or (one.is_known and other.is_known):
        return one is other or bool(one.const == other.const)
    mine, its = one.made, other.made
    if mine is not None and its is not None and mine is not its and mine.name == its.name != "either":
        sides = [(call.receiver, *call.args, *call.kwargs.values()) for call in (mine, its)]
        verdicts = [is_alike(*both) for both in zip(*sides, strict=False)]
        return None if None in verdicts or len(sides[0]) != len(sides[1]) else False not in verdicts
    is_same = mine is its is not None or (one.thing is other.thing and isinstance(one.thing, (Object, Instance)))
    return True if is_same or (one.path and one.path == other.path) else None


def is_write(call: Call) -> bool:
    """Whether a call writes a checkpoint, by itself or with the other ranks."""
    return call.name in _WRITERS or call.name.endswith((".save_pretrained", ".save_state", ".save_checkpoint"))


def writes(script: Script, *, anywhere: bool = False) -> Iterator[FileUse]:
    """Calls that write a file of weights, arrays or results anew; in other modules too if ``anywhere``."""
    for place in all_once(script, anywhere=anywhere):
        call = place.last
        is_result = call.name in _RESULTS and place.entry.is_program  # of a function that draws, its callers decide
        if is_result or call.name in _WRITERS or call.name.endswith(".save_pretrained"):
            yield from _use(place)
        elif call.name == "builtins.open":
            mode = call.arg(1, "mode")
            if mode is not None and mode.const in {"w", "wb", "w+", "wb+"}:
                yield from _use(place)


def reads(script: Script, *, anywhere: bool = False) -> Iterator[FileUse]:
    """Calls that read such a file; in other modules too if ``anywhere``."""
    for place in all_once(script, anywhere=anywhere):
        if place.last.name in _READERS or place.last.name.endswith(".from_pretrained"):
            yield from _use(place)


def plain_reads(script: Script) -> Iterator[FileUse]:
    """Calls that open a file to read it."""
    for place in once(places(script, "builtins.open")):
        mode = place.last.arg(1, "mode")
        if mode is None or mode.const in {"r", "rb", "rt"}:
            yield from _use(place)


def _use(place: Place) -> Iterator[FileUse]:
    position, name = position_of(place.last) or (0, "path")
    path, node = place.last.arg(position, name), place.last.arg_node(position, name)
    if path is None or node is None or place.last.has_star:
        return
    kind, made = getattr(path.thing, "kind", ""), getattr(path.made, "name", "")
    is_stream = kind.startswith(("io.", "tempfile.")) or made.endswith("open") or "open" in place.last.contexts
    is_stream |= getattr(path.thing, "name", "") == "os.devnull" or _DEVICE.match(str(path.const)) is not None
    if not is_stream:
        yield FileUse(place=place, path=path, node=node)


def is_chosen(call: Call) -> bool:
    """Whether a test encloses a call of whose value nothing but the name is known: it may choose a rank."""
    return any(
        isinstance(test, ast.Name) and value.path and value == replace(ANY, path=value.path)
        for test, value, _ in call.tests
    )


_OF_MODEL = frozenset({"?.eval", "?.train", "?.parameters"})


def is_model_file(use: FileUse) -> bool:
    """Whether what is read, or a part of it, is a model, or given to a model or an optimizer."""
    for call in use.place.entry.histories[0].calls:
        is_given = call.name.endswith(".load_state_dict") or call.name in WRAPPERS
        values = (*call.args, *call.kwargs.values()) if is_given else [call.receiver] if call.name in _OF_MODEL else []
        if call.name.endswith(".update") and getattr(call.receiver.made, "name", "").endswith(".state_dict"):
            # `state = model.state_dict(); state.update(loaded)`, to load all of it then.
            values = [one for one in call.args if not isinstance(one.thing, Items)]
        for value in values:
            if any(one.made is not None and one.made.node is use.call.node for one in sources_of(value, cuts=False)):
                return True
    return False
