"""What all attempts of one launch share."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from rankwise.base.clock import Clock
    from rankwise.base.events import EventLog
    from rankwise.launcher.console import Console
    from rankwise.launcher.entry_check import EntryCheck
    from rankwise.launcher.host_check import HostCheck
    from rankwise.launcher.rendezvous.assignment import Rendezvous
    from rankwise.launcher.signals import Signals
    from rankwise.launcher.spec import LaunchSpec, Logs
    from rankwise.launcher.timers import Timers
    from rankwise.launcher.warm_start import Host, WarmStart
    from rankwise.launcher.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One launch.

    Attributes:
        host: What this node has for it.
        folder: Where logs and error files of this run go.
        serial: Which job this is on workers that outlive it; None where they end with it.
        host_check: Asks the doctor about this host; None where nobody does.
        timers: Those that ranks set themselves; None where nobody has asked for them.
        check: Reads the script beside the first attempt; None for functions.
    """

    spec: LaunchSpec
    host: Host
    warm: WarmStart
    folder: Path
    rendezvous: Rendezvous
    workers: Workers
    signals: Signals
    console: Console
    clock: Clock
    events: EventLog
    serial: int | None = None
    host_check: HostCheck | None = None
    timers: Timers | None = None
    check: EntryCheck | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks on this node."""
        return self.host.num_ranks

    @property
    def passed_on(self) -> set[int]:
        """Signals that reach the ranks and end nothing."""
        return self.signals.passed_on


def make_folder(logs: Logs, run_id: str) -> Path:
    """Make the folder of this run: ``<log-dir>/<run id>_<random>``, or a temporary one.

    Raises:
        UsageError: The folder can't be made.
    """
    try:
        if logs.folder is None or logs.is_off:
            return Path(tempfile.mkdtemp(prefix="rankwise_", dir=find_temporary()))
        logs.folder.mkdir(parents=True, exist_ok=True)
        # A job's id may hold anything; a folder's name may not.
        name = re.sub(r"[^-.@+=\w]", "_", run_id)
        return Path(tempfile.mkdtemp(prefix=f"{name}_", dir=logs.folder.absolute()))
    except OSError as error:
        raise UsageError(
            f"can't make a folder for logs in {logs.folder or 'a temporary folder'}: {error.strerror}",
            hint="pass another one with --log-dir, or free some space",
        ) from error


def find_temporary() -> str | None:
    """Return where temporary folders go; in a container with a read-only disk that is shared memory."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        memory = "/dev/shm"
        return memory if os.access(memory, os.W_OK) else None
    return None


def drop_folder(logs: Logs, folder: Path) -> None:
    """Remove a temporary folder that nobody needs: after success, or with logs switched off."""
    if logs.folder is None or logs.is_off:
        shutil.rmtree(folder, ignore_errors=True)
