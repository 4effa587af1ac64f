"""Launcher, Python and script are in the wrong order, or a file is given instead of a module's name.

**Why it breaks.** `torchrun python train.py` looks for a script called `python`; `python train.py -m
torch.distributed.launch` runs the script once and passes it the launcher as arguments; `-m train.py` looks for a module
`py` in a package `train`.

Bad:

```bash
torchrun --nproc_per_node=2 python train.py
```

Good:

```bash
torchrun --nproc_per_node=2 train.py
```

Bad:

```bash
torchrun --nproc_per_node=2 -m tools/train.py
```

Good:

```bash
torchrun --nproc_per_node=2 -m tools.train
```

**When it says nothing.** `--no-python`, which runs any program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.flags import LAUNCHER_ONLY
from rankwise.lint.shell.launches import base_name
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch

_PROGRAMS = {"python", "python3", "torchrun", "accelerate", "deepspeed", "srun", "mpirun", "rankwise"}


_NO_MODULES = {
    "torchrun",
    "torch.distributed",
    "torch.distributed.torchrun",
    "distributed.launch",
    "torch.launch",
}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        script = launch.script
        if script is None or launch.flag("no_python"):
            continue
        text = script.text or ""
        if launch.flag("module") and text.endswith(".py"):
            module = text[:-3].removeprefix("./").replace("/", ".")
            message = f"-m takes a module's name, and {text} is a file"
            yield shell.finding(RULE, script.span, message, f"-m {module}, or remove -m")
        elif base_name(script) in _PROGRAMS and launch.launcher != "python":
            message = f"{launch.label} runs {text!r} as the script"
            yield shell.finding(RULE, script.span, message, _without(launch, text))
        elif text.partition("=")[0].lstrip("-").replace("-", "_") in LAUNCHER_ONLY and launch.is_elastic:
            message = f"{launch.label} runs {text!r} as the script: the dashes are missing"
            yield shell.finding(RULE, script.span, message, f"write --{text.lstrip('-')}")
        elif launch.launcher == "python" and text in _NO_MODULES and launch.flag("module"):
            message = f"{text} can't be run as a module"
            yield shell.finding(
                RULE, script.span, message, "write torchrun, or python -m torch.distributed.run"
            )
        else:
            yield from _behind(shell, launch)


def _without(launch: Launch, text: str) -> str:
    if text.startswith("python"):
        return f"remove {text}: {launch.label} starts Python itself; --no-python is for other programs"
    return "keep one of the two launchers"


def _behind(shell: Shell, launch: Launch) -> Iterator[Finding]:
    for first, second in zip(launch.args, launch.args[1:], strict=False):
        module = second.text or ""
        if first.text == "-m" and module.startswith(
            ("torch.distributed.", "accelerate.commands", "rankwise.run")
        ):
            script = launch.script.raw if launch.script else ""
            message = f"-m {module} comes after {script}, so {script} runs once and gets it as an argument"
            yield shell.finding(RULE, first.span, message, f"torchrun [flags] {script}")


RULE: Rule[Shell] = Rule(
    id="RW704",
    name="launcher-and-script-mixed",
    severity="error",
    classes=("L4",),
    summary="launcher, Python and script in the wrong order, or a file given as a module",
    looks_at="shell",
    check=_check,
)
