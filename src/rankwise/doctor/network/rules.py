"""What a firewall's rules do with a connection from outside, as far as it can be told from their text.

A rule may ask for things that are not known here (marks, rates, sets of addresses that change). So the answer is a set of outcomes,
and only a set of one is a certainty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Outcome = Literal["accept", "drop", "return", "unknown"]
#: What a rule does: an outcome, a way to another chain, or nothing that matters here (a counter, a log).
Action = Literal["accept", "drop", "return", "unknown", "jump", "goto", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """The first packet of a TCP connection to this host.

    Attributes:
        source, target: Addresses of IPv4.
        interface: By which it comes in.
        port: To which it goes.
    """

    source: str
    target: str
    interface: str
    port: int


#: Whether a packet fits; None if that can't be told.
Condition: TypeAlias = "Callable[[Packet], bool | None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: what it does with packets that fit all its conditions; ``target`` is the chain to go to."""

    conditions: tuple[Condition, ...] = ()
    action: Action = "none"
    target: str = ""

    def fits(self, packet: Packet) -> bool | None:
        """Tell whether a packet fits; None if that can't be told."""
        answers = [condition(packet) for condition in self.conditions]
        if False in answers:
            return False
        return None if None in answers else True


@dataclass(slots=True, kw_only=True)
class Chain:
    """Rules, one after the other; ``policy`` is what happens at their end, empty for a chain that others call."""

    rules: list[Rule] = field(default_factory=list)
    policy: Outcome | None = None


def follow(chains: Mapping[str, Chain], name: str, packet: Packet) -> set[Outcome]:
    """Return what may become of a packet in a chain: one outcome if that is certain."""
    return _Walk(chains, packet).follow(name)


class _Walk:
    def __init__(self, chains: Mapping[str, Chain], packet: Packet) -> None:
        self._chains, self._packet = chains, packet
        self._known: dict[str, set[Outcome]] = {}

    def follow(self, name: str) -> set[Outcome]:
        if name not in self._known:
            self._known[name] = {"unknown"}  # for a chain that calls itself, which the kernel refuses
            self._known[name] = self._walk(self._chains.get(name, Chain(policy="unknown")))
        return self._known[name]

    def _walk(self, chain: Chain) -> set[Outcome]:
        found: set[Outcome] = set()
        end: Outcome = chain.policy or "return"
        for rule in chain.rules:
            fits = rule.fits(self._packet)
            if fits is False or rule.action == "none":
                continue
            outcomes, goes_on = self._act(rule, end)
            found |= outcomes
            if fits and not goes_on:
                return found
        return found | {end}

    def _act(self, rule: Rule, end: Outcome) -> tuple[set[Outcome], bool]:
        """Return what a rule leads to, and whether the rules behind it are asked as well."""
        if rule.action == "return":
            return {end}, False
        if rule.action in {"jump", "goto"}:
            outcomes = self.follow(rule.target)
            rest = outcomes - {"return"}
            if rule.action == "jump":
                return rest, "return" in outcomes
            return (rest | {end} if "return" in outcomes else rest), False
        action: Outcome = (
            "accept" if rule.action == "accept" else "drop" if rule.action == "drop" else "unknown"
        )
        return {action}, False
