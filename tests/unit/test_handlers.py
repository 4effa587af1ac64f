"""What a script does about an exception that torch raises in one of its lines: whether it ends by it, or goes on."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given, strategies as st

from rankwise.verdict.handlers import goes_on, leaves_its_loop

#: Each has a line ``wait()`` that raises; a line ``main()`` or ``train()`` at the end calls the function that it is in.
GOES_ON = {
    "leaves its loop": """
        for step in range(9):
            try: wait()
            except RuntimeError: print("peer has left"); break
        save()
    """,
    "skips a turn": """
        for step in range(9):
            try:
                wait()
            except Exception:
                continue
    """,
    "falls into the next turn": """
        while True:
            try:
                wait()
            except (KeyError, dist.DistBackendError) as error:
                log(error)
    """,
    "notes it by a method that ends nothing": """
        for step in range(9):
            try: wait()
            except RuntimeError: stats.fail("no peer")
    """,
    "works on behind it": """
        try:
            wait()
        except RuntimeError:
            pass
        torch.save(model, "model.pt")
    """,
    "ends with 0 by its own order": """
        try:
            wait()
        except RuntimeError:
            sys.exit(0)
    """,
    "suppresses it": """
        with contextlib.suppress(RuntimeError):
            wait()
        evaluate()
    """,
    "a caller goes on": """
        def train():
            try:
                wait()
            except RuntimeError:
                return
        def main():
            train()
            evaluate()
        main()
    """,
    "a caller catches it in a loop": """
        def train():
            wait()
        def main():
            for attempt in range(3):
                try:
                    train()
                    break
                except RuntimeError:
                    print("again")
        main()
    """,
    "a caller catches what is raised instead": """
        def train():
            try:
                wait()
            except RuntimeError as error:
                raise PeerLeft from error
        while True:
            try:
                train()
            except PeerLeft:
                break
    """,
    "a name for many classes": """
        for step in range(9):
            try:
                wait()
            except GONE:
                break
    """,
}
ENDS = {
    "nobody catches it": """
        for step in range(9):
            wait()
    """,
    "a finally": """
        def main():
            try:
                wait()
            finally:
                dist.destroy_process_group()
        main()
    """,
    "logs and exits": """
        def main():
            for step in range(9):
                wait()
        if __name__ == "__main__":
            try:
                main()
            except Exception as error:
                traceback.print_exc()
                sys.exit(1)
    """,
    "logs and is through": """
        def main():
            for step in range(9):
                wait()
            return 0
        try:
            main()
        except Exception as error:
            logger.error("failed: %s", error)
        finally:
            dist.destroy_process_group()
        print("bye")
    """,
    "logs and raises": """
        for step in range(9):
            try:
                wait()
            except Exception:
                logger.exception("step failed")
                raise
    """,
    "another class": """
        for step in range(9):
            try:
                wait()
            except (KeyError, torch.cuda.OutOfMemoryError):
                continue
    """,
    "asks for other words": """
        for step in range(9):
            try:
                wait()
            except RuntimeError as error:
                if "out of memory" in str(error):
                    continue
                raise
    """,
    "beside the try": """
        for step in range(9):
            try:
                load()
            except RuntimeError:
                continue
            else:
                wait()
    """,
}


def _to_stack(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the text by its path, and the lines that lead to ``wait()``, innermost first."""
    text = textwrap.dedent(text)
    lines = text.splitlines()
    calls = [
        next(n for n, line in enumerate(lines, 1) if word in line and "def " not in line)
        for word in ("wait()", "train()", "main()")
        if any(word in line and "def " not in line for line in lines)
    ]
    return {"/job/train.py": text}, [f"/job/train.py:{line}" for line in calls]


@pytest.mark.parametrize("name", GOES_ON)
def test_a_script_goes_on(name: str) -> None:
    """A handler that leaves a loop, goes on in one, or has work behind it ends no rank."""
    assert goes_on(*_to_stack(GOES_ON[name]))


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_by_it(name: str) -> None:
    """Raised again, not meant by the handler, or only told: the rank ends by it."""
    assert not goes_on(*_to_stack(ENDS[name]))


def test_what_is_not_used_is_known_by_the_loop_that_is_left() -> None:
    """A handler that leaves the only loop uses nothing of what failed; one that goes on, or leaves an inner loop, may."""
    for name, is_left in {
        "leaves its loop": True,
        "skips a turn": False,
        "works on behind it": False,
    }.items():
        texts, sites = _to_stack(GOES_ON[name])
        assert leaves_its_loop(texts, sites[0]) == is_left, name
    inner = "for epoch in range(3):\n for step in range(9):\n  try: wait()\n  except Exception: break\n"
    assert not leaves_its_loop({"/job/train.py": inner}, "/job/train.py:3")
    outer = "while True:\n for one in own:\n  pass\n else:\n  try: wait()\n  except Exception: break\n"
    assert leaves_its_loop({"/job/train.py": outer}, "/job/train.py:5"), "else belongs to the loop outside"
    assert not leaves_its_loop({}, None)


@given(text=st.text(max_size=60), line=st.integers(min_value=0, max_value=9))
def test_any_text_has_an_answer(text: str, line: int) -> None:
    """What is no Python, and lines that are not there, have no handler."""
    assert goes_on({"a": "x = (" + text}, [f"a:{line}", "b:1", "a"]) is False
