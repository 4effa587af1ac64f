"""Where the virtual ranks part: something that some do together, and others never come to."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.history import Exit, Inline, Loop, Op
from rankwise.lint.paths.tokens import flatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.lint.interpreter.history import History, Item
    from rankwise.lint.interpreter.values import Guard
    from rankwise.lint.paths.tokens import Token


@dataclass(frozen=True, slots=True)
class Divergence:
    """Ranks that do one thing more than others.

    Attributes:
        item: The op that only some come to, the loop that only some (or unequally often) make, the way out that only
            some take.
        guard: The test on the rank that parts them; None for a loop whose number of turns differs.
        doers: Ranks that reach it.
        others: Ranks that do not.
        instead: What the others do in its place, if anything.
        in_program: Whether the text run as a program comes there, or only a function that it does not call.
    """

    item: Op | Loop | Exit
    guard: Guard | None
    doers: tuple[int, ...]
    others: tuple[int, ...]
    instead: Op | None = None
    in_program: bool = True


def divergences(histories: Sequence[History]) -> Iterator[Divergence]:
    """All places where one rank's history has what another's has not, each once.

    A rank that fails on purpose, as by ``sys.exit("no data")``, ends the job by it: no other waits for that one.
    """
    histories = [history for history in histories if not _fails(history.items)]
    if len(histories) < 2 or any(history.is_cut for history in histories):
        return
    tokens = {history.rank: flatten(history.items) for history in histories}
    outcomes = _outcomes(histories)
    seen: set[tuple[int, ...]] = set()
    groups = _alike(tokens)
    if len(groups) < 2:
        return
    lead = groups[0][0]
    for others in groups[1:]:
        for token, instead in _unmatched(tokens[lead], tokens[others[0]]):
            for one in _really_odd(token, tokens):
                yield from _divergence(one, instead, tokens, outcomes, seen)


def _fails(items: Sequence[Item]) -> bool:
    """Tell whether a rank surely ends with an exception, or an exit code that is not 0."""
    for item in items:
        if isinstance(item, Exit) and item.kind in {"raise", "exit"}:
            return _is_failure(item.node)
        if isinstance(item, (Inline, Loop)) and _fails(item.items):
            return True
    return False


def _is_failure(node: ast.AST) -> bool:
    thrown = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Expr) else None
    if isinstance(node, ast.Raise) and not (
        isinstance(thrown, ast.Call) and getattr(thrown.func, "id", "") == "SystemExit"
    ):
        return getattr(thrown, "id", "") != "SystemExit"
    given = thrown.args[:1] if isinstance(thrown, ast.Call) else []
    is_abort = isinstance(thrown, ast.Call) and getattr(thrown.func, "attr", "") == "abort"
    return is_abort or any(not isinstance(code, ast.Constant) or code.value not in {0, None} for code in given)


def _really_odd(token: Token, tokens: dict[int, list[Token]]) -> list[Token]:
    """The token itself, or those of its kind that stand in other places and not on all ranks.

    Of two barriers in a row that meet one, the comparison may take either for the odd one.
    """
    if _differs(token, tokens):
        return [token]
    alike: dict[object, Token] = {}
    for own in tokens.values():
        for one in own:
            if one.key == token.key and one.guards:
                alike.setdefault(place_of(one.item), one)
    return [one for one in alike.values() if _differs(one, tokens)]


def _differs(token: Token, tokens: dict[int, list[Token]]) -> bool:
    return len(set(_counted(token, tokens).values())) > 1


def _counted(token: Token, tokens: dict[int, list[Token]]) -> dict[int, int]:
    """How often each rank comes to a token's place."""
    place = place_of(token.item)
    return {
        rank: sum(one.key == token.key and place_of(one.item) == place for one in own) for rank, own in tokens.items()
    }


def _alike(tokens: dict[int, list[Token]]) -> list[list[int]]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, own in tokens.items():
        groups.setdefault(tuple(token.key for token in own), []).append(rank)
    return list(groups.values())


def _unmatched(one: list[Token], other: list[Token]) -> Iterator[tuple[Token, Token | None]]:
    matcher = SequenceMatcher(None, [token.key for token in one], [token.key for token in other], autojunk=False)
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        mine, theirs = one[start:end], other[other_start:other_end]
        for token in mine:
            yield token, theirs[0] if theirs else None
        for token in theirs:
            yield token, mine[0] if mine else None


def _divergence(
    token: Token,
    instead: Token | None,
    tokens: dict[int, list[Token]],
    outcomes: dict[int, dict[object, set[bool]]],
    seen: set[tuple[int, ...]],
) -> Iterator[Divergence]:
    item = token.item
    place = place_of(item)
    if place in seen or token.key == ("end",):
        return
    counted = _counted(token, tokens)
    most = max(counted.values())
    doers = tuple(rank for rank, number in counted.items() if number == most)
    others = tuple(rank for rank, number in counted.items() if number < most)
    if not others:
        return
    guard = _guard_that_divides(token.guards, doers, others, outcomes)
    if guard is None and not (isinstance(item, Loop) and item.turns is not None):
        return
    seen.add(place)
    other_op = instead.item if instead is not None and isinstance(instead.item, Op) else None
    yield Divergence(item, guard, doers, others, other_op)


def place_of(item: Op | Loop | Exit) -> tuple[int, ...]:
    """Where an item stands, and the calls that led there: one helper called twice is two places."""
    if isinstance(item, Op):
        return (id(item.call.node), *(id(site.node) for site in item.call.stack))
    return (id(item.node),)


def _guard_that_divides(
    guards: Sequence[Guard], doers: Sequence[int], others: Sequence[int], outcomes: dict[int, dict[object, set[bool]]]
) -> Guard | None:
    """The innermost test that gave something else, or was never met, on the others."""
    for guard in reversed(guards):
        if any(guard.outcome not in outcomes[rank].get(guard.node, set()) for rank in others):
            return guard
    return guards[-1] if guards and doers else None


def _outcomes(histories: Sequence[History]) -> dict[int, dict[object, set[bool]]]:
    """For each rank what each test on the rank gave there."""
    result: dict[int, dict[object, set[bool]]] = {}
    for history in histories:
        own = result.setdefault(history.rank, {})
        for call in history.calls:
            for guard in call.guards:
                own.setdefault(guard.node, set()).add(guard.outcome)
    return result
