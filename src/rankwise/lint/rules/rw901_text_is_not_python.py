"""This is not Python, so nothing in it can run or be checked.

**Why it breaks.** Every rank fails with `SyntaxError` before its first line. Usually the text was pasted: from a page
that made quotes typographic, from a console with its prompts, from Python 2, or from a Chinese text with full-width
brackets.

Bad:

```python
import torch
print “rank”, torch.distributed.get_rank()
```

Good:

```python
import torch

print("torch", torch.__version__)
```

**When it says nothing.** A code block of a page that is output, a diff, or has placeholders; IPython's own lines in a
notebook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import Finding, Span
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.lint.inputs.unparsed import Unparsed
    from rankwise.lint.script import Script


def _check(_script: Script) -> Iterable[Finding]:
    # A script that could be studied is Python; the check asks `tell` about the others.
    return ()


RULE: Rule[Script] = Rule(
    id="RW901",
    name="text-is-not-python",
    severity="error",
    classes=(),
    summary="this can't be parsed as Python, so no rank can start it",
    check=_check,
)


def tell(path: str, unparsed: Unparsed) -> Finding:
    """The one finding on a file that can't be parsed.

    Args:
        path: The file as the user named it.
        unparsed: Where and why.
    """
    return Finding(
        rule=RULE.id,
        failure_class="",
        severity="warning" if unparsed.is_newer else RULE.severity,
        message=f"this can't be parsed: {unparsed.why}",
        fix=unparsed.fix,
        path=path,
        span=Span(unparsed.line, unparsed.col, unparsed.line, unparsed.col + 1),
    )
