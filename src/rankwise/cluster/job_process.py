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
from typing import TYPE_CHECKING, TypedDict, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.files import write_atomic
from rankwise.base.osdoor import try_lock_file
from rankwise.base.requeue import REQUEUE
from rankwise.base.ssh import SSH_FAILED
from rankwise.cluster.launch_command import RANK_LINE
from rankwise.cluster.node_process import ALIVE, ALIVE_EVERY_S, KILL, NOTICE

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def decide_outcome(ends: Sequence[tuple[str, int]], min_nodes: int) -> tuple[int, str]:
    """Return a job's exit code and the reason for it.

    Args:
        ends: Names and exit codes of the nodes, in the order in which they ended.
        min_nodes: With how many nodes the job could go on.
    """
    bad = [(name, code) for name, code in ends if code]
    lost = ", ".join(name for name, code in bad if code == SSH_FAILED)
    if len(ends) - len(bad) >= min_nodes:
        # A failure that concerned all of them would have ended all of them.
        return 0, f"without {', '.join(name for name, _ in bad)}" if bad else ""
    if any(code == REQUEUE for _, code in ends):
        return REQUEUE, f"the connection to {lost} was lost" if lost else ""
    name, code = next(((name, code) for name, code in bad if code != SSH_FAILED), bad[0])
    if code == SSH_FAILED:
        return 1, f"the connection to {lost} was lost"
    return code, f"exit code {code}" + (f" on {name}" if len(ends) > 1 else "")


@final
class Log:
    """One file for the lines of all nodes; ``cause`` is which rank failed first, as the reports in it say."""

    def __init__(self, path: Path, *, names_nodes: bool) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock, self._names_nodes, self.cause = threading.Lock(), names_nodes, ""

    def write(self, line: bytes, node: str = "") -> None:
        """Add a line; one of a launcher says which node it is from, if there are several."""
        text = line.rstrip(b"\r\n")
        is_ours = node and self._names_nodes and not RANK_LINE.match(text.decode("utf-8", "replace"))
        if text.startswith(_CAUSE) and (not self.cause or _ELSEWHERE.match(self.cause)):
            self.cause = text.removeprefix(_CAUSE).decode("utf-8", "replace").strip()
        with self._lock, suppress(OSError):  # a full disk stops no training
            self._file.write((f"[{node}]: ".encode() if is_ours else b"") + text + b"\n")

    def close(self) -> None:
        """Close it."""
        self._file.close()


@final
class _Node:
    """One node: the process that leads to its launcher, and a thread that reads what comes from there."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log: Log) -> None:
        self.name, self._log = name, log
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.tell(json.dumps(env).encode() + b"\n")

    def tell(self, words: bytes) -> None:
        """Say something to its launcher's guard."""
        if self.process.stdin is not None:
            with suppress(OSError):  # it has ended: the next look sees it
                os.write(self.process.stdin.fileno(), words)

    def close(self) -> None:
        """Wait for the rest of what it has request."""
        self._reader.join(timeout=5.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not (stream is self.process.stdout and self._reader.is_alive()):
                with suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        stream = self.process.stdout
        while stream is not None and (line := stream.readline(_LONGEST_LINE)):
            self._log.write(line, self.name)


@final
class _Start:
    """One start of all nodes: who lives, how the others have ended, and what was said to them when."""

    def __init__(self, plan: Plan, nodes: list[_Node]) -> None:
        self.live, self.ends = nodes, list[tuple[str, int]]()
        self._plan, self._num_nodes = plan, len(nodes)
        self._failed_s = self._noticed_s = self._killed_s = float("inf")
        self._spoken_s = float("-inf")

    def collect(self, now_s: float) -> None:
        """Take note of the nodes that have ended."""
        for node in [one for one in self.live if one.process.poll() is not None]:
            self.live.remove(node)
            node.close()
            self.ends.append((node.name, int(node.process.returncode)))
            if self._num_nodes - sum(code != 0 for _, code in self.ends) < self._plan["min_nodes"]:
                self._failed_s = min(self._failed_s, now_s)

    def speak(self, now_s: float, *, is_stopping: bool, is_killed: bool) -> None:
        """Say to the nodes what is due: that we are here, that they are to stop, or to end now."""
        words = ALIVE if now_s - self._spoken_s > ALIVE_EVERY_S else b""
        if self._noticed_s == float("inf") and (is_stopping or now_s - self._failed_s > _OTHERS_S):
            words, self._noticed_s = NOTICE, now_s
        is_overdue = now_s - self._noticed_s > self._plan["grace_s"] + _GUARD_S
        if self._killed_s == float("inf") and (is_killed or is_overdue):
            words, self._killed_s = KILL, now_s
        if words:
            self._spoken_s = now_s
        for node in self.live:
            if words:
                node.tell(words)
            if now_s - self._killed_s > _GUARD_S:
                node.process.kill()  # its host does not answer any more


@final
class JobProcess:
    """Holds a job until it is over.

    Args:
        folder: The job's, with its plan.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: Plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        self._log = Log(folder / LOG, names_nodes=len(self._plan["nodes"]) > 1)
        self._starts, self._cancelled, self._noticed, self._killed = 0, "", False, False
        self._is_late = False

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
            self._say(f"exit code {REQUEUE}: start {self._starts + 1} of the job")
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

    def _say(self, text: str) -> None:
        self._log.write(f"rankwise: {text}".encode())

    def _run_once(self) -> tuple[int, str]:
        plan, begin_s = self._plan, SYSTEM_CLOCK.monotonic()
        env = dict(plan["env"])
        if plan["time_s"]:
            env["RANKWISE_DEADLINE"] = str(int(SYSTEM_CLOCK.time()) + plan["time_s"])
        self._is_late, self._log.cause = False, ""
        start = _Start(plan, [_Node(name, argv, env, self._log) for name, argv in plan["nodes"]])
        while start.live:
            SYSTEM_CLOCK.sleep(_LOOK_S)
            now_s = SYSTEM_CLOCK.monotonic()
            start.collect(now_s)
            self._look(now_s - begin_s)
            start.speak(now_s, is_stopping=self._is_stopping or self._is_late, is_killed=self._killed)
        code, reason = decide_outcome(start.ends, plan["min_nodes"])
        if self._is_late and code:
            return code, f"time limit of {plan['time_s']} s"
        return code, ": ".join(filter(None, (reason, self._log.cause if code else "")))

    def _look(self, age_s: float) -> None:
        """See who wants the job to end."""
        plan = self._plan
        if plan["client"] and os.getppid() != plan["client"] and not self._cancelled:
            self._cancelled = "the command that started it has ended"
        with suppress(OSError):
            request = (self._folder / CANCEL).read_text(encoding="utf-8")
            self._cancelled, self._killed = self._cancelled or "cancelled", request == "kill"
        self._is_late = self._is_late or bool(plan["time_s"] and age_s > plan["time_s"])

    def _write_state(self, phase: Phase, code: int | None = None, reason: str = "") -> None:
        state = {"phase": phase, "exit_code": code, "reason": reason, "starts": self._starts}
        end_s = SYSTEM_CLOCK.monotonic() + (0.0 if phase == "running" else _FULL_DISK_S)
        while True:
            try:
                return write_atomic(self._folder / STATE, json.dumps(state), mode=0o600)
            except OSError as error:
                if SYSTEM_CLOCK.monotonic() > end_s:
                    return self._say(f"{self._folder / STATE} can't be written: {error.strerror}")
            SYSTEM_CLOCK.sleep(1.0)


def main(argv: Sequence[str]) -> None:
    """Hold the job of a folder; the lock on it says that somebody does."""
    folder = Path(argv[0])
    with (folder / LOCK).open("w") as lock:
        try_lock_file(lock.fileno())
        JobProcess(folder).run()


if __name__ == "__main__":
    main(sys.argv[1:])
