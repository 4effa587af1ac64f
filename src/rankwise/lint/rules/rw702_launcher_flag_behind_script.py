"""A launcher's flag comes after the script, so the script gets it and not the launcher.

**Why it breaks.** Everything after the script's name belongs to the script. `torchrun train.py --nproc_per_node=4`
silently starts one process, and trains on one GPU for days; or the script fails with `unrecognized arguments`.

Bad:

```bash
torchrun train.py --nproc_per_node=4
```

Good:

```bash
torchrun --nproc_per_node=4 train.py
```

**When it says nothing.** The launcher has the flag too, the script can be read and defines it, or `--` before the
script says that it is intended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.flags import late_flags
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        if launch.script is None or launch.is_ended or _starts_ranks_itself(launch):
            continue
        yield from _late(shell, launch)


def _starts_ranks_itself(launch: Launch) -> bool:
    """Whether what Python runs may be a launcher: a module, or a script of that name."""
    text = (launch.script.text or "launch") if launch.script else ""
    return launch.launcher == "python" and (launch.flag("module") is not None or "launch" in text)


def _late(shell: Shell, launch: Launch) -> Iterator[Finding]:
    own = late_flags(launch.launcher)
    if any((word.text or "").startswith("torch.distributed") for word in launch.args):
        return  # a launcher after the script is another mistake
    for word in launch.args:
        spelled = word.head.partition("=")[0]
        name = spelled.lstrip("-").replace("-", "_")
        if not spelled.startswith("--") or name not in own or launch.flag(name):
            continue
        known = shell.knows(launch, name)
        if known:
            continue
        script = launch.script.raw if launch.script else "the script"
        if launch.launcher == "python":
            message = f"{spelled} is a launcher's flag, but python passes it to {script}: one process starts"
            fix = f"torchrun {word.raw} … {script}"
            yield shell.finding(
                RULE, word.span, message, fix, severity="error" if known is False else "warning"
            )
        else:
            message = f"{spelled} comes after {script}, so {script} gets it and {launch.label} does not"
            yield shell.finding(RULE, word.span, message, f"put it before {script}")
        return


RULE: Rule[Shell] = Rule(
    id="RW702",
    name="launcher-flag-behind-script",
    severity="error",
    classes=("L3",),
    summary="a launcher's flag after the script goes to the script",
    looks_at="shell",
    check=_check,
)
