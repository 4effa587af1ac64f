"""Sanitizes and validates what other hosts send, before anything is done with it: anybody may reach the port."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from rankwise.base.terminal import clean_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.doctor.probe import Fact

#: A line of JSON without these bytes has nothing unseemly: most lines, and the long ones are worth the look.
_SUSPECT = re.compile(rb"\\[bfru]|[^\x20-\x7e]")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:@ ()#-]")
_NOT_IN_HOST_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_ADDRESS = re.compile(r"[0-9A-Fa-f.:]{2,45}(%[A-Za-z0-9._-]{1,15})?")
_MOST_NAME, _MOST_DEEP, _MOST_LINE = 80, 24, 2000


class BadMessageError(ValueError):
    """A message that no doctor sends; the text says what is wrong with it."""


def clean(value: Fact) -> Fact:
    """Return what was sent, without the characters that a terminal would obey; BadMessageError: it is a list of lists of lists … that nobody needs."""
    return _clean(value, _MOST_DEEP)


def clean_all(message: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return a message without the characters that a terminal would obey; BadMessageError: see `clean`."""
    return {clean_text(key): clean(one) for key, one in message.items()}


def is_suspect(line: bytes) -> bool:
    """Return whether a line of JSON may hold something that `clean` would change."""
    return _SUSPECT.search(line) is not None


def _clean(value: Fact, depth: int) -> Fact:
    if not depth:
        raise BadMessageError("it sends lists nested without end")
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean(one, depth - 1) for one in value]
    if isinstance(value, dict):
        return {clean_text(key): _clean(one, depth - 1) for key, one in value.items()}
    return value


def one_line(message: str, most: int = _MOST_LINE) -> str:
    """Return a text as one line, that can't look like anything but what it stands in."""
    return " ".join(clean_text(message).split())[:most]


def clean_name(message: str) -> str:
    """Return a host's or an interface's name, of letters that mean nothing to a terminal or in a comment of a shell; may be empty."""
    return _NOT_IN_NAMES.sub("-", message)[:_MOST_NAME].strip()


def clean_host_name(message: str) -> str:
    """Return a name as it stands in /etc/hosts; what stands in a command must be no more than a word."""
    return _NOT_IN_HOST_NAMES.sub("-", message)[:_MOST_NAME].lstrip("-")


def read_address(message: Fact) -> str:
    """Return an address; an empty text stays; BadMessageError: it is none."""
    if message in ("", None):
        return ""
    if isinstance(message, str) and _ADDRESS.fullmatch(message):
        try:
            ipaddress.ip_address(message.partition("%")[0])
        except ValueError:
            pass
        else:
            return message
    raise BadMessageError(f"{message!r:.60} is not an address")


def read_port(message: Fact) -> int:
    """Return a port; BadMessageError: it is none."""
    if isinstance(message, int) and not isinstance(message, bool) and 0 < message < 1 << 16:
        return message
    raise BadMessageError(f"{message!r:.60} is not a port")


def read_number(message: Fact, count: int, own: int) -> int:
    """Return the number of another host, of ``count``, sent by the host with the number ``own``; BadMessageError: it is none."""
    if isinstance(message, int) and not isinstance(message, bool) and 0 <= message < count and message != own:
        return message
    raise BadMessageError(f"{message!r:.60} is not another host of {count}")
