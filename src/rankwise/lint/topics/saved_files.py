"""Files that a script writes or reads as checkpoints: which calls do it, which file it is, whether ranks share it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.lint.model.values import ANY
from rankwise.lint.topics.job_view import called_names, function_of, once, places, statement_of, text_of
from rankwise.lint.topics.option_text import parts_of_sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

#: Where a writer takes its path.
_WRITERS: dict[str, tuple[int, str]] = {
    "torch.save": (1, "f"),
    "safetensors.torch.save_file": (1, "filename"),
    "safetensors.torch.save_model": (1, "filename"),
    "numpy.save": (0, "file"),
    "numpy.savez": (0, "file"),
    "numpy.savez_compressed": (0, "file"),
}
_READERS: dict[str, tuple[int, str]] = {
    "torch.load": (0, "f"),
    "safetensors.torch.load_file": (0, "filename"),
    "numpy.load": (0, "file"),
    "torch.jit.load": (0, "f"),
}
_STREAMS = frozenset(
    {"buf", "buffer", "bio", "stream", "fh", "fp", "fd", "io", "file_obj", "fileobj", "output"}
)
#: Words in a path that tell of ranks the model knows nothing of.
_RANKED = re.compile(
    r"rank|process_index|getpid|hostname|uuid|mkdtemp|mkstemp|worker|shard|node_id|tmp_path|local_dir",
    re.IGNORECASE,
)
_MODEL = re.compile(
    r"ckpt|checkpoint|chkpt|model|weight|state|resume|snapshot|pretrain|backbone|best|last|latest",
    re.IGNORECASE,
)
_DATA = re.compile(r"data|feature|cache|token|index|embed|label|sample|vocab|stats", re.IGNORECASE)
_NODE_LOCAL = re.compile(r"^/(tmp|scratch|local|dev/shm|var/tmp|mnt/(local|nvme|ssd)|raid|ssd|nvme)|scratch|tmpdir|tempfile|gettempdir|nvme|local_ssd|node_|_node|cache", re.IGNORECASE)  # fmt: skip


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
        """Whether all ranks mean the same file, as far as the text tells."""
        position, name = position_of(self.call)
        values = [call.arg(position, name) for call in self.place.calls]
        if any(value is None or value.spread for value in values):
            return False
        if (
            len(
                {
                    value.const
                    for value in values
                    if value is not None and value.is_known and _is_plain(value.const)
                }
            )
            > 1
        ):
            return False
        return not any(_RANKED.search(word) for word in self._words())

    def is_node_local(self) -> bool:
        """Whether each node seems to have such a file of its own."""
        return (isinstance(self.path.const, str) and _NODE_LOCAL.search(self.path.const) is not None) or any(
            _NODE_LOCAL.search(word) for word in self._words()
        )

    def _words(self) -> Iterator[str]:
        for part in parts_of_sources(self.call.module.tree, self.node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
            elif isinstance(part, ast.Name):
                yield part.id
            elif isinstance(part, ast.Attribute):
                yield part.attr

    def same_file(self, other: FileUse) -> bool:
        """Whether another use certainly means the same file."""
        if isinstance(self.path.const, str) and isinstance(other.path.const, str):
            return self.path.const == other.path.const
        if self.path.is_known or other.path.is_known:
            return False
        return text_of(self.node) == text_of(other.node) and not isinstance(self.node, ast.Constant)

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
        return bool(names & targets) or any(word in text_of(self.node) for word in ("epoch", "step", "iter"))


def _is_plain(const: object) -> bool:
    return isinstance(const, (str, int, float))


def position_of(call: Call) -> tuple[int, str]:
    """Where a writer or reader takes its path."""
    if call.name.endswith(".save_pretrained"):
        return 0, "save_directory"
    if call.name == "builtins.open":
        return 0, "file"
    return _WRITERS.get(call.name) or _READERS.get(call.name) or (0, "path")


def writes(script: Script, *, anywhere: bool = False) -> Iterator[FileUse]:
    """Calls that write a file of weights, arrays or results anew; in other modules too if ``anywhere``."""
    for place in once(places(script, anywhere=anywhere)):
        call = place.last
        if call.name in _WRITERS or call.name.endswith(".save_pretrained"):
            yield from _use(place)
        elif call.name == "builtins.open":
            mode = call.arg(1, "mode")
            if mode is not None and mode.const in {"w", "wb", "w+", "wb+"}:
                yield from _use(place)


def reads(script: Script) -> Iterator[FileUse]:
    """Calls that read such a file."""
    for place in once(places(script, *_READERS)):
        yield from _use(place)


def plain_reads(script: Script) -> Iterator[FileUse]:
    """Calls that open a file to read it."""
    for place in once(places(script, "builtins.open")):
        mode = place.last.arg(1, "mode")
        if mode is None or mode.const in {"r", "rb", "rt"}:
            yield from _use(place)


def _use(place: Place) -> Iterator[FileUse]:
    position, name = position_of(place.last)
    path, node = place.last.arg(position, name), place.last.arg_node(position, name)
    if path is None or node is None or place.last.has_star:
        return
    words = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    kind = getattr(path.thing, "kind", "")
    is_stream = (
        bool(words & _STREAMS)
        or kind.startswith(("io.", "tempfile."))
        or "open" in place.last.contexts
        or (isinstance(node, ast.Name) and node.id == "f")
    )
    if not is_stream:
        yield FileUse(place=place, path=path, node=node)


def is_chosen(call: Call) -> bool:
    """Whether a test encloses a call of whose value nothing but the name is known: it may choose a rank."""
    return any(
        isinstance(test, ast.Name) and value.path and value == replace(ANY, path=value.path)
        for test, value, _ in call.tests
    )


def is_model_file(script: Script, use: FileUse) -> bool:
    """Whether what is read seems to be a model or a checkpoint, and no data."""
    function, statement = function_of(script.tree, use.call.node), statement_of(script.tree, use.call.node)
    text = (
        text_of(use.node)
        + " "
        + (ast.unparse(statement) if statement is not None and not hasattr(statement, "body") else "")
    )
    if "load_state_dict" in text:
        return True
    is_named = _MODEL.search(text.replace("torch.load", "")) is not None
    if _DATA.search(text) and not is_named:
        return False
    return is_named or "load_state_dict" in called_names(function)
