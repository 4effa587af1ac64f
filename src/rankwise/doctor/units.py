"""Rates, times, sizes and tables as people read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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


def format_age(age_s: float) -> str:
    """Describe a span of time in the unit that fits: ``2 h``."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def format_count(number: int, one: str, several: str = "") -> str:
    """Return a number of things with their word, which gets an s unless that for several is given: ``1 process``, ``2 processes``."""
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def format_size(size_bytes: float) -> str:
    """Return a size of memory or disk: ``512 MiB``, ``1.5 GiB``."""
    gib = size_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if abs(gib) >= 1 else f"{size_bytes / (1 << 20):.0f} MiB"


def join_names(names: Sequence[str], most: int = 8) -> str:
    """Return names with ``and`` before the last one; of many the first ones, and how many more there are."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def format_bytes(size: int) -> str:
    """Return a number of bytes with a unit: ``1.4 GiB``."""
    amount, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        if amount < 1024 or unit == units[-1]:
            break
        amount /= 1024
    return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"


def align(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return rows as lines, two spaces between columns; ``right`` are the numbers of the columns that are set to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
