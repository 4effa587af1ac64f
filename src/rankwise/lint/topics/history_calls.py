"""What ranks do together in a script, whichever way it got there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.topics.job_view import ops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.history import Op
    from rankwise.lint.script import Script


def together(script: Script) -> Iterator[Op]:
    """All that the imagined ranks do together, each place once for each entry."""
    for entry in script.entries:
        seen: set[int] = set()
        for history in entry.histories:
            for op in ops(history.items):
                if id(op.call.node) not in seen:
                    seen.add(id(op.call.node))
                    yield op
