"""The conditions that a line of a script stands under."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rankwise.verdict.guards import Book

_TEXT = """import torch.distributed as dist
r, w = dist.get_rank(), dist.get_world_size()
if r == 0: dist.barrier()
if loss > 2:
    dist.barrier()
else:
    dist.barrier()
def helper(x):
    if x.is_main_process:
        return dist.barrier()
    dist.barrier()
for step in range(3):
    try:
        dist.barrier()
    except OSError:
        dist.barrier()
    finally:
        dist.barrier()
ok = r == 0 and dist.barrier()
if os.environ["RANK"] == "0":
    pass
elif step:
    dist.barrier()
match r:
    case 0:
        if step: dist.barrier()
"""


@pytest.mark.parametrize(
    ("line", "guards"),
    [
        (1, []),
        (3, [("if", True)]),
        (5, [("if", False)]),
        (7, [("if", False)]),
        (10, [("if", True)]),
        (11, []),
        (14, [("try", False)]),
        (16, [("except", False)]),
        (18, [("finally", False)]),
        (19, [("if", True)]),
        (23, [("if", False), ("if", True)]),
        (26, [("if", False)]),
        (99, []),
    ],
)
def test_a_line_knows_its_conditions(line: int, guards: list[tuple[str, bool]]) -> None:
    """Innermost first, and no further than its function: who calls it has lines of its own."""
    assert [(guard.kind, guard.is_rank_test) for guard in Book(_TEXT).guards_at(line)] == guards


def test_an_except_knows_its_try() -> None:
    """So that the body and the finally of one try are known to belong together."""
    book = Book(_TEXT)
    assert {book.guards_at(line)[0].opened for line in (14, 16, 18)} == {13}


@given(text=st.text(), line=st.integers(-3, 50))
def test_any_text_is_read(text: str, line: int) -> None:
    """What is no Python has no conditions, and breaks nothing."""
    assert isinstance(Book(text).guards_at(line), tuple)
