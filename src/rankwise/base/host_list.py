"""Slurm's short form of many hosts: ``gpu[07-09,12],big1``."""

from __future__ import annotations

import math
import re

#: More hosts than this are a slip of the hand: ``n[1-1000000]``.
_MOST_HOSTS = 65536
_ADDRESS = re.compile(r"([^\[\]]*@)?\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[^\[\]]+)?\]")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of Slurm's short form: ``gpu[07-09,12],big1`` is gpu07, gpu08, gpu09, gpu12 and big1."""
    found: list[str] = []
    for word in _split_outside(text):
        head, bracket, rest = word.partition("[")
        if not bracket:
            found += [word] if word else []
            continue
        inside, _, tail = rest.partition("]")
        for part in inside.split(","):
            first, dash, last = part.partition("-")
            numbers = (
                range(int(first), min(int(last), int(first) + _MOST_HOSTS) + 1)
                if dash and first.isdecimal() and last.isdecimal()
                else ()
            )
            middles = [f"{number:0{len(first)}d}" for number in numbers] or [part]
            found += [
                host
                for middle in middles
                for host in (expand_hosts(f"{head}{middle}{tail}") if "[" in tail else (f"{head}{middle}{tail}",))
            ]
    return tuple(found)


def find_first_host(text: str) -> str:
    """Return the first host of Slurm's short form; empty if there is none."""
    return next(iter(expand_hosts(text)), "")


def find_fault(text: str) -> str:
    """Return why a list of hosts that somebody typed can't be read, as a clause; empty if it can."""
    faults = (_find_word_fault(word) for word in _split_outside(text) if word)
    return next((fault for fault in faults if fault), "")


def _find_word_fault(word: str) -> str:
    if word.startswith("-"):
        return f"{word!r} is not a host name"
    if _ADDRESS.fullmatch(word):
        return ""
    if re.fullmatch(r"([^\[\]]|\[[^\[\]]*\])*", word) is None:
        return f"the brackets of {word!r} are not closed, or not opened"
    counts = []
    for inside in re.findall(r"\[([^\[\]]*)\]", word):
        counts.append(0)
        for part in inside.split(","):
            found = re.fullmatch(r"([0-9]+)-([0-9]+)", part)
            if not part or ("-" in part and (found is None or int(found[1]) > int(found[2]))):
                return f"{part!r} in {word!r} is neither a number nor a range such as gpu[01-16]"
            counts[-1] += int(found[2]) - int(found[1]) + 1 if found else 1
    return f"{word!r} is more than {_MOST_HOSTS} hosts" if math.prod(counts) > _MOST_HOSTS else ""


def _split_outside(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets."""
    words, depth = [""], 0
    for char in text.strip():
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            words.append("")
        else:
            words[-1] += char
    return words
