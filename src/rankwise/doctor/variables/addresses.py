"""Mistakes in MASTER_ADDR: a port, a scheme, blanks or brackets beside the name of the host. No rank finds a host by it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final
from urllib.parse import urlsplit

from rankwise.doctor.network.names import is_address


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AddressMistake:
    """A text that is more than a host's name.

    Attributes:
        what: The text, and that it is no name.
        host: The host that is meant; empty if that can't be told.
        port: The port that stands in the text; None if there is none.
    """

    what: str
    host: str
    port: int | None = None


def find_mistake(text: str) -> AddressMistake | None:
    """Return what a text is beside the name or address of a host; None if nothing."""
    if not text or _is_host(text):
        return None
    host, port = _split(text.strip())
    # Nobody sees a blank at an end.
    shown = text if text.isprintable() and " " not in text else repr(text)
    says = "is more than the name of a host" if host else "is not a host name"
    return AddressMistake(what=f"{shown} {says}", host=host, port=port)


def _is_host(text: str) -> bool:
    return is_address(text) or re.fullmatch(r"[\w.][\w.-]*", text) is not None


def _split(text: str) -> tuple[str, int | None]:
    """Return the host and the port that a text has in it: of an URL, of ``HOST:PORT``, or of an address in brackets."""
    if _is_host(text):
        return text, None
    head, _, tail = text.rpartition(":")
    if ":" in head and is_address(head):  # of IPv6, without the brackets
        text = f"[{head}]:{tail}"
    try:
        link = urlsplit(text if "://" in text else f"//{text}")
    except ValueError:  # brackets with something else in them
        return "", None
    host = link.hostname or ""
    try:
        port = link.port or None
    except ValueError:  # no number, or none of a port
        port = None
    is_clear = _is_host(host) and link.path in {"", "/"} and "@" not in link.netloc and text.isprintable()
    return (host, port) if is_clear else ("", None)


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
    return f"{command}  # MASTER_PORT is {port}; if {mistake.port} is meant: export MASTER_PORT={mistake.port}"


def is_plain(host: str) -> bool:
    """Return whether a text has only signs that names and addresses have, and may stand in a command."""
    return re.fullmatch(r"[\w.:][\w.:%-]*", host) is not None
