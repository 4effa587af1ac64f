"""Which exit of the script's text a rank can have left by."""

from __future__ import annotations

import pytest

from rankwise.verdict.exit_calls import find_exit_call, find_exit_words


@pytest.mark.parametrize(
    ("line", "code", "is_found"),
    [
        ("sys.exit(3)", 3, True),
        ("sys.exit(3)", 0, False),
        ("os._exit(0)", 0, True),
        ("quit()", 0, True),
        ("raise SystemExit", 0, True),
        ("raise SystemExit(4)", 4, True),
        ("pygame.quit()", 0, False),
        ("parser.exit()", 0, False),
        ("sys.exit(code)", 3, False),
    ],
)
def test_what_ends_the_process_with_a_code(line: str, code: int, *, is_found: bool) -> None:
    """Calls of that name that end something else, and codes that are not known, are none."""
    text = f"if rank == 0:\n    {line}\n"
    assert find_exit_call({"train.py": text}, code) == ("train.py:2" if is_found else None)


def test_an_exit_that_every_rank_comes_to_or_one_of_two_is_not_named() -> None:
    """Nobody can tell then by which one it has left."""
    assert find_exit_call({"a.py": "main()\nsys.exit(3)\n"}, 3) is None
    assert find_exit_call({"a.py": "if a:\n    sys.exit(3)\nif b:\n    sys.exit(3)\n"}, 3) is None
    assert find_exit_words({"a.py": "sys.exit('no data')\n"}, "no data") == "a.py:1"
    assert find_exit_words({"a.py": "sys.exit('no data')\n"}, "no disk") is None
