"""A plan of memory as text: a row for each way to spread the model, from the cheapest to the dearest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.base import terminal
from rankwise.base.terminal import clean_text
from rankwise.doctor.units import align, format_bytes, format_count
from rankwise.lint.reporters.text_form import paint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_HEADS = ["", "composition", "weights", "gradients", "optimizer", "communication", "activations", "total", ""]
_BF16_PARAMS = "bf16-params"


def render(body: Mapping[str, Any], optimizer: str) -> str:
    """Return a plan, as ``Plan.as_json`` gives it, as lines: as wide as the terminal, if there is one."""
    color, columns = terminal.has_colour(1), terminal.width(1)
    return "\n".join(
        paint(terminal.wrap(clean_text(line), columns), "bold", color=color and is_bold)
        for line, is_bold in _write(body, optimizer, columns)
    )


def _write(body: Mapping[str, Any], optimizer: str, columns: int | None) -> Iterator[tuple[str, bool]]:
    """Yield lines, and whether they are bold."""
    yield _tell_model(body, optimizer), False
    yield _tell_memory(body), False
    found: Sequence[Mapping[str, Any]] = body["compositions"]
    chosen = None if body["proposal"] is None else found[body["proposal"]]
    first = found[0]["precision"]
    # What would do with narrower weights is of interest only where nothing does with wide ones.
    shown = [one for one in found if chosen is None or one["precision"] in {first, chosen["precision"]}]
    for precision in dict.fromkeys(one["precision"] for one in shown):
        yield "", False
        yield _tell_precision(precision), True
        yield from _write_table([one for one in shown if one["precision"] == precision], chosen, columns)
    yield "", False
    yield f"{body['why']}.", False
    yield from ((f"Note: {one}.", False) for one in body["notes"])
    if len(shown) < len(found):
        yield f"{len(found) - len(shown)} more, with weights in bf16: --precision {_BF16_PARAMS}.", False


def _write_table(
    found: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any] | None, columns: int | None
) -> Iterator[tuple[str, bool]]:
    """Yield the rows; where the terminal is too narrow for them, the parts of each below its total."""
    rows = [_make_row(one, chosen) for one in found]
    head, *lines = align([_HEADS, *rows], right={2, 3, 4, 5, 6, 7})
    if columns is None or max(map(len, lines)) <= columns:
        yield head, False
        yield from ((line, one is chosen) for one, line in zip(found, lines, strict=True))
        return
    lines = align([(*row[:2], *row[-2:]) for row in rows], right={2})
    for one, line, row in zip(found, lines, rows, strict=True):
        yield line, one is chosen
        yield "      " + ", ".join(map(" ".join, zip(_HEADS[2:-2], row[2:-2], strict=True))), False


def _tell_model(body: Mapping[str, Any], optimizer: str) -> str:
    count, trained, blocks = body["num_parameters"], body["num_trained"], body["blocks"]
    frozen = "" if trained == count else f", {trained:,} of them trained"
    within = (
        f"{format_count(len(blocks), 'block')} ({blocks[0]}{' … ' + blocks[-1] if len(blocks) > 1 else ''})"
        if blocks
        else "no blocks"
    )
    return f"{body['model']}: {count:,} parameters{frozen}; {within}; optimizer {optimizer}"


def _tell_memory(body: Mapping[str, Any]) -> str:
    ranks, memory, reserve = (
        format_count(body["num_ranks"], "rank"),
        body["memory_bytes"],
        body["reserve_bytes"],
    )
    return f"{ranks}{'' if body['num_ranks'] == 1 else ', each'} with {format_bytes(memory)}; {format_bytes(reserve)} of it in reserve, {format_bytes(memory - reserve)} free"


def _tell_precision(precision: str) -> str:
    return {
        "fp32": "fp32: weights and compute",
        "bf16": "bf16: weights in fp32, compute in bf16",
        "fp16": "fp16: weights in fp32, compute in fp16",
        _BF16_PARAMS: "bf16-params: weights, gradients and states in bf16",
    }[precision]


def _make_row(one: Mapping[str, Any], chosen: Mapping[str, Any] | None) -> list[str]:
    memory = one["memory"]
    sizes = [
        memory["parameters"] + memory["buffers"],
        memory["gradients"],
        memory["optimizer"],
        memory["communication"],
        memory["activations"],
        memory["total"],
    ]
    name = one["name"] + (" + checkpointing" if one["checkpointing"] else "")
    verdict = "too much" if not one["fits"] else "may fit" if memory["activations"] is None else "fits"
    return [
        "->" if one is chosen else "",
        name,
        *("?" if size is None else format_bytes(size) for size in sizes),
        verdict,
    ]
