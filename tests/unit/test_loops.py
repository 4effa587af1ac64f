"""Ways in which one rank alone skips a step or leaves a loop, as the script's text shows them, and what the verdict makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from rankwise.evidence.reader.notes import Stack
from rankwise.verdict.loops import find_swallows, find_ways_out
from rankwise.verdict.run_rules import look
from rankwise.verdict.source_text import are_alternatives, find_function
from scenes import elsewhere, gradient, in_backward, in_call, op, rank, scene, stack


def _find(*body: str, head: str = "for batch in loader:", tail: str = "") -> list[tuple[str, int]]:
    """Return the ways out of a loop that has the lines from 2 on, and its backward pass in the last one."""
    text = "\n".join([head, *(f"    {line}" for line in body), "    loss.backward()", tail])
    return [(way.reason, way.line) for way in find_ways_out(text, len(body) + 2)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (("loss = f(batch)", "if torch.isnan(loss):", "    continue"), "not finite"),
        (
            ("loss = f(batch)", "if not math.isfinite(loss.item()):", "    log()", "    continue"),
            "not finite",
        ),
        (("try:", "    loss = f(batch)", "except RuntimeError:", "    free()", "    continue"), "exception"),
        (("if batch is None:", "    continue"), "empty"),
        (("if len(batch) == 0:", "    continue"), "empty"),
        (("x, y = batch", "if not x.numel():", "    continue"), "empty"),
        (("if not batch: continue",), "empty"),
        (("loss = f(batch)", "if loss is None: continue"), "no loss"),
        (("if val_loss > best_loss:", "    break"), "stop"),
        (("if stop(val): break",), "stop"),
        (("if stopper.early_stop:", "    break"), "stop"),
        (("if epochs_no_improve >= patience:", "    return"), "stop"),
        (("if rank == 1 and step == 2:", "    break"), "stop"),
        (("if r == 1: break",), "stop"),
        (("if rank == 1 and step == 2:", "    continue"), "own"),
        (("if batch.abs().max() > 5:", "    continue"), "own"),
        (("long = [x for x in batch if len(x) > 9]", "if long: continue"), "own"),
        (("if time.time() - start > limit:", "    return"), "own"),
    ],
)
def test_what_one_rank_may_do_alone_is_found(body: tuple[str, ...], reason: str) -> None:
    """A continue before the backward pass, or a break, for something that is a rank's own."""
    found = _find(*body, tail="r = dist.get_rank()")
    assert [one for one, _ in found] == [reason]


@pytest.mark.parametrize(
    "body",
    [
        ("if step % accumulate:", "    continue"),
        ("if step >= max_steps:", "    break"),
        ("bad = torch.isnan(loss)", "dist.all_reduce(bad)", "if bad:", "    continue"),
        ("stop = agree(early)", "if stop:", "    break"),
        ("for x in batch:", "    if x is None:", "        continue"),
        ("try:", "    f(batch)", "except ValueError:", "    log()"),
        ("if other is None:", "    continue"),
        ("step += 1", "lr = schedule(step)", "if lr < 1e-6:", "    continue"),
    ],
)
def test_what_all_ranks_do_together_is_no_way_out(body: tuple[str, ...]) -> None:
    """Counting steps, a flag that all have agreed on, another loop inside, an except that goes on."""
    assert _find(*body) == []


def test_what_comes_after_the_backward_pass_skips_nothing() -> None:
    """Nor does what stands in no loop, or in a file that can't be read."""
    text = "for batch in loader:\n    loss.backward()\n    if torch.isnan(loss):\n        continue\n"
    assert find_ways_out(text, 2) == ()
    assert find_ways_out("if batch is None:\n    pass\nloss.backward()\n", 3) == ()
    assert find_ways_out("for :", 1) == ()


_SKIPS = "for b in loader:\n    if torch.isnan(loss):\n        continue\n    loss.backward()\nsleep()\ndist.barrier()\n"
_STOPS = "for b in loader:\n    loss.backward()\n    if bad > patience:\n        break\nsleep()\ndist.barrier()\n"
_BOTH = "for b in loader:\n    if torch.isnan(loss): continue\n    if bad > patience: break\n    loss.backward()\nsleep()\ndist.barrier()\n"
_OWN = "for step, b in enumerate(loader):\n    if b.sum() > 5: continue\n    loss.backward()\nsleep()\ndist.barrier()\n"
_FILTERS = "for b in DataLoader(d, collate_fn=keep):\n    if not b:\n        continue\n    loss.backward()\nsleep()\ndist.barrier()\n"


@pytest.mark.parametrize(
    ("text", "at", "class_id", "line"),
    [
        (_SKIPS, 4, "D15", 3),
        (_STOPS, 2, "D16", 4),
        (_FILTERS, 4, "X10", 3),
        (_OWN, 3, "D15", 2),
        (_BOTH, 4, "D14", 1),
        ("", 4, "D14", 4),
    ],
)
def test_the_script_tells_why_a_rank_made_fewer_steps(text: str, at: int, class_id: str, line: int) -> None:
    """The rank has left the loop: waiting for it, and meeting its barrier. The place is the line that it took; where two are possible, the loop."""
    waits = rank(0, gradient(at), gradient(at, is_over=False), at=in_backward(at))
    facts: dict[str, Any] = {"sources": {"/job/train.py": text}}
    gone = look(scene(waits, rank(1, gradient(at), at=elsewhere(5)), **facts))[0]
    met = rank(1, gradient(at), op("barrier", at=6, is_over=False), at=in_call("barrier", 6))
    met_sight = look(scene(waits, met, **facts))[0]
    for finding in (gone, met_sight):
        assert finding.class_id == class_id, finding
        assert f"train.py:{line}" in finding.fix
        assert not text or finding.where == f"/job/train.py:{line}"


def test_who_is_still_in_the_loop_has_not_left_it() -> None:
    """Rank 1 stands still in the loop: the continue there is beside the matter, and it has not run out of batches."""
    waits = rank(0, gradient(4), gradient(4, is_over=False), at=in_backward(4))
    inside = rank(1, gradient(4), at=elsewhere(2))
    finding = look(scene(waits, inside, sources={"/job/train.py": _SKIPS}))[0]
    assert (finding.rule, finding.class_id) == ("kept_waiting", None)


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("try:", "except RuntimeError:\n    log()", [3]),
        ("try:", "except RuntimeError as error:\n    if fatal(error):\n        raise\n    log()", [3]),
        (
            "try:",
            "except RuntimeError as error:\n    if 'out of memory' in str(error):\n        free()\n    else:\n        raise",
            [3],
        ),
        ("try:", "except Exception:\n    break", [3]),
        ("with contextlib.suppress(OSError):", "", [1]),
        ("try:", "except Exception:\n    log()\n    raise", []),
        ("try:", "except Exception:\n    if bad:\n        raise\n    else:\n        sys.exit(1)", []),
        ("try:", "except Exception:\n    if retry:\n        continue\n    raise", []),
        (
            "try:",
            "except Exception:\n    if oom:\n        if retry:\n            continue\n        raise\n    else:\n        raise",
            [],
        ),
        ("try:", "except Exception:\n    test.fail()", []),
        ("try:", "except KeyboardInterrupt:\n    log()", []),
        ("try:", "finally:\n    log()", []),
        ("with torch.no_grad():", "", []),
    ],
)
def test_what_takes_an_exception_and_goes_on_is_found(before: str, after: str, lines: list[int]) -> None:
    """An except that does not raise on all its ways, or suppress; what ends the rank, or ends it by Ctrl-C, swallows nothing."""
    assert [way.line for way in find_swallows(f"{before}\n    step()\n{after}\n", 2)] == lines
    assert find_swallows("try:", 2) == ()


_SWALLOWS = """def one(batch):
    try:
        model(batch).backward()
    except RuntimeError:
        log()
try:
    for b in loader:
        one(b)
finally:
    dist.barrier()
"""
_LOGS = """try:
    for b in loader:
        model(b).backward()
    dist.barrier()
except Exception:
    log()
"""


def test_an_except_that_throws_a_step_away_is_told_before_the_clean_up_after_it() -> None:
    """Rank 1 came to the finally with a step less; only the except in the loop explains that."""
    inner = in_backward(3).frames[:-1]
    at = Stack(frames=(*inner, *stack(at=3).frames, *stack(at=8).frames))
    waits = rank(0, gradient(3), gradient(3, is_over=False), at=at)
    met = rank(1, gradient(3), op("barrier", at=10, is_over=False), at=in_call("barrier", 10))
    finding = look(scene(waits, met, sources={"/job/train.py": _SWALLOWS}))[0]
    assert (finding.rule, finding.class_id) == ("mispaired_gradients", "D15")
    assert "the except at train.py:4 throws away a step" in finding.fix


def test_an_except_around_the_whole_script_throws_no_step_away() -> None:
    """Whoever had fewer batches is still inside its block."""
    waits = rank(0, gradient(3), gradient(3, is_over=False), at=in_backward(3))
    met = rank(1, gradient(3), op("barrier", at=4, is_over=False), at=in_call("barrier", 4))
    finding = look(scene(waits, met, sources={"/job/train.py": _LOGS}))[0]
    assert (finding.rule, finding.class_id) == ("mispaired_gradients", "D14")


_REDUCES = (
    "for x in xs:\n    try:\n        dist.all_reduce(load(x))\n    except OSError:\n        continue\ndist.barrier()\n"
)
_COUNTS = "for x in xs:\n    if len(x) < 3: break\n    dist.all_reduce(one)\ndist.barrier()\n"


@pytest.mark.parametrize(("text", "class_id", "line"), [(_REDUCES, "D15", 4), (_COUNTS, "D16", 2), ("", "C8", None)])
def test_who_has_left_the_loop_of_another_collective_is_named(text: str, class_id: str, line: int | None) -> None:
    """Rank 0 is in the loop's all_reduce, rank 1 at the barrier behind it: the way out that the script shows is its own."""
    inside = rank(0, op(at=3), op(at=3, is_over=False), at=in_call("all_reduce", 3))
    gone = rank(1, op(at=3), op("barrier", at=6, is_over=False), at=in_call("barrier", 6))
    finding = look(scene(inside, gone, sources={"/job/train.py": text}))[0]
    assert (finding.rule, finding.class_id) == ("other_op", class_id)
    assert line is None or (finding.culprits, finding.where) == ((1,), f"/job/train.py:{line}")


def test_lines_of_one_function_are_known_after_many_other_files() -> None:
    """A script that was read long ago is parsed again: what is one function, and what are two arms of one condition, stays so."""
    text = "def step():\n    if first:\n        a()\n    else:\n        b()\n"
    one = find_function(text, 3)
    for number in range(40):
        assert find_function(f"x = {number}\n", 1) is None
    assert are_alternatives(text, 3, 5)
    two = find_function(text, 5)
    assert one is not None
    assert two is not None
    assert one.lineno == two.lineno
    assert not are_alternatives(text, 3, 4)


def test_a_lambda_stands_in_the_loop_that_passes_it_on() -> None:
    """A closure of an optimizer is called in the same turn."""
    text = "for batch in loader:\n    if not batch: continue\n    optimizer.step(lambda: model(batch))\n"
    assert [(way.reason, way.line) for way in find_ways_out(text, 3)] == [("empty", 2)]
