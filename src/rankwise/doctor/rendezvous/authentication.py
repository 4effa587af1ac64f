"""Both sides of a rendezvous prove that they know its token, which itself is never sent (HMAC, RFC 2104)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

Side = Literal["coordinator", "peer"]


def make_nonce() -> str:
    """Return a number that is used once."""
    return secrets.token_hex(16)


def mark(token: str) -> str:
    """Return what identifies a rendezvous in public; empty without a token."""
    return _sign(token, "meeting") if token else ""


def prove(token: str, side: Side, peer_nonce: str, coordinator_nonce: str) -> str:
    """Return the proof for these two nonces, which only who knows the token can compute, for one side of the connection."""
    return _sign(token, side, peer_nonce, coordinator_nonce)


def is_proof(proof: str, token: str, side: Side, peer_nonce: str, coordinator_nonce: str) -> bool:
    """Return whether the other side knows the token."""
    return hmac.compare_digest(proof.encode(), prove(token, side, peer_nonce, coordinator_nonce).encode())


def _sign(token: str, *words: str) -> str:
    return hmac.new(token.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()
