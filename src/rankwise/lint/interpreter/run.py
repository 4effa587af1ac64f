"""The state of the simulated run of one virtual rank: who it is, where it stands, what it has done so far."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rankwise.lint.interpreter.calls import is_alone
from rankwise.lint.interpreter.history import History, Item, Op
from rankwise.lint.interpreter.values import (
    ANY,
    NOTHING,
    UNKNOWN,
    Deferred,
    Function,
    Object,
    Role,
    Spread,
    Value,
    coloured,
)
from rankwise.lint.library.hints import main_of, role_of

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Iterator, Sequence

    from rankwise.lint.interpreter.history import Exit, Loop
    from rankwise.lint.interpreter.values import Call, Guard, Site
    from rankwise.lint.library.collective_table import Act
    from rankwise.lint.program import Module, Project


@dataclass(frozen=True, slots=True)
class VirtualRank:
    """One of eight ranks on two nodes of four."""

    rank: int
    world_size: int = 8
    local_world_size: int = 4

    @property
    def local_rank(self) -> int:
        """Rank on its node."""
        return self.rank % self.local_world_size

    @property
    def node_rank(self) -> int:
        """Number of its node."""
        return self.rank // self.local_world_size

    def of(self, role: str) -> int:
        """Its rank, local_rank, world_size ..."""
        number: int = getattr(self, role)
        return number


#: The first, its neighbours, the first of the second node, the last: each kind of test on the rank parts some of them.
VIRTUAL_RANKS = tuple(VirtualRank(rank) for rank in (0, 1, 2, 4, 7))
#: Statements and expressions of one entry on one rank; a program that needs more is seen in part.
BUDGET = 60_000
DEEPEST = 16


@dataclass(eq=False, slots=True)
class Scope:
    """Names of a function that runs, or of a module."""

    module: Module
    names: dict[str, Value] = field(default_factory=dict)
    parent: Scope | None = None
    function: Function | None = None
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)
    returns: list[Value] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)
    passed: list[tuple[Value, bool]] = field(default_factory=list)
    num_alone: tuple[int, int] = (0, 0)
    on_yield: Callable[[Value], None] | None = None
    tint: Value | None = None
    lazy: Callable[[str], None] | None = None

    def top(self) -> Scope:
        """The module's own scope."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def find(self, name: str) -> Value | None:
        """The value of a name, from here outwards."""
        scope: Scope | None = self.top() if name in self.globals else self
        while scope is not None:
            value = scope.names.get(name)
            if value is None and scope.lazy is not None:
                scope.lazy(name)
                value = scope.names.get(name)
            if value is not None:
                if type(value.thing) is Deferred:
                    scope.names[name] = ANY
                    value = scope.names[name] = value.thing.resolve()
                return value
            scope = scope.parent
        return None

    def holder(self, name: str) -> Scope:
        """The scope that an assignment to a name changes."""
        if name in self.globals:
            return self.top()
        if name in self.nonlocals:
            scope = self.parent
            while scope is not None and scope.parent is not None:
                if name in scope.names:
                    return scope
                scope = scope.parent
        return self


@dataclass(eq=False, slots=True)
class Run:
    """One rank's run.

    The four functions are the machine's parts; they stand here so that its files need not import each other.
    """

    virtual_rank: VirtualRank
    project: Project
    history: History
    execute: Callable[[Run, Scope, Sequence[ast.stmt]], Exit | None]
    evaluate: Callable[[Run, Scope, ast.AST | None], Value]
    call: Callable[..., Value]
    bind: Callable[[Run, Scope, ast.AST, Value], None]
    items: list[Item] = field(default_factory=list)
    guards: tuple[Guard, ...] = ()
    tests: tuple[tuple[ast.AST, Value, bool], ...] = ()
    loops: tuple[ast.AST, ...] = ()
    stack: tuple[Site, ...] = ()
    contexts: tuple[str, ...] = ()
    functions: tuple[Function, ...] = ()
    selves: tuple[Value, ...] = ()
    scopes: dict[Any, Scope] = field(default_factory=dict)
    executed: set[ast.AST] = field(default_factory=set)
    has_seen_rank: bool = False
    initialized: bool | None = None
    budget: int = BUDGET
    environ: dict[str, Value] = field(default_factory=dict)
    dry: int = 0
    num_ops: int = 0
    barren: dict[Any, tuple[Any, Value]] = field(default_factory=dict)
    is_program: bool = False
    way: int = 0
    num_ways: int = 1
    notes: list[Any] = field(default_factory=list)
    moment: Value | None = None
    seeds: dict[str, Value] = field(default_factory=dict)
    written: list[tuple[dict[str, Value], str, Value | None]] = field(default_factory=list)
    implied: dict[ast.AST, tuple[Guard, ...]] = field(default_factory=dict)
    settled: dict[str, bool] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)

    def truth(self, value: Value) -> bool | None:
        """What `bool` of a value gives, as far as is known by now."""
        truth = value.truth()
        return self.settled.get(value.path) if truth is None and value.path else truth

    def settle(self, test: Value, outcome: bool) -> None:  # noqa: FBT001 - as the test gave it
        """Keep what a test must have given on all ranks of the job."""
        while test.made is not None and test.made.name == "operator.Not":
            test, outcome = test.made.args[0], not outcome
        if test.path:
            self.settled[test.path] = outcome

    @property
    def module(self) -> Module:
        """The module of the function that it stands in."""
        return self.functions[-1].module if self.functions else self.memo["top"].module

    def choose(self, ways: Sequence[Value]) -> Value:
        """The one of several functions that is called in this run; if they matter, the program is run for each."""
        functions = [getattr(way.thing, "function", way.thing) for way in ways]
        if any(one.name in one.module.relevant for one in functions):
            self.num_ways = max(self.num_ways, len(ways))
        return ways[self.way % len(ways)]

    def named(self, name: str, num_given: int = 0) -> Value | None:
        """What a name that asks who this rank is gives; with several arguments a number is another's."""
        role, main = role_of(name) if num_given < 2 else None, main_of(name)
        return self.role(role) if role is not None else self.is_rank(0, main) if main is not None else None

    def role(self, role: str, *, as_text: bool = False) -> Value:
        """The number of this rank: its rank, local_rank, world_size, ... as a value."""
        number = self.virtual_rank.of(role)
        differs = role in {"rank", "local_rank", "node_rank"}
        if differs:
            self.has_seen_rank = True
        return Value(
            spread=Spread.RANK if differs else Spread.EQUAL,
            origin=frozenset({role}),
            const=str(number) if as_text else number,
            thing=Role(role),
        )

    def is_rank(self, number: int, role: str = "rank") -> Value:
        """Whether this rank is the one of that number."""
        value = self.role(role)
        return Value(spread=Spread.RANK, origin=value.origin, const=value.const == number)

    def record(self, call: Call) -> Call:
        """Keep a call with all that encloses it."""
        call.guards, call.tests, call.loops = self.guards, self.tests, self.loops
        call.stack, call.contexts = self.stack, self.contexts
        call.function = self.functions[-1] if self.functions else None
        call.rank = self.virtual_rank.rank
        call.index = len(self.history.calls)
        if not self.dry:
            self.history.calls.append(call)
        return call

    def act(self, act: Act, call: Call, *, name: str | None = None, in_group: bool = False) -> None:
        """Add a collective to the history."""
        group = call.arg(act.group, "group", "process_group", "pg")
        in_group = in_group or (group is not None and group.const is not None and not _is_world(group))
        if not self.dry and not is_alone(call):
            self.num_ops += 1
            self.items.append(
                Op(
                    family=act.family,
                    name=name or call.name.rpartition(".")[2],
                    call=call,
                    is_sure=act.is_sure,
                    in_group=in_group,
                    is_joined="join" in self.contexts,
                )
            )

    def colour(self, value: Value) -> Value:
        """A value that is assigned where only some ranks come is theirs alone."""
        if self.moment is not None:
            value = replace(value, spread=Spread.LOCAL, origin=value.origin | self.moment.origin, const=UNKNOWN)
        if not self.guards:
            return value
        origin = NOTHING.union(*(guard.origin for guard in self.guards))
        return coloured(value, Spread.RANK, origin)

    def write(self, table: dict[str, Value], key: str, value: Value) -> None:
        """Set an attribute, or a variable of the environment; `take_back` undoes it."""
        self.written.append((table, key, table.get(key)))
        table[key] = self.colour(value)

    def take_back(self, since: int) -> dict[tuple[int, str], tuple[dict[str, Value], Value]]:
        """Undo what was written since then, and return it: an arm of a branch begins where the other one did."""
        ends: dict[tuple[int, str], tuple[dict[str, Value], Value]] = {}
        while len(self.written) > since:
            table, key, old = self.written.pop()
            ends.setdefault((id(table), key), (table, table.get(key, ANY)))
            if old is None:
                table.pop(key, None)
            else:
                table[key] = old
        return ends

    def keep_loop(self, loop: Loop) -> None:
        """Add a loop to the history."""
        if not self.dry:
            self.history.loops.append((self.loops, loop))
            if loop.items:
                self.items.append(loop)

    @contextmanager
    def within(self, attribute: str, *more: Any) -> Iterator[None]:
        """Add to one of the tuples (guards, loops, contexts, ...) for a while."""
        before = getattr(self, attribute)
        setattr(self, attribute, (*before, *more))
        try:
            yield
        finally:
            setattr(self, attribute, before)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do something that has no part in what is going on: an imported module's definitions."""
        names = ("items", "guards", "tests", "loops", "stack", "contexts", "functions", "selves", "moment")
        before = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, [] if name == "items" else None if name == "moment" else ())
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    @contextmanager
    def gathering(self) -> Iterator[list[Item]]:
        """Collect what is done into a list of its own."""
        before, self.items = self.items, []
        try:
            yield self.items
        finally:
            self.items = before

    def spend(self) -> bool:
        """Take one from the budget; False when it is used up."""
        self.budget -= 1
        if self.budget <= 0:
            self.history.is_cut = True
        return self.budget > 0


def _is_world(group: Value) -> bool:
    if isinstance(group.thing, Object):
        return group.thing.kind == "world"
    return getattr(group.thing, "name", "").endswith((".WORLD", ".world"))
