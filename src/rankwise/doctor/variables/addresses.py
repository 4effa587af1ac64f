"""Mistakes in MASTER_ADDR: a port, a scheme, blanks or brackets beside the name of the host. No rank finds a host by it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

#: ``tcp://node0:29500``, and each part of it by itself. A bare address of IPv6 has colons of its own, and is none of these.
_FORM = re.compile(r"([A-Za-z][\w+.-]*://)?(?:\[([\w:.%]+)\]|([\w.][\w.-]*))(?::(\d+))?/?")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AddressMistake:
    """A text that is more than a host's name.

    Attributes:
        what: The text, and what is wrong with it.
        host: The host that is meant; empty if that can't be told.
        port: The port that stands in the text; None if there is none.
        has_brackets_only: Whether only the brackets of an IPv6 address are too many: launchers' flags may have them.
    """

    what: str
    host: str
    port: int | None = None
    has_brackets_only: bool = False


def find_mistake(text: str) -> AddressMistake | None:
    """Return what a text is beside the name or address of a host; None if nothing."""
    bare = text.strip()
    if bare != text:
        shown = repr(text)  # nobody sees a blank at an end
        meant = find_mistake(bare) if bare else None
        host, port = (meant.host, meant.port) if meant else (bare, None)
        plain = host if is_plain(host) else ""
        return AddressMistake(what=f"{shown} has blanks around it", host=plain, port=port)
    found = _FORM.fullmatch(text)
    if found is None:
        return _find_strange_signs(text)
    scheme, inner, name, digits = found.groups()
    if not scheme and not inner and not digits and not text.endswith("/"):
        return None
    if scheme:
        what = f"begins with {scheme}, as no host name does"
    elif digits:
        what = f"has a port in it, {digits}"
    elif not inner:
        what = "ends with /, as no host name does"
    else:
        what = "has brackets, which belong to HOST:PORT only"
    return AddressMistake(what=f"{text} {what}", host=inner or name, port=_read_port(digits), has_brackets_only=bool(inner) and not scheme and not digits)  # fmt: skip


def _find_strange_signs(text: str) -> AddressMistake | None:
    if "://" in text:
        return AddressMistake(what=f"{text} begins like a URL", host="")
    # What follows % is the name of an interface, which has signs of its own.
    if not text or is_plain(text) or (is_plain(text.partition("%")[0]) and re.fullmatch(r"[^\s/]+", text)):
        return None
    shown = text if text.isprintable() and " " not in text else repr(text)
    return AddressMistake(what=f"{shown} is not a host name", host="")


def write_remedy(mistake: AddressMistake, port: int | None) -> str:
    """Return the command that sets MASTER_ADDR right, and MASTER_PORT (which is ``port`` now) where the port stood in the address alone."""
    if not mistake.host:
        return "export MASTER_ADDR=…  # the name or an address of the first host"
    command = f"export MASTER_ADDR={mistake.host}"
    if mistake.port is None:
        return command
    if port is None:
        return f"{command} MASTER_PORT={mistake.port}  # a port belongs in MASTER_PORT"
    if port == mistake.port:
        return f"{command}  # its port is in MASTER_PORT"
    return (
        f"{command}  # MASTER_PORT is {port}; if {mistake.port} is meant: export MASTER_PORT={mistake.port}"
    )


def is_plain(host: str) -> bool:
    """Return whether a text has only signs that names and addresses have, and may stand in a command."""
    return re.fullmatch(r"[\w.:][\w.:%-]*", host) is not None


def _read_port(digits: str | None) -> int | None:
    port = int(digits) if digits and len(digits) < 6 else 0
    return port if 0 < port < 65536 else None
