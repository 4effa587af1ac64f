"""Calls of library functions that the run on paper met, with the values they got: what most rules look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from rankwise.lint.interpreter.values import ANY, Suspended, Value, mixed
from rankwise.lint.library.names import FABRIC

if TYPE_CHECKING:
    import ast

    from rankwise.lint.program import Module

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
        rank: Which of the imagined ranks made it.
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
        for keyword in getattr(self.node, "keywords", ()):
            if keyword.arg in names:
                return keyword.value  # type: ignore[no-any-return]
        args = getattr(self.node, "args", ())
        return args[position] if position is not None and position < len(args) else None

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


def part_of(value: Value) -> Value:
    """A part of a value, of which no more is known."""
    part, made = mixed((value,)), value.made
    if made is None:
        return part
    return part.given_by(Call(name="operator.Subscript", node=made.node, module=made.module, args=(value, ANY)))


def whole_of(value: Value) -> Call | None:
    """The call that gave what a value is, or is a part of: that of ``checkpoint`` for ``checkpoint["model"]``."""
    made = value.made
    while made is not None and made.name == "operator.Subscript":
        made = made.args[0].made
    return made


def is_of_one_device(maker: Call) -> bool:
    """Whether a call makes a Fabric of one device: nothing is wrapped, and there are no other ranks."""
    devices = maker.arg(2, "devices")
    return maker.name == FABRIC and devices is not None and devices.const == 1 and "num_nodes" not in maker.kwargs


def is_alone(call: Call) -> bool:
    """Whether a call is a method of a Fabric that has no other ranks."""
    maker = getattr(call.receiver.thing, "call", None)
    return maker is not None and is_of_one_device(maker)


#: Builtins that run a generator to its end, or to its first value.
CONSUMERS = frozenset(
    f"builtins.{name}" for name in ("list", "tuple", "set", "sum", "min", "max", "sorted", "any", "all", "next", "dict")
)


def consume(call: Call) -> None:
    """Whoever is given a generator is taken to run it to its end."""
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value.thing, Suspended):
            value.thing.resume(lambda _yielded: None)
