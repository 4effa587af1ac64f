"""Workers as plain children of ours, for systems without a supervisor (macOS, Windows).

What a rank itself started is reached through its process group only. That we are gone a rank sees by the end
of a pipe whose other end we hold.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, final

from rankwise.base.environ import environ
from rankwise.base.os_calls import IS_WINDOWS, KILL_SIGNAL
from rankwise.launcher.workers import Change, Command, Ended, NotStarted, Started

if TYPE_CHECKING:
    from rankwise.base.clock import Clock
    from rankwise.launcher.signals import Signals

_LOOK_EVERY_S = 0.02


@final
class DirectWorkers:
    """Starts processes itself and asks them, again and again, whether they still run."""

    def __init__(self, signals: Signals, clock: Clock) -> None:
        self._signals, self._clock = signals, clock
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._waiting: list[Change] = []
        self._lifeline, self._held = os.pipe()

    @property
    def supervisor_pid(self) -> int:
        return os.getpid()

    def warm_up(self, command: Command) -> bool:  # noqa: ARG002 - there is no such thing here
        return False

    def retire(self) -> None:
        """There is no server."""

    def start(self, tag: str, command: Command) -> None:
        env = environ() | {name: value for name, value in command.env.items() if value is not None}
        for name in (name for name, value in command.env.items() if value is None):
            env.pop(name, None)
        lifeline = _inheritable(self._lifeline)
        if "RANKWISE_RANK" in env:
            env["RANKWISE_RANK"] = json.dumps({**json.loads(env["RANKWISE_RANK"]), "lifeline": lifeline})
        else:
            env["RANKWISE_LIFELINE"] = str(lifeline)  # the store's process
        try:
            process = subprocess.Popen(
                command.argv, env=env, stdin=command.stdio[0], stdout=command.stdio[1], stderr=command.stdio[2],
                start_new_session=not IS_WINDOWS, close_fds=not IS_WINDOWS, pass_fds=() if IS_WINDOWS else [*(fd for _, fd in command.extra_fds), lifeline],
            )  # fmt: skip
        except OSError as error:
            self._waiting.append(NotStarted(tag=tag, error=f"{error.strerror}: {command.argv[0]}"))
            return
        self._processes[tag] = process
        self._waiting.append(Started(tag=tag, pid=process.pid))

    def wait_change(self, timeout_s: float) -> list[Change]:
        end = self._clock.monotonic() + timeout_s
        while True:
            for tag, process in list(self._processes.items()):
                code = process.poll()
                if code is not None:
                    del self._processes[tag]
                    self._waiting.append(Ended(tag=tag, code=code, at_s=self._clock.monotonic()))
            if self._waiting or self._signals.has_pending or self._clock.monotonic() >= end:
                found, self._waiting = self._waiting, []
                return found
            self._clock.sleep(min(_LOOK_EVERY_S, timeout_s))

    def signal(self, tag: str, number: int, *, tree: bool = False) -> None:
        process = self._processes.get(tag)
        if process is None:
            return
        try:
            if tree and not IS_WINDOWS:
                os.killpg(process.pid, number)
            elif IS_WINDOWS and number != getattr(signal, "CTRL_C_EVENT", None):
                process.terminate()
            else:
                process.send_signal(number)
        except ProcessLookupError:
            return

    def sweep(self, grace_s: float, *, session: int = 0) -> None:
        """Nothing to do: what is not in a rank's process group can't be found here."""

    def leave(self) -> int:
        self.close()
        return 0

    def close(self) -> None:
        for tag in list(self._processes):
            self.signal(tag, KILL_SIGNAL, tree=True)
        for process in self._processes.values():
            process.wait(timeout=10)
        self._processes.clear()


def _inheritable(fd: int) -> int:
    """Return the number by which a child finds a descriptor of ours: on Windows it is a handle's."""
    if not IS_WINDOWS:
        return fd
    import msvcrt  # noqa: PLC0415 - Windows only

    handle = msvcrt.get_osfhandle(fd)  # type: ignore[attr-defined]
    os.set_handle_inheritable(handle, True)  # type: ignore[attr-defined] # noqa: FBT003 - its only form
    return int(handle)
