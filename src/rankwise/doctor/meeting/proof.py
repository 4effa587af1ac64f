"""How both sides of a meeting show that they know its token, which itself never travels (HMAC, RFC 2104)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

Side = Literal["holder", "guest"]


def make_nonce() -> str:
    """Return a number that is used once."""
    return secrets.token_hex(16)


def mark(token: str) -> str:
    """Return by what a meeting is told from others in public; empty without a token."""
    return _sign(token, "meeting") if token else ""


def prove(token: str, side: Side, guest_nonce: str, holder_nonce: str) -> str:
    """Return what only who knows the token can say of these two nonces, on this side of the connection."""
    return _sign(token, side, guest_nonce, holder_nonce)


def is_proof(told: str, token: str, side: Side, guest_nonce: str, holder_nonce: str) -> bool:
    """Tell whether the other side knows the token."""
    return hmac.compare_digest(told.encode(), prove(token, side, guest_nonce, holder_nonce).encode())


def _sign(token: str, *words: str) -> str:
    return hmac.new(token.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()
