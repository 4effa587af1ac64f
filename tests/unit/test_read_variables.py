"""Which variables imports have looked up by name: a resident server serves no run where one of them differs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rankwise.warm.become_rank import ReadVariables

if TYPE_CHECKING:
    import pytest

LIBRARY = """
import os
threads = os.environ.get("ASKED")
turns = []
for name in os.environ:
    turns.append(os.environ[name])
copied = {name: value for name, value in os.environ.items() if name.startswith("LIBRARY_")}
absent = os.environ.get("NOT_SET")
"""


def test_a_loop_over_all_variables_looks_up_none_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first turns are other instructions than the later ones, which Python has specialized by then."""
    for name in ("ASKED", "OTHER"):
        monkeypatch.setenv(name, "1")
    there, reads, encode = frozenset(os.environ), ReadVariables(), os.environ.encodekey

    def tell(name: str) -> bytes:
        reads.note(name)
        return encode(name)

    monkeypatch.setattr(os.environ, "encodekey", tell)
    exec(compile(LIBRARY, "library.py", "exec"), {"__name__": "library"})
    monkeypatch.undo()
    assert reads.list_by_name(there) == {"ASKED", "NOT_SET"}
