"""The script's check beside the start of its ranks: a process of its own, whose words are shown if they come in time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base import terminal
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import is_on
from rankwise.base.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launcher.console import Console
    from rankwise.launcher.spec import LaunchSpec

#: What comes later than this would stand in the midst of the training's own output.
_LATE_S = 10.0
#: Who waits for the end of a run that has failed is not kept for longer.
_AFTER_FAILURE_S, _LOOK_EVERY_S = 2.0, 0.05
#: Isolated: a module of the user's, beside the script or in the current folder, is not to be imported.
_CODE = (
    "import sys; sys.path.append(sys.argv[1]); from rankwise.lint.running.entry import main; "
    "sys.exit(main(sys.argv[2], color=sys.argv[3] == '1', columns=int(sys.argv[4]) or None))"
)


@final
class EntryCheck:
    """The check of one launch's script."""

    def __init__(self, spec: LaunchSpec, console: Console) -> None:
        self._spec, self._script, self._console = spec, spec.program.script, console
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None
        self._num_errors = 0

    def start(self) -> None:
        """Start it, once; where there is no script to read, or no process to be had, there is no check."""
        spec, console = self._spec, self._console
        if self._child is not None or not may_check(spec):
            return
        if spec.strict and not is_on("RANKWISE_CHECK", default=True):
            console.say(
                "rankwise: note: RANKWISE_CHECK=0 is ignored, as --strict asks for the check; --no-check skips it"
            )
        home = str(Path(__file__).parents[2])
        color, columns = terminal.has_colour(2), terminal.width(2)
        words = ["-I", "-c", _CODE, home, self._script, str(int(color)), str(columns or 0)]
        try:
            self._child = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
            )
        except OSError:
            return
        self._thread = threading.Thread(target=self._tell, args=(self._child,), daemon=True)
        self._thread.start()

    def refuse_errors(self) -> None:
        """Wait for the check's end.

        Raises:
            LaunchError: It has found errors.
        """
        if self._thread is not None:
            self._thread.join(_LATE_S)
        if self._num_errors:
            raise LaunchError(
                f"the check found errors in {self._script}, so --strict does not start it",
                hint="fix them, silence them with `# noqa`, or use --no-check",
            )

    def wait(self, is_called: Callable[[], bool]) -> None:
        """Let it come to its end beside a run that has failed, perhaps sooner than it could say why; ``is_called``: somebody wants us to end."""
        end_s = SYSTEM_CLOCK.monotonic() + _AFTER_FAILURE_S
        while (
            self._thread is not None
            and self._thread.is_alive()
            and SYSTEM_CLOCK.monotonic() < end_s
            and not is_called()
        ):
            self._thread.join(_LOOK_EVERY_S)

    def close(self) -> None:
        """End it, if it is still at work."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
        if self._thread is not None:
            self._thread.join(1.0)

    def _tell(self, child: subprocess.Popen[str]) -> None:
        try:
            text, _ = child.communicate(timeout=_LATE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            return
        if child.returncode > 0 and text:
            self._num_errors = child.returncode
            self._console.say(f"rankwise: errors in {self._script} (`--no-check` skips this):\n\n{text.rstrip()}\n")


def may_check(spec: LaunchSpec) -> bool:
    """Whether there is a script that can be read: on the first node only, as all have the same."""
    program = spec.program
    is_script = program.how in {"script", "run_path"} and program.script.endswith(".py")
    return spec.check and is_script and spec.node_rank == 0 and Path(program.script).is_file()
