"""Memory by its address, as bytes."""

from __future__ import annotations

import ctypes


def view_memory(address: int, num_bytes: int) -> memoryview:
    """Return memory as bytes that can be read and written; its owner must outlive them.

    For tensors without NumPy, of any size: ``ctypes.string_at`` takes a C int, and cuts what is larger than 2 GiB.

    Args:
        address: Where it begins.
        num_bytes: How much of it.
    """
    if not num_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
