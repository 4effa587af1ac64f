"""Which statements of a module bind a name, and which of its functions have to do with several processes."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Identifiers that make a function worth a run: collectives, ranks, loaders, wrappers, what rules look at.
_WORDS = (
    r"all_?reduce\w*|all_?gather\w*|all_?to_?all\w*|broadcast_(object_list|coalesced)|broadcast|barrier|monitored_barrier"
    r"|reduce_scatter\w*|gather_(object|for_metrics)|i?send|i?recv|batch_isend_irecv|wait_for_everyone|save_state|load_state"
    r"|backward|manual_backward|new_(sub)?groups?\w*"
    r"|(get_|is_|my_|this_)?((node_)?local_?|global_|world_|node_|group_|process_|proc_|dist_|ddp_|gpu_|mp_)?rank(_?(zero|0|id|idx)\w*)?"
    r"|LOCAL_RANK|RANK|WORLD_SIZE|(SLURM|OMPI_COMM_WORLD|PMI)_\w+|(get_)?world_?size|num_replicas|\w*main_process\w*|\w*(master|primary|chief)_process\w*"
    r"|master_(addr|port)|is_(main|master|chief|primary)\w*|process_index|num_processes|init_process_group"
    r"|destroy_process_group|DistributedDataParallel|DDP|FSDP|FullyShardedDataParallel|fully_shard|DataLoader|\w*DistributedSampler"
    r"|set_epoch|IterableDataset|random_split|manual_seed|\w*seed_(everything|all)|set_seed|spawn|start_processes|Process|set_device|map_location"
    r"|[Aa]ccelerator|[Ff]abric|DataParallel|no_sync|SyncBatchNorm|convert_sync_batchnorm|full_tensor|summon_full_params"
    r"|device_ids|sync_dist|save_checkpoint|save_(16bit|fp16)_model|\w*global_zero\w*|\w*process_zero|torchmetrics|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES"
    r"|getsockname|LightningModule|Trainer|TrainingArguments|cross_entropy|CrossEntropyLoss|init_distributed|SummaryWriter|wandb"
    r"|rankwise|\w*(Mirrored|CentralStorage)Strategy|replica_id|num_replicas_in_sync|(training|validation|test)_step|on_(train|validation|test|fit|step|epoch)_\w+"
)
_WORD = re.compile(_WORDS)
_TALKS = re.compile(
    r"torch\.distributed|import distributed|as(?<=\bas) dist\b|distributed import|dist(?<=\bdist)\.(get|init|is)_"
    r"|from torch import[^\n]*\bdistributed\b|(import(?<=^import)|from(?<=^from)) (deepspeed|rankwise)\b",
    re.MULTILINE,  # each way begins with a letter, so that `re` skips other places: 2.5 times as fast as with \b or ^
)
_NAME = re.compile(r"\w+")
#: These are words of much else as well, and count only in a text that mentions torch.distributed, or imports DeepSpeed
#: or rankwise.
_DISTRIBUTED_WORD = re.compile(
    r"is_initialized|(dist|reduce|gather|scatter|send|recv|state_dict|load_state_dict|environ|getenv|seed|save|load)\w*"
)
_LONGEST_TEXT = 30
#: Methods of all modules: who uses the name does not use this one.
_COMMON = frozenset({"forward", "_init_weights"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def bindings_of(body: Sequence[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """For each name the top statements that bind it; a compound statement counts as a whole."""
    result: dict[str, list[ast.stmt]] = {}
    for statement in body:
        for name in dict.fromkeys(_bound(statement)):
            result.setdefault(name, []).append(statement)
    return result


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, _SCOPES):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
        if not _is_main_guard(statement):
            for part in _parts(statement):
                yield from _bound(part)
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _parts(statement: ast.stmt) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody"):
        yield from getattr(statement, name, ())
    for handler in getattr(statement, "handlers", ()):
        yield from handler.body


def _is_main_guard(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Compare)
        and isinstance(statement.test.left, ast.Name)
        and statement.test.left.id == "__name__"
    )


@lru_cache(maxsize=8)
def mentions_ranks(text: str) -> bool:
    """Whether a text has any of the identifiers that matter."""
    return any(map(_is_word, set(_NAME.findall(text)))) or _talks(text)


@lru_cache(maxsize=8)
def _talks(text: str) -> bool:
    return _TALKS.search(text) is not None


@lru_cache(maxsize=200_000)
def _is_word(name: str) -> bool:
    # Projects use the same names over and over.
    return _WORD.fullmatch(name) is not None


@dataclass(slots=True)
class _Words:
    """Names, attributes and keywords of some nodes, and their short texts."""

    names: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    def read(self, node: ast.AST) -> None:
        # Once over each node of a project: `ast.walk` would take three times as long.
        left = [node]
        names, texts = self.names, self.texts
        while left:
            one = left.pop()
            kind = type(one)
            if kind is ast.Name:
                names.add(one.id)  # type: ignore[attr-defined]
                continue
            if kind is ast.Constant:
                value = one.value  # type: ignore[attr-defined]
                if type(value) is str and len(value) < _LONGEST_TEXT:
                    texts.add(value)
                continue
            if kind is ast.Attribute:
                names.add(one.attr)  # type: ignore[attr-defined]
                left.append(one.value)  # type: ignore[attr-defined]
                continue
            if (kind is ast.arg or kind is ast.keyword) and one.arg:  # type: ignore[attr-defined]
                names.add(one.arg)  # type: ignore[attr-defined]
            for field_name in one._fields:
                value = getattr(one, field_name, None)
                if type(value) is list:
                    left += [part for part in value if isinstance(part, ast.AST)]
                elif isinstance(value, ast.AST):
                    left.append(value)

    def add(self, other: _Words) -> None:
        self.names |= other.names
        self.texts |= other.texts

    def matter(self, *, talks: bool) -> bool:
        used = self.names | self.texts
        return any(map(_is_word, used)) or (talks and any(map(_DISTRIBUTED_WORD.fullmatch, used)))


@lru_cache(maxsize=100)
def relevant_names(tree: ast.Module, text: str) -> frozenset[str]:
    """Names of functions, methods and classes that have to do with ranks, themselves or by what they call in this module."""
    if not mentions_ranks(text):
        return frozenset()
    uses: dict[str, _Words] = {}
    for name, words in _definitions(tree.body):
        uses.setdefault(name, _Words()).add(words)
    talks = _talks(text)
    relevant = {name for name, words in uses.items() if _is_word(name) or words.matter(talks=talks)}
    news = relevant - _COMMON
    while news:
        more = {
            name
            for name, words in uses.items()
            if name not in relevant and not (news.isdisjoint(words.names) and news.isdisjoint(words.texts))
        }
        relevant |= more
        news = more - _COMMON
    return frozenset(relevant)


def is_relevant_program(tree: ast.Module, relevant: frozenset[str], text: str) -> bool:
    """Whether the statements at the top have to do with ranks, or call what has."""
    if not mentions_ranks(text):
        return False
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        words = _read(*statement.decorator_list) if isinstance(statement, _SCOPES) else _read(statement)
        if not relevant.isdisjoint(words.names) or words.matter(talks=_talks(text)):
            return True
    return False


def _read(*nodes: ast.AST) -> _Words:
    words = _Words()
    for node in nodes:
        words.read(node)
    return words


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, _Words]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, _read(node)
        elif isinstance(node, ast.ClassDef):
            whole = _read(*node.bases, *node.keywords, *node.decorator_list)
            for inner in node.body:
                words = _read(inner)
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name != "__init__":
                    yield inner.name, words
                whole.add(words)
            yield node.name, whole
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _definitions(_parts(node))
