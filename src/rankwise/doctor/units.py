"""Rates, times and counts as people read them."""

from __future__ import annotations


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in bits, as networks are sold: ``9.4 Gbit/s``."""
    bits = bytes_per_s * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits < 999.5:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Gbit/s"


def format_seconds(seconds: float) -> str:
    """Return a short time: ``85 us``, ``1.2 ms``, ``3.4 s``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def say_count(number: int, one: str, several: str = "") -> str:
    """Return a number of things with their word: ``1 process``, ``2 processes``.

    Args:
        number: How many.
        one: The word for one.
        several: The word for more; without, ``one`` with an s.
    """
    return f"{number} {one if number == 1 else several or f'{one}s'}"
