"""The conditions that a line of a script stands under."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rankwise.verdict.guards import guards_at

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
        (11, [("if", True)]),
        (14, [("try", False)]),
        (16, [("except", False)]),
        (18, [("finally", False)]),
        (19, [("if", True)]),
        (23, [("if", False), ("if", True)]),
        (26, [("if", False), ("if", True)]),
        (99, []),
    ],
)
def test_a_line_knows_its_conditions(line: int, guards: list[tuple[str, bool]]) -> None:
    """Innermost first, and no further than its function: who calls it has lines of its own."""
    assert [(guard.kind, guard.is_rank_test) for guard in guards_at(_TEXT, line)] == guards


def test_an_except_knows_its_try() -> None:
    """So that the body and the finally of one try are known to belong together."""
    assert {guards_at(_TEXT, line)[0].opened for line in (14, 16, 18)} == {13}


@pytest.mark.parametrize(
    ("text", "line", "is_rank_test"),
    [
        ("if step % 5 == 4 and rank == 0:\n    dist.barrier()", 2, True),
        ("if step % 2 == 0 and is_main(): print(m.compute())", 1, True),
        ("if rank == 0 and step and agreed(x):\n    pass", 1, True),
        ("if agreed(x) and rank == 0:\n    pass", 1, False),
        ("if not is_main():\n    return\ndist.barrier()", 3, True),
        ("if rank == -1:\n    return\ndist.barrier()", 3, False),
        ("if rank >= world:\n    raise ValueError\ndist.barrier()", 3, False),
        ("while rank == 0:\n    dist.barrier()", 2, True),
        ("match rank:\n    case 0:\n        dist.barrier()", 3, True),
        ("@main_only\ndef save():\n    dist.barrier()", 3, True),
        ("@rank_zero_first\ndef save():\n    dist.barrier()", 3, False),
        ("self.writes = rank == 0\nif self.writes:\n    dist.barrier()", 3, True),
        ("self.device = f'cuda:{rank}'\nif self.device:\n    dist.barrier()", 3, False),
    ],
)
def test_a_rank_test_is_known_in_all_its_forms(text: str, line: int, is_rank_test: bool) -> None:
    """Also beside the number of the step, as a way out before the line, around a loop, and in a decorator's name."""
    assert any(guard.is_rank_test for guard in guards_at(text, line)) is is_rank_test


def test_what_each_rank_has_of_its_own_is_no_number_of_a_step() -> None:
    """A clock differs between ranks; a step does not."""
    asked = [
        guards_at(f"if {test}:\n    dist.barrier()", 2)[0].is_own_test
        for test in ("time.monotonic() > end", "step % 7 == 6")
    ]
    assert asked == [True, False]


@given(text=st.text(), line=st.integers(-3, 50))
def test_any_text_is_read(text: str, line: int) -> None:
    """What is no Python has no conditions, and breaks nothing."""
    assert isinstance(guards_at(text, line), tuple)
