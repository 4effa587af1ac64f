"""Slurm's short form of many hosts: ``gpu[07-09,12],big1``."""

from __future__ import annotations


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
                range(int(first), int(last) + 1) if dash and first.isdecimal() and last.isdecimal() else ()
            )
            middles = [f"{number:0{len(first)}d}" for number in numbers] or [part]
            found += [
                host
                for middle in middles
                for host in (
                    expand_hosts(f"{head}{middle}{tail}") if "[" in tail else (f"{head}{middle}{tail}",)
                )
            ]
    return tuple(found)


def find_first_host(text: str) -> str:
    """Return the first host of Slurm's short form; empty if there is none."""
    return next(iter(expand_hosts(text)), "")


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
