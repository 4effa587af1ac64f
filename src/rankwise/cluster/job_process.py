"""The process that holds a job where no scheduler does: it starts the nodes, writes one log for all of them, and starts them again after exit code 75."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.files import write_atomic
from rankwise.base.os_calls import try_lock_file
from rankwise.base.requeue import REQUEUE
from rankwise.base.ssh import SSH_FAILED
from rankwise.cluster.launch_command import RANK_LINE
from rankwise.cluster.node_process import ALIVE, ALIVE_EVERY_S, KILL, NOTICE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from io import RawIOBase

    from rankwise.cluster.cluster import Phase

LOG, STATE, LOCK, CANCEL, PLAN = "log", "state.json", "lock", "cancel", "plan.json"
_LOOK_S = 0.1
#: A job that can't start does not keep its hosts busy with that.
_AGAIN_S = 1.0
#: Once a node has failed, the others learn it from each other; those that don't are ended after so long.
_OTHERS_S = 40.0
#: What a node's guard may take beyond the time that it gives to the ranks.
_GUARD_S = 10.0
_LONGEST_LINE = 1 << 16
#: So long the last state is tried to be written where the disk is full: without it the job counts as killed.
_FULL_DISK_S = 300.0
#: How the line of a launcher's report begins that names the rank which failed first.
_CAUSE = b"  first "
#: What it says on the nodes where no rank failed first: what another node has reported, or that one must have failed.
_ELSEWHERE = re.compile(r"on node \d+ \(|.*the first cause is on another node")


class Plan(TypedDict):
    """What is to be done for a job, as its file says it.

    The words of each node stand beside its name. ``client`` is the process that the job is to end with, or 0.
    """

    nodes: list[tuple[str, list[str]]]
    env: dict[str, str]
    min_nodes: int
    grace_s: int
    time_s: int
    requeue: int
    client: int


def decide_outcome(ends: Sequence[tuple[str, int | None]], min_nodes: int) -> tuple[int, str]:
    """Return a job's exit code and the reason for it; after the loss of a node it may start again.

    Args:
        ends: Names and exit codes of the nodes, in the order in which they ended; None: the node was lost.
        min_nodes: With how many nodes the job could go on.
    """
    bad = [(name, code) for name, code in ends if code != 0]
    cut_off = ", ".join(name for name, code in bad if code == SSH_FAILED)
    lost = ", ".join(name for name, code in bad if code is None)
    if len(ends) - len(bad) >= min_nodes:
        # A failure that concerned all of them would have ended all of them.
        return 0, f"without {', '.join(name for name, _ in bad)}" if bad else ""
    if any(code == REQUEUE for _, code in bad):
        return REQUEUE, f"the connection to {cut_off} was lost" if cut_off else ""
    if lost:
        return REQUEUE, f"{lost} was lost"  # what the others say is only that they have lost a peer
    for name, code in bad:
        if code not in {None, SSH_FAILED}:
            return code or 1, f"exit code {code}" + (f" on {name}" if len(ends) > 1 else "")
    return 1, f"the connection to {cut_off} was lost"


@final
class Log:
    """One file, which is not buffered, for the lines of all nodes; ``cause`` is which rank failed first, as the reports in it say."""

    def __init__(self, file: RawIOBase, *, names_nodes: bool) -> None:
        self._file = file
        self._lock, self._names_nodes, self.cause = threading.Lock(), names_nodes, ""

    def write(self, line: bytes, node: str = "") -> None:
        """Add a line; one of a launcher says which node it is from, if there are several."""
        text = line.rstrip(b"\r\n")
        is_ours = node and self._names_nodes and not RANK_LINE.match(text.decode("utf-8", "replace"))
        if text.startswith(_CAUSE) and (not self.cause or _ELSEWHERE.match(self.cause)):
            self.cause = text.removeprefix(_CAUSE).decode("utf-8", "replace").strip()
        with self._lock, suppress(OSError):  # a full disk stops no training
            self._file.write((f"[{node}]: ".encode() if is_ours else b"") + text + b"\n")

    def say(self, text: str) -> None:
        """Add a line of ours."""
        self.write(f"rankwise: {text}".encode())

    def close(self) -> None:
        """Close it."""
        self._file.close()


class _Node(Protocol):
    """What leads to the launcher of one node; ``find_end`` returns its exit code, in it None if it was lost, or None while it runs."""

    name: str

    def find_end(self) -> tuple[int | None] | None: ...
    def tell(self, words: bytes) -> None: ...
    def kill(self) -> None: ...


@final
class _ProcessNode:
    """One node: the process that leads to its launcher, and a thread that reads what comes from there."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log: Log) -> None:
        self.name, self._log = name, log
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.tell(json.dumps(env).encode() + b"\n")

    def tell(self, words: bytes) -> None:
        """Say something to its launcher's guard."""
        if self.process.stdin is not None:
            with suppress(OSError):  # it has ended: the next look sees it
                os.write(self.process.stdin.fileno(), words)

    def find_end(self) -> tuple[int | None] | None:
        """Return its exit code; None while it runs."""
        if self.process.poll() is None:
            return None
        self._reader.join(timeout=5.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not (stream is self.process.stdout and self._reader.is_alive()):
                with suppress(OSError):
                    stream.close()
        return (self.process.returncode,)

    def kill(self) -> None:
        """Give it up."""
        self.process.kill()

    def _read(self) -> None:
        stream = self.process.stdout
        while stream is not None and (line := stream.readline(_LONGEST_LINE)):
            self._log.write(line, self.name)


@final
class Start:
    """One start of all nodes: who lives, how the others have ended, and what was said to them when.

    Args:
        nodes: All of them.
        log: Of all of them.
        min_nodes: With how many the job can go on.
        grace_s: From the notice to the kill.
        time_s: How long it may run; 0: without limit.
    """

    def __init__(self, nodes: Sequence[_Node], log: Log, *, min_nodes: int, grace_s: int, time_s: int) -> None:
        log.cause = ""
        self._live, self._log, self._ends = list(nodes), log, list[tuple[str, int | None]]()
        self._min_nodes, self._grace_s, self._num_nodes = min_nodes, grace_s, len(nodes)
        self._time_s, self._end_s = time_s, SYSTEM_CLOCK.monotonic() + (time_s or float("inf"))
        self._failed_s = self._noticed_s = self._killed_s = float("inf")
        self._spoken_s = float("-inf")

    def run(self, look: Callable[[], tuple[bool, bool]]) -> tuple[int, str]:
        """Hold it until all nodes have ended; return the exit code and the reason for it.

        Args:
            look: Tells whether the nodes are to stop in time, and whether they are to end now.
        """
        now_s = SYSTEM_CLOCK.monotonic()
        while self._live:
            SYSTEM_CLOCK.sleep(_LOOK_S)
            now_s = SYSTEM_CLOCK.monotonic()
            self._collect(now_s)
            is_stopping, is_killed = look()
            self._speak(now_s, is_stopping=is_stopping or now_s > self._end_s, is_killed=is_killed)
        code, reason = decide_outcome(self._ends, self._min_nodes)
        if code and now_s > self._end_s:
            return code, f"time limit of {self._time_s} s"
        return code, ": ".join(filter(None, (reason, self._log.cause if code else "")))

    def _collect(self, now_s: float) -> None:
        """Take note of the nodes that have ended."""
        for node in list(self._live):
            if (end := node.find_end()) is not None:
                self._live.remove(node)
                # One that we have given up was not lost.
                is_ours = end == (None,) and now_s - self._killed_s > _GUARD_S
                self._ends.append((node.name, -signal.SIGKILL if is_ours else end[0]))
                if self._num_nodes - sum(code != 0 for _, code in self._ends) < self._min_nodes:
                    self._failed_s = min(self._failed_s, now_s)

    def _speak(self, now_s: float, *, is_stopping: bool, is_killed: bool) -> None:
        """Say to the nodes what is due: that we are here, that they are to stop, or to end now."""
        words = ALIVE if now_s - self._spoken_s > ALIVE_EVERY_S else b""
        if self._noticed_s == float("inf") and (is_stopping or now_s - self._failed_s > _OTHERS_S):
            words, self._noticed_s = NOTICE, now_s
        is_overdue = now_s - self._noticed_s > self._grace_s + _GUARD_S
        if self._killed_s == float("inf") and (is_killed or is_overdue):
            words, self._killed_s = KILL, now_s
        if words:
            self._spoken_s = now_s
        for node in self._live:
            if words:
                node.tell(words)
            if now_s - self._killed_s > _GUARD_S:
                node.kill()


def add_deadline(env: Mapping[str, str], time_s: int) -> dict[str, str]:
    """Return what the launchers find in their environment: with the moment at which the job's time is over, if it is limited."""
    deadline = {"RANKWISE_DEADLINE": str(int(SYSTEM_CLOCK.time()) + time_s)} if time_s else {}
    return {**env, **deadline}


@final
class JobProcess:
    """Holds a job until it is over.

    Args:
        folder: The job's, with its plan.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: Plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        self._log = Log((folder / LOG).open("ab", buffering=0), names_nodes=len(self._plan["nodes"]) > 1)
        self._starts, self._cancelled, self._noticed, self._killed = 0, "", False, False

    def run(self) -> None:
        """Start the job as often as it may be, and say how it ended."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._take_notice)
        while True:
            self._starts += 1
            self._write_state("running")
            code, reason = self._run_once()
            if code != REQUEUE or self._is_stopping or self._starts > self._plan["requeue"]:
                break
            self._log.say(f"exit code {REQUEUE}: start {self._starts + 1} of the job")
            SYSTEM_CLOCK.sleep(_AGAIN_S)
        phase: Phase = "succeeded" if code == 0 else "stopped" if code == REQUEUE else "failed"
        self._write_state("cancelled" if self._cancelled and code else phase, code, self._cancelled or reason)
        self._log.close()

    @property
    def _is_stopping(self) -> bool:
        """Whether somebody wants it to end."""
        return bool(self._cancelled or self._noticed)

    def _take_notice(self, _number: int, _frame: object) -> None:
        self._noticed = True

    def _run_once(self) -> tuple[int, str]:
        plan = self._plan
        env = add_deadline(plan["env"], plan["time_s"])
        nodes = [_ProcessNode(name, argv, env, self._log) for name, argv in plan["nodes"]]
        limits = {"min_nodes": plan["min_nodes"], "grace_s": plan["grace_s"], "time_s": plan["time_s"]}
        return Start(nodes, self._log, **limits).run(self._look)

    def _look(self) -> tuple[bool, bool]:
        """Return whether somebody wants the job to end, and whether at once."""
        client = self._plan["client"]
        if client and os.getppid() != client and not self._cancelled:
            self._cancelled = "the command that started it has ended"
        with suppress(OSError):
            request = (self._folder / CANCEL).read_text(encoding="utf-8")
            self._cancelled, self._killed = self._cancelled or "cancelled", request == "kill"
        return self._is_stopping, self._killed

    def _write_state(self, phase: Phase, code: int | None = None, reason: str = "") -> None:
        state = {"phase": phase, "exit_code": code, "reason": reason, "starts": self._starts}
        end_s = SYSTEM_CLOCK.monotonic() + (0.0 if phase == "running" else _FULL_DISK_S)
        while True:
            try:
                return write_atomic(self._folder / STATE, json.dumps(state), mode=0o600)
            except OSError as error:
                if SYSTEM_CLOCK.monotonic() > end_s:
                    return self._log.say(f"{self._folder / STATE} can't be written: {error.strerror}")
            SYSTEM_CLOCK.sleep(1.0)


def main(argv: Sequence[str]) -> None:
    """Hold the job of a folder; the lock on it says that somebody does."""
    folder = Path(argv[0])
    with (folder / LOCK).open("w") as lock:
        try_lock_file(lock.fileno())
        JobProcess(folder).run()


if __name__ == "__main__":
    main(sys.argv[1:])
