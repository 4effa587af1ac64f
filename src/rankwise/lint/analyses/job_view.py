"""What a script's run as a job of several processes looks like: who makes a call, who started it, what came before."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.interpreter.branches import asks_who
from rankwise.lint.interpreter.calls import is_of_one_device
from rankwise.lint.interpreter.history import Op, walk
from rankwise.lint.interpreter.run import VIRTUAL_RANKS
from rankwise.lint.interpreter.special import STARTS
from rankwise.lint.interpreter.values import Items, Object, Spread, Value
from rankwise.lint.library.constructor_table import WRAPPERS
from rankwise.lint.library.hints import TORCHRUN
from rankwise.lint.library.names import OPEN, SAMPLER
from rankwise.lint.program import LIBRARIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rankwise.lint.interpreter.history import Item
    from rankwise.lint.interpreter.notes import Quotient, WrapperRead
    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.program import Module
    from rankwise.lint.script import Entry, Script

INIT = "torch.distributed.init_process_group"
SPAWN = "torch.multiprocessing.spawn"
#: Addresses at which each host means itself.
LOOPBACK = re.compile(r"(tcp://)?(localhost|127\.0\.0\.1|0\.0\.0\.0|\[?::1\]?)(:\d+)?$")
ALL_RANKS = frozenset(one.rank for one in VIRTUAL_RANKS)
FIRST_OF_NODES = frozenset(one.rank for one in VIRTUAL_RANKS if one.local_rank == 0)
#: Where a history is taken as read: projects that nest calls deeply repeat themselves.
_MOST_OPS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A library call at one place of the text, in one entry, and all ranks that make it.

    Attributes:
        entry: The program, or a function that it does not call.
        calls: The call as each of these ranks makes it first.
        num_ranks: How many ranks the entry was run for; one where nothing asked for the rank.
    """

    entry: Entry
    calls: tuple[Call, ...]
    num_ranks: int

    @property
    def last(self) -> Call:
        """As the highest rank makes it: there the rank, the local rank and the node's rank all differ."""
        return self.calls[-1]

    @property
    def ranks(self) -> frozenset[int]:
        """Who makes it; all if each rank does that was tried, in the program or in a function that is there for others to call."""
        is_all = len(self.calls) == self.num_ranks
        is_open = self.num_ranks == 1 or self.entry.is_program or not any(map(_is_called_here, self.calls))
        return ALL_RANKS if is_all and is_open else frozenset(call.rank for call in self.calls)

    @property
    def is_made_by_all(self) -> bool:
        """Whether each rank makes it: no test on the rank keeps one away, nor one that may be on the rank or for one process."""
        return (
            self.ranks == ALL_RANKS
            and not any(self._may_ask_who(*one) for one in self.last.tests)
            and not is_without_group(self.entry, self.last)
        )

    def _may_ask_who(self, test: ast.AST, value: Value, _arm: object) -> bool:
        return asks_who(value) or _may_be_rank(value) or not _calls_in(test).isdisjoint(_hidden_in(self.entry))

    @property
    def is_once_a_node(self) -> bool:
        """Whether one rank of each node makes it."""
        return self.ranks == FIRST_OF_NODES


def _may_be_rank(test: Value) -> bool:
    """Whether a test compares a number with what is known by nothing but a name."""
    sides = test.made.args if test.made is not None and test.made.name == "operator.Compare" else ()
    is_open = any(one == Value(path=one.path) and (one.made is None or is_hidden(one.made)) for one in sides)
    return is_open and any(type(one.const) is int for one in sides)


@lru_cache(maxsize=64)
def _names_called(tree: ast.Module) -> set[str]:
    """Names of functions, and of methods with a dot before them, that a text calls; not those of the modules that it imports."""
    nodes = scopes_of(tree)
    imports: list[ast.Import | ast.ImportFrom] = [*nodes.all(ast.Import), *nodes.all(ast.ImportFrom)]
    modules = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    funcs = [node.func for node in nodes.all(ast.Call)]
    return {func.id for func in funcs if isinstance(func, ast.Name)} | {
        f".{func.attr}"
        for func in funcs
        if isinstance(func, ast.Attribute) and getattr(func.value, "id", None) not in modules
    }


def _is_called_here(call: Call) -> bool:
    """Whether the function that was tried, and led to a call, is called in its own text: perhaps by some ranks only."""
    first = call.stack[0] if call.stack else call
    tree = first.module.tree
    # A function that is tried stands as the place from which it is called.
    node = first.node if isinstance(first.node, ast.FunctionDef) else function_of(tree, first.node)
    is_method = isinstance(next(above(tree, node), None), ast.ClassDef)
    return ("." if is_method else "") + getattr(node, "name", "") in _names_called(tree)


@lru_cache(maxsize=1024)
def _calls_in(test: ast.AST) -> frozenset[ast.AST]:
    return frozenset(node for node in ast.walk(test) if isinstance(node, ast.Call))


@lru_cache(maxsize=256)
def _hidden_in(entry: Entry) -> frozenset[ast.AST]:
    """Calls of functions whose text is not at hand."""
    return frozenset(call.node for call in entry.histories[-1].calls if is_hidden(call))


def places(script: Script, *names: str, anywhere: bool = False) -> Iterator[Place]:
    """Places of calls, by entry; all of them if no name is given, those of other modules too if ``anywhere``."""
    for entry in script.entries:
        yield from places_of(entry, names, None if anywhere else script.module)


def places_of(entry: Entry, names: Sequence[str] = (), module: Module | None = None) -> Iterator[Place]:
    """Places of calls in one entry, in one module only if it is given."""
    places, numbers = _all_places(entry)
    asked = sorted({number for name in names for number in numbers.get(name, ())}) if names else range(len(places))
    return (places[number] for number in asked if module is None or places[number].last.module is module)


# Nearly every rule asks, and a large program makes tens of thousands of calls.
@lru_cache(maxsize=64)
def _all_places(entry: Entry) -> tuple[list[Place], dict[str, list[int]]]:
    """All places, and by the name of what is called where they stand among these."""
    found: dict[tuple[int, str], dict[int, Call]] = {}
    for call in (call for history in entry.histories for call in history.calls):
        found.setdefault((id(call.node), call.name), {}).setdefault(call.rank, call)
    num_ranks, numbers = len(entry.histories), defaultdict[str, list[int]](list)
    for number, (_, name) in enumerate(found):
        numbers[name].append(number)
    places = [Place(entry=entry, calls=tuple(calls.values()), num_ranks=num_ranks) for calls in found.values()]
    return places, numbers


def once(found: Iterable[Place]) -> Iterator[Place]:
    """The same places, each node of the text once: that of the program first."""
    seen: set[int] = set()
    for place in found:
        if id(place.last.node) not in seen:
            seen.add(id(place.last.node))
            yield place


def all_once(script: Script, *, anywhere: bool = False) -> list[Place]:
    """Every place, each node of the text once."""
    key = f"places {anywhere}"
    if key not in script.memo:
        script.memo[key] = list(once(places(script, anywhere=anywhere)))
    found: list[Place] = script.memo[key]
    return found


def is_distributed(entry: Entry) -> bool:
    """Whether this entry makes a process group, or does something that ranks do together, on its way."""
    history = entry.histories[0]
    if any(starts_group(call) for call in history.calls):
        return True
    return any(op.is_sure and (entry.is_program or _is_own(op.call)) for op in ops(history.items))


def _is_own(call: Call) -> bool:
    """Whether a function makes a call in its own text.

    One that lies in a module below it may be for those who have a group.
    """
    return not call.stack or call.stack[0].module is call.module


def is_sequence(entry: Entry, one: Call, other: Call) -> bool:
    """Whether a run makes both calls: methods of a class that nothing calls are no sequence."""
    if entry.is_program:
        return True
    return bool(one.stack) and bool(other.stack) and one.stack[0].node is other.stack[0].node


@lru_cache(maxsize=256)
def _starters_of(entry: Entry) -> tuple[Call, ...]:
    return tuple(call for call in entry.histories[0].calls if starts_group(call))


def is_without_group(entry: Entry, call: Call) -> bool:
    """Whether a call stands on a way of the program that makes no process group."""
    starters = _starters_of(entry)
    return bool(starters) and all(one.excludes(call) for one in starters)


def starts_group(call: Call) -> bool:
    """Whether a call makes the default process group; a Fabric of one device has none, the Trainer's arguments that name a DeepSpeed configuration do."""
    if call.name == "transformers.TrainingArguments":
        config = call.arg(None, "deepspeed")
        return config is not None and (isinstance(config.thing, Items) or isinstance(config.const, str))
    return call.name in STARTS and not is_of_one_device(call)


def ops(items: Iterable[Item]) -> list[Op]:
    """What is done together, in the order of the run."""
    return list(islice((item for item in walk(items) if isinstance(item, Op)), _MOST_OPS))


def backend_of(call: Call) -> str | None:
    """The backend of a call of init_process_group in lower case; empty if it was not given, None if not known."""
    backend = call.arg(0, "backend")
    if backend is None or backend.const is None:
        return ""
    return backend.const.lower() if isinstance(backend.const, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An assignment to one environment variable.

    Attributes:
        place: The call that does it.
        key: The variable.
        value: What it gets, as the last rank sees it.
        node: Where to point.
    """

    place: Place
    key: str
    value: Value
    node: ast.AST


def settings(script: Script) -> Iterator[Setting]:
    """Environment variables that the script sets: by item, by update, by putenv."""
    for place in once(places(script, "os.environ.__setitem__", "os.putenv", "os.environ.update")):
        for key, value, node in _pairs(place.last):
            if isinstance(key, str):
                yield Setting(place=place, key=key, value=value, node=node)


def _pairs(call: Call) -> Iterator[tuple[Any, Value, ast.AST]]:
    if call.name != "os.environ.update":
        if len(call.args) > 1:
            yield call.args[0].const, call.args[1], call.node
        return
    for keyword in getattr(call.node, "keywords", ()):
        if keyword.arg in call.kwargs:
            yield keyword.arg, call.kwargs[keyword.arg], keyword.value
    table = call.args[0].thing if call.args else None
    if isinstance(table, Items) and table.keys is not None:
        shown = getattr(call.arg_node(0), "values", ())
        for number, (key, value) in enumerate(zip(table.keys, table.values, strict=False)):
            yield key.const, value, shown[number] if number < len(shown) else call.node


def launcher_reads(script: Script) -> list[str]:
    """Variables of torchrun's that the script reads, but for where the ranks meet."""
    reads = (
        call.args[0].const
        for call in script.all_calls
        if call.name in {"os.environ.__getitem__", "os.environ.get", "os.getenv"} and call.args
    )
    return [key for key in reads if isinstance(key, str) and key in TORCHRUN and not key.startswith("MASTER")]


def is_of_one_process(script: Script) -> bool:
    """Whether the script says that it is one process of one: by the environment, or where it makes the group."""
    sizes = [size for call in script.calls_of(INIT) if (size := call.arg(3, "world_size")) is not None]
    is_said = bool(sizes) and all(is_constant(size) and size.const == 1 for size in sizes)
    return is_said or {str(one.value.const) for one in settings(script) if one.key == "WORLD_SIZE"} == {"1"}


def is_left(script: Script, entry: Entry) -> bool:
    """Whether it is a function that a program, which has its process group, never calls."""
    return not entry.is_program and any(map(starts_group, script.entries[0].histories[0].calls))


def spawns(script: Script) -> bool:
    """Whether the script starts its processes itself; what psutil calls a process has no target."""
    names = (".spawn", ".start_processes", "notebook_launcher")
    return any(
        call.name.endswith(names) or (call.name.endswith(".Process") and call.arg(1, "target") is not None)
        for call in script.all_calls
    )


def is_spawned(call: Call) -> bool:
    """Whether a call is made in a process that mp.spawn has started."""
    return "spawned" in call.contexts


def node_in(script: Script, call: Call | WrapperRead | Quotient) -> ast.AST | None:
    """A call's node, or the place in this text from which it was reached in another module."""
    if call.module is script.module:
        return call.node
    return next((site.node for site in call.stack[::-1] if site.module is script.module), None)


def has_unread(tree: ast.Module, modules: Iterable[Module]) -> bool:
    """Whether a text imports a module that is none of those whose text was seen: it may have done anything when it was imported."""
    seen = LIBRARIES.union(*({module.path.stem, *module.path.parts} for module in modules))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in imports if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] not in seen for name in names)


def is_constant(value: Value) -> bool:
    """Whether it is a number that stands in the text, the same for whoever runs it."""
    return type(value.const) is int and value.const >= 0 and not value.spread and not value.origin


def is_for_several(place: Place) -> bool:
    """Whether the same program is meant for several ranks: it asks which one it is, or shares a model or data with others."""
    calls = place.entry.histories[0].calls
    return place.num_ranks > 1 or any(call.name in WRAPPERS | {SAMPLER} for call in calls)


def differs(value: Value | None) -> bool:
    """Whether a value is another one on other ranks, as far as is known."""
    return value is not None and value.spread is not Spread.EQUAL


def kind_of(value: Value) -> str:
    """Canonical name of the class of a library's object; empty for all else."""
    return value.thing.kind if isinstance(value.thing, Object) else ""


def line_of(call: Call) -> int:
    """The line that a call stands in."""
    return int(getattr(call.node, "lineno", 0))


def text_of(node: ast.AST | None) -> str:
    """An expression as the user wrote it, more or less; cut where it is long."""
    text = " ".join(ast.unparse(node).split()) if node is not None else ""
    return text if len(text) <= 60 else text[:57] + "..."


def is_parameter(call: Call, name: str) -> bool:
    """Whether a name is a parameter of the user's function that a call stands in."""
    node = getattr(call.function, "node", None)
    if node is None:
        return False
    args = node.args
    return any(one.arg == name for one in (*args.posonlyargs, *args.args, *args.kwonlyargs))


def above(tree: ast.Module, node: ast.AST) -> Iterator[ast.AST]:
    """What a node stands in, nearest first."""
    return scopes_of(tree).above(node)


def statement_of(tree: ast.Module, node: ast.AST) -> ast.stmt | None:
    """The statement that a node is or stands in."""
    if isinstance(node, ast.stmt):
        return node
    return next((one for one in above(tree, node) if isinstance(one, ast.stmt)), None)


def function_of(tree: ast.Module, node: ast.AST) -> ast.AST:
    """The function that a node stands in; the module itself at its top."""
    return next((one for one in above(tree, node) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))), tree)


def called_names(node: ast.AST) -> set[str]:
    """The last words of all that is called below a node: ``all_reduce``, ``save``."""
    return {
        one.func.attr if isinstance(one.func, ast.Attribute) else one.func.id
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and isinstance(one.func, (ast.Attribute, ast.Name))
    }


def is_hidden(call: Call) -> bool:
    """Whether a call is of a function whose text is not at hand, and which no table knows."""
    first, _, rest = call.name.partition(".")
    return not rest if first.startswith("?") else first not in OPEN
