"""Findings made by hand, for tests of what is done with them."""

from __future__ import annotations

from rankwise.lint.finding import Edit, Finding, Span

SOURCE = """\
import torch.distributed as dist

if dist.get_rank() == 0:
\tprint("损失:", total, "梯度:", norm); dist.barrier()
dist.all_reduce(
    total,
    op=dist.ReduceOp.SUM,
)
x = 1,
"""


def finding(rule: str = "RW801", line: int = 9, col: int = 1, end: int = 7, **changes: object) -> Finding:
    """Return a finding with some words of its own."""
    facts: dict[str, object] = {
        "rule": rule,
        "failure_class": "",
        "severity": "error",
        "message": "`x` becomes a tuple",
        "fix": "take the comma away",
        "path": "train.py",
        "span": Span(line, col, line, end),
    }
    return Finding(**{**facts, **changes})  # type: ignore[arg-type]


def edit(line: int, col: int, end_col: int, text: str, end_line: int | None = None) -> Edit:
    return Edit(span=Span(line, col, end_line or line, end_col), text=text)


def examples() -> list[Finding]:
    """Return findings of all kinds in SOURCE and in a notebook."""
    return [
        finding(
            "RW199", 4, 36, 50, failure_class="C1", message="only rank 0 reaches `dist.barrier()`",
            fix="move it out of `if dist.get_rank() == 0`",
            also=(("the others go on to this line", "train.py", Span(5, 1, 8, 2)),),
        ),
        finding(edits=(edit(9, 6, 7, ""),)),
        finding("RW699", 5, 1, 2, severity="warning", span=Span(5, 1, 8, 2), message="a sum, and nobody divides", fix="divide by `dist.get_world_size()`"),
        finding("RW805", 2, 3, 8, severity="hint", path="notes.ipynb", cell=3, message="50% of the time: a, b\nand c", fix=""),
    ]  # fmt: skip


def lines_of(path: str, cell: int | None) -> list[str]:
    """Return the lines of the files that `examples` speak of."""
    return SOURCE.split("\n") if path == "train.py" else ["import torch", "x = torch.ones(2)"] if cell == 3 else []
