"""Values of the simulated run: what is known of a value, where it came from, and whether all ranks have the same; and the calls that gave them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.lint.program import Module


class Spread(IntEnum):
    """How a value may differ between ranks; what is not known counts as EQUAL."""

    EQUAL = 0
    RANK = 1
    LOCAL = 2


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        raise TypeError("ask `value.is_known` first")


UNKNOWN: Any = _Unknown()
NOTHING: frozenset[str] = frozenset()
#: Origin of what ranks made equal together.
AGREED = frozenset({"agreed"})


# Never changed once it is made; but a frozen one takes four times as long to make, and a run makes a million of them.
@dataclass(slots=True, unsafe_hash=True)
class Value:
    """One value on one rank.

    Attributes:
        spread: Whether other ranks may have another.
        origin: Where it came from: ``rank``, ``local_rank``, ``world_size``, ``time``, ``data``, ``exists``, ...
        const: The constant it is, or UNKNOWN.
        thing: What it is, where that is more than a constant: a `Library` name, an `Object`, a `Function`, ...
        path: How the user wrote what is not known, ``args.local_rank``.
        via: Wrapped models that it was computed with; a backward pass from it goes through them.
        made: The call that gave it, of a library or a model; an operator is one, too (``operator.Add``), and so is the
            choice between two that a test makes (``either``).
    """

    spread: Spread = Spread.EQUAL
    origin: frozenset[str] = NOTHING
    const: Any = UNKNOWN
    thing: Any = None
    path: str = ""
    via: tuple[Object, ...] = ()
    made: Call | None = field(default=None, compare=False, repr=False)

    @property
    def is_known(self) -> bool:
        """Whether it is a constant."""
        return self.const is not UNKNOWN

    def given_by(self, call: Call | None) -> Value:
        """The same value, which remembers that a call gave it."""
        return Value(self.spread, self.origin, self.const, self.thing, self.path, self.via, call)

    def truth(self) -> bool | None:
        """What `bool` of it gives, or None if that is not known."""
        if self.const is not UNKNOWN:
            try:
                return bool(self.const)
            except Exception:  # noqa: BLE001 - constants are plain, but a range or a set may be odd
                return None
        if isinstance(self.thing, (Function, Bound, Choice, UserClass, Instance, Object, Library)):
            return True
        if isinstance(self.thing, Items) and self.thing.is_whole:
            return bool(self.thing.values)
        return None


@dataclass(frozen=True, slots=True)
class Library:
    """A name of a library that is not followed: ``torch.distributed.all_reduce``."""

    name: str


@dataclass(frozen=True, slots=True)
class Role:
    """Which process this is, as it was told: on no rank is it None.

    Attributes:
        name: ``rank``, ``local_rank``, ``world_size``, …
    """

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number of Python's, of which no more is known: a length, a clock, what `item` gives."""


NUMBER = Number()


@dataclass(eq=False, slots=True)
class Object:
    """What a library call has made: a DataLoader, a DistributedSampler, a wrapped model, an optimizer, a group.

    Attributes:
        kind: Canonical name of its class.
        call: The call that made it; None if it was guessed from a name.
        attrs: Attributes with known values.
    """

    kind: str
    call: Call | None = None
    attrs: dict[str, Value] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Function:
    """A function of the user's: its definition and what it closes over."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: Module
    scope: Any = None
    owner: UserClass | None = None
    marks: frozenset[str] = NOTHING
    defaults: tuple[Value, ...] = ()
    kw_defaults: dict[str, Value] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return getattr(self.node, "name", "lambda")


@dataclass(eq=False, slots=True)
class UserClass:
    """A class of the user's.

    Attributes:
        ancestry: Itself and the user's classes it derives from, nearest first; cut where these are very many.
        library_bases: Canonical names of the library classes it derives from.
        is_open: Whether it derives from a class of which nothing is known.
    """

    node: ast.ClassDef
    module: Module
    bases: tuple[Value, ...] = ()
    attrs: dict[str, Value] = field(default_factory=dict)
    ancestry: tuple[UserClass, ...] = field(init=False)
    library_bases: frozenset[str] = field(init=False)
    is_open: bool = field(init=False)

    def __post_init__(self) -> None:
        things = [base.thing for base in self.bases]
        users = [thing for thing in things if isinstance(thing, UserClass)]
        self.ancestry = (self, *(one for user in users for one in user.ancestry))[:100]
        own = frozenset(thing.name for thing in things if isinstance(thing, Library))
        self.library_bases = own.union(*(user.library_bases for user in users))
        self.is_open = None in things or any(user.is_open for user in users)

    def find(self, name: str) -> Value | None:
        """A method or class attribute, or None."""
        for one in self.ancestry:
            if name in one.attrs:
                return one.attrs[name]
        return None


@dataclass(eq=False, slots=True)
class Instance:
    """An object of a class of the user's; ``base`` is what `super().__init__` makes of it, where rules follow such objects."""

    cls: UserClass
    attrs: dict[str, Value] = field(default_factory=dict)
    call: Call | None = None
    base: Object | None = None


def object_of(value: Value) -> Any:
    """What a value is; a loader of the user's own class is a loader."""
    return getattr(value.thing, "base", None) or value.thing


@dataclass(frozen=True, slots=True)
class Bound:
    """A method with its object."""

    receiver: Value
    function: Function


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a library's object, or of a value that is not known: ``loader.sampler``, ``loss.backward``."""

    receiver: Value
    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several functions or classes, which settings choose from: a command line's words, a table's key."""

    ways: tuple[Value, ...]


@dataclass(eq=False, slots=True)
class Items:
    """A list, tuple, set or dict display whose parts are known; ``is_whole`` if it has no more parts than these."""

    values: list[Value]
    keys: list[Value] | None = None
    kind: str = "list"
    is_whole: bool = True

    @property
    def is_partial_table(self) -> bool:
        """Whether it is a dict of which some entries are known."""
        return self.keys is not None and not self.is_whole

    def entry(self, key: Any) -> Value | None:
        """What a dict holds under a key; None if it holds nothing there, or that is not known."""
        found = (
            value
            for one, value in zip(self.keys or (), self.values, strict=False)
            if one.is_known and type(one.const) is type(key) and one.const == key
        )
        return next(found, None)


@dataclass(eq=False, slots=True)
class Deferred:
    """A name imported from the project: looked up when it is used."""

    resolve: Callable[[], Value]


@dataclass(frozen=True, slots=True)
class ModuleRef:
    """A module of the user's project."""

    module: Module


def known(const: Any, *, spread: Spread = Spread.EQUAL, origin: frozenset[str] = NOTHING) -> Value:
    """A constant."""
    return Value(spread=spread, origin=origin, const=const)


_DEEPEST = 6
ANY = Value()
NONE = Value(const=None)
#: None as it stands in the text; what a library gives back may be None in tables only.
LITERAL_NONE = Value(const=None, path="None")


def is_number(value: Value) -> bool:
    """Whether it is a plain number, known or not; a bool is one, too."""
    return isinstance(value.const, (int, float)) or isinstance(value.thing, (Number, Role))


def mixed(values: Iterable[Value], _depth: int = 0) -> Value:
    """What is computed from these, if nothing more is known: it differs as they do."""
    spread, origin = Spread.EQUAL, NOTHING
    via: tuple[Object, ...] = ()
    for value in values:
        if value.spread:
            spread = max(spread, value.spread)
        if value.origin:
            origin |= value.origin
        if value.via:
            via = (*via, *(one for one in value.via if one not in via))
        # A list may hold itself. One entry of a table of settings says nothing of the others.
        if type(value.thing) is Items and not value.thing.is_partial_table and _depth < _DEEPEST:
            inner = mixed(value.thing.values, _depth + 1)
            spread, origin = max(spread, inner.spread), origin | inner.origin
            via = (*via, *(one for one in inner.via if one not in via))
    if spread is Spread.EQUAL and not origin and not via:
        return ANY
    return Value(spread=spread, origin=origin, via=via)


def joined(one: Value, other: Value, test: Value | None = None) -> Value:
    """What a name holds behind a branch that is not decided: one or the other."""
    if one is other:
        return one
    one, other = (each.thing.resolve() if type(each.thing) is Deferred else each for each in (one, other))
    value = _joined_parts(one, other, test) or _joined(one, other, test)
    if one.made is other.made:
        return value.given_by(one.made) if one.made is not None else value
    # `start = 0`, and a number that was loaded in one arm: the rules are about the latter.
    first = one.made if other.is_known else other.made if one.is_known else None
    made = first or (one.made or other.made).beside(one, other, test)  # type: ignore[union-attr]
    return value.given_by(made)


def _joined(one: Value, other: Value, test: Value | None) -> Value:
    same = one.const is other.const or (one.is_known and other.is_known and _same(one.const, other.const))
    if same and one.thing is other.thing:
        const, thing = one.const, one.thing
    else:
        const = UNKNOWN
        # `sampler = None` in one arm and a sampler in the other: the rules are about the sampler.
        thing = one.thing if one.thing is not None else other.thing
        if one.thing is not None and other.thing is not None and one.thing is not other.thing:
            thing = one.thing if isinstance(one.thing, (Object, Instance)) else other.thing
        if thing is None or thing is NUMBER:
            thing = NUMBER if is_number(one) and is_number(other) else None
        if not (isinstance(one.thing, Library) and isinstance(other.thing, Library)):
            thing = choice_of((one, other)) or thing
    if test is None or not test.spread:
        agreed = next((each for each in (one, other) if _is_agreed(each)), None)
        if agreed is not None:
            # `if args.distributed: all_reduce(flag)`: where it is left out, there is nobody to differ from.
            via = (*one.via, *(model for model in other.via if model not in one.via))
            return Value(origin=agreed.origin, const=const, thing=thing, path=one.path or other.path, via=via)
    spread = max(one.spread, other.spread)
    origin = one.origin | other.origin
    if test is not None and test.spread and not (same and one.thing is other.thing):
        spread, origin = max(spread, test.spread), origin | test.origin
    via = (*one.via, *(model for model in other.via if model not in one.via))
    return Value(spread=spread, origin=origin, const=const, thing=thing, path=one.path or other.path, via=via)


def choice_of(values: Iterable[Value]) -> Choice | None:
    """One of several functions or classes; None if these are not all such."""
    ways = {id(way.thing): way for each in values for way in getattr(each.thing, "ways", (each,))}
    is_chosen = all(isinstance(way.thing, (Function, Bound, UserClass, Library)) for way in ways.values())
    return Choice(tuple(ways.values())) if ways and is_chosen else None


def _joined_parts(one: Value, other: Value, test: Value | None) -> Value | None:
    """Two tuples of one length, part by part: ``best, bad = (v, 0) if v < best else (best, bad + 1)``."""
    mine, its = one.thing, other.thing
    if (
        not (isinstance(mine, Items) and isinstance(its, Items))
        or mine is its
        or mine.kind != "tuple"
        or its.kind != "tuple"
    ):
        return None
    if not (mine.is_whole and its.is_whole) or len(mine.values) != len(its.values):
        return None
    parts = [joined(a, b, test) for a, b in zip(mine.values, its.values, strict=True)]
    return Value(max(one.spread, other.spread), one.origin | other.origin, thing=Items(parts, kind="tuple"))


def _is_agreed(value: Value) -> bool:
    return not value.spread and value.origin >= AGREED


def _same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # noqa: BLE001 - whatever a constant's comparison raises, they are not known to be the same
        return False


def coloured(value: Value, spread: Spread, origin: frozenset[str]) -> Value:
    """The same value, which exists or was chosen because of something that differs between ranks."""
    if value.spread >= spread and origin <= value.origin:
        return value
    both = max(value.spread, spread), value.origin | origin
    return Value(*both, value.const, value.thing, value.path, value.via, value.made)


@dataclass(eq=False, slots=True)
class Suspended:
    """A generator that has not begun, or a context manager made of one: `resume` runs it, with what each yield does."""

    resume: Callable[[Callable[[Value], None]], None]
    name: str = ""


Tests: TypeAlias = "tuple[tuple[ast.AST, Value, bool], ...]"


@dataclass(frozen=True, slots=True)
class Guard:
    """A test that was decided by who the rank is, and so encloses what follows.

    Attributes:
        node: The test, or the decorator or `with` item that acts as one.
        module: Where it stands.
        origin: What it asks for.
        outcome: What it gave on this rank.
        depth: How many calls of the user's functions were open where it stands.
    """

    node: ast.AST
    module: Module
    origin: frozenset[str]
    outcome: bool
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the user's text."""

    node: ast.AST
    module: Module


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """One call of a library function (or an assignment to os.environ, or a method of a library's object).

    Attributes:
        name: Canonical name: ``torch.utils.data.DataLoader``; a method of an object that is known is
            ``torch.utils.data.DataLoader.set_epoch``, of one that is not ``?.backward``.
        node: The call in the user's text.
        module: The file it stands in.
        args: Positional arguments; ``has_star`` tells that more may come.
        kwargs: Named arguments.
        receiver: The object whose method it is.
        result: What it returned.
        guards: Tests on the rank that enclose it, outermost first.
        tests: All other enclosing tests that were not decided, outermost first: (test, value, arm taken).
        loops: Enclosing loops, outermost first, of this and the calling functions.
        stack: Call sites of the user's functions that led here, outermost first.
        contexts: Context managers that are open, by canonical name.
        function: The user's function it stands in; None at the top of a module.
        rank: Which of the virtual ranks made it.
        index: Order in this rank's run.
    """

    name: str
    node: ast.AST
    module: Module
    args: tuple[Value, ...] = ()
    kwargs: dict[str, Value] = field(default_factory=dict)
    has_star: bool = False
    receiver: Value = ANY
    result: Value = ANY
    guards: tuple[Guard, ...] = ()
    tests: Tests = ()
    loops: tuple[ast.AST, ...] = ()
    stack: tuple[Site, ...] = ()
    contexts: tuple[str, ...] = ()
    function: Any = None
    rank: int = 0
    index: int = 0

    def arg(self, position: int | None, *names: str) -> Value | None:
        """An argument by position or name; None if it was not given."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        if position is not None and position < len(self.args):
            return self.args[position]
        return None

    def arg_node(self, position: int | None, *names: str) -> ast.AST | None:
        """The text of an argument, or None."""
        if not isinstance(self.node, ast.Call):
            return None  # a function that is handed on is called out of sight
        for keyword in self.node.keywords:
            if keyword.arg in names:
                return keyword.value
        return self.node.args[position] if position is not None and position < len(self.node.args) else None

    @property
    def given(self) -> Value:
        """All arguments mixed: as different as the most different of them."""
        return mixed((*self.args, *self.kwargs.values()))

    def excludes(self, other: Call) -> bool:
        """Whether the two stand in different arms of one test, or of two tests of one setting."""
        arms = arms_of(self.tests)
        return any((key, not arm) in arms for key, arm in arms_of(other.tests))

    def beside(self, one: Value, other: Value, test: Value | None) -> Call:
        """The choice between what this call and another one gave."""
        return Call(name="either", node=self.node, module=self.module, args=(one, other), receiver=test or ANY)

    @property
    def is_guarded(self) -> bool:
        """Whether only some ranks make it."""
        return bool(self.guards)


def arms_of(tests: Tests) -> frozenset[tuple[str | int, bool]]:
    """Which arms enclose a place: of the setting that a test asks for, or of the test itself."""
    return frozenset((value.path or id(node), arm) for node, value, arm in tests)
