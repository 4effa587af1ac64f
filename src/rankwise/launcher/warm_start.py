"""Whether ranks are forked from a warm server, or started cold and why; and the server's start."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.environ import is_on
from rankwise.base.host import count_cores
from rankwise.base.os_calls import IS_LINUX, SERVER_FD
from rankwise.launcher.rank_command import build_argv, build_shared_env, hook_path_env
from rankwise.launcher.workers import Command, Cooled, Warmed
from rankwise.warm.plan import LATCHED, Plan, plan_start

if TYPE_CHECKING:
    from rankwise.base.events import EventLog
    from rankwise.launcher.console import Console
    from rankwise.launcher.interpreter import Interpreter
    from rankwise.launcher.spec import LaunchSpec
    from rankwise.launcher.workers import Workers

#: A restart's ranks find these loaded, whatever the script's text says.
_FOR_RESTARTS = ("torch._dynamo", "torch.utils.data", "torch.distributed.checkpoint")
_DEBUGGERS = ("debugpy", "pydevd", "ddtrace")
_WORTH_A_HINT_S = 0.5
#: A server that somebody killed is started anew so often.
_MOST_SERVERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the start of ranks on this node depends on beside the command.

    Attributes:
        prefixes: Words that stand before each local rank's command.
        num_threads: OMP_NUM_THREADS where the user has set none; None: it stays unset.
    """

    interpreter: Interpreter
    num_ranks: int
    prefixes: tuple[tuple[str, ...], ...]
    num_threads: int | None


@final
class WarmStart:
    """The warm server of one launch: started before the nodes meet, so that it imports torch meanwhile."""

    def __init__(
        self,
        spec: LaunchSpec,
        host: Host,
        workers: Workers,
        console: Console,
        *,
        plan: Plan,
        is_forked: bool = False,
        stays: bool = False,
    ) -> None:
        """Start the server, or find out why there is none.

        Args:
            spec: The command that the server is for.
            host: What its start depends on beside that.
            workers: Where it runs.
            console: Where to say what the user should know.
            plan: What the script needs, from ``plan_warm_start``.
            is_forked: Whether the supervisor has a server already, forked from a resident one.
            stays: Whether it serves one job after the other.
        """
        self._spec, self._workers, self._console = spec, workers, console
        self._stays = stays or _can_restart(spec)
        self._is_on, self._num_servers, self._events = is_forked, 0, list[tuple[str, dict[str, object]]]()
        # How long a module took to import here; 0 as long as none was.
        self._module_s = 0.0
        self._packages = [name for name in plan.packages if name not in spec.preload]
        self._command = None if plan.cold else _build_command(spec, host, plan)
        if plan.cold:
            self._note_cold(plan.cold, is_expected=plan.is_expected)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Start a server if there ought to be one and there is none, as somebody killed it."""
        if self._command is None or self._is_on or self._num_servers >= _MOST_SERVERS:
            return
        self._num_servers += 1
        nowhere = os.open(os.devnull, os.O_RDONLY)
        self._is_on = self._workers.warm_up(
            Command(argv=self._command.argv, env=self._command.env, stdio=(nowhere, 1, 2))
        )
        os.close(nowhere)

    def note(self, change: Warmed | Cooled) -> None:
        """Take in what became of the server."""
        match change:
            case Warmed(num_modules=num_modules, seconds=seconds):
                self._events.append(("warm.ready", {"num_modules": num_modules, "seconds": round(seconds, 3)}))
                self._module_s = seconds / max(1, num_modules)
            case Cooled(reason=reason, kind="warning"):
                self._console.say(f"rankwise: warning: {reason}")
            case Cooled(reason=reason, kind="gone"):
                # The ranks live on, and the next attempt starts another one.
                self._events.append(("warm.gone", {"reason": reason}))
                self._is_on = False
            case Cooled(reason=reason, kind=kind):
                if self._is_on:
                    self._note_cold(reason)
                self._is_on = False
                if kind != "lost":
                    self._command = None

    def note_all_started(self) -> None:
        """Let the server go if no attempt can follow this one."""
        if self._is_on and not self._stays:
            self._workers.retire()
            self._is_on, self._command = False, None

    def find_hint(self, imported: dict[str, int], num_ranks: int, *, restarts: int) -> str:
        """Tell what the user may gain by ``--preload``; empty if it is not worth a line.

        Args:
            imported: How many modules of each package every rank imported by itself.
            num_ranks: Ranks on this node.
            restarts: How often all ranks were started again.
        """
        once_s = sum(imported.values()) * self._module_s
        # Ranks that have a core each import side by side; the others wait for their turn.
        start_s = once_s * (num_ranks / count_cores() - 1)
        packages = [name for name in self._packages if name in imported]
        if not packages or once_s < _WORTH_A_HINT_S or (start_s < _WORTH_A_HINT_S and not restarts):
            return ""
        when, saved_s = ("restart", once_s) if restarts else ("start", start_s)
        return f"--preload {','.join(packages)} would save about {saved_s:.1f} s at each {when}"

    def tell(self, events: EventLog) -> None:
        """Write down what has been noted since the last call."""
        for name, facts in self._events:
            events.write(name, **facts)
        self._events.clear()

    def _note_cold(self, reason: str, *, is_expected: bool = False) -> None:
        self._events.append(("warm.cold", {"reason": reason}))
        if not is_expected:
            self._console.say(f"rankwise: cold start: {reason}")


def plan_warm_start(spec: LaunchSpec, host: Host) -> Plan:
    """Return what the server has to import, or why there is none."""
    program = spec.program
    if spec.cold or program.how == "program" or not IS_LINUX or host.interpreter.torch_version is None:
        wish = "--cold" if spec.cold else "--no-python" if program.how == "program" else "no torch, or no Linux"
        return Plan(cold=wish, is_expected=True)
    if any(host.prefixes):
        return Plan(cold="--numa-binding starts each rank by numactl", is_expected=True)
    if program.imports:
        plan = Plan(modules=program.imports, first_path=program.first_path)
    else:
        plan = plan_start(program.script, is_module=program.how == "module", cwd=Path.cwd())
    if plan.cold and plan.is_expected and spec.preload:
        plan = Plan(modules=("torch",), first_path=plan.first_path)
    obstacle = "" if plan.cold else _find_obstacle(spec, host)
    return Plan(cold=obstacle) if obstacle else plan


def _find_obstacle(spec: LaunchSpec, host: Host) -> str:
    if not host.interpreter.can_warm:
        return f"{host.interpreter.path} ignores PYTHONPATH, or is older than Python 3.10"
    if host.interpreter.is_wrapper:
        return f"{host.interpreter.path} is a script, which may do something else for each rank"
    if debugger := next((name for name in _DEBUGGERS if name in sys.modules), None):
        return f"{debugger} follows every process that is started here"
    argvs = {build_argv(spec.program, host.interpreter.path, local) for local in range(host.num_ranks)}
    return "${local_rank} makes the arguments of every rank different" if len(argvs) > 1 else ""


def _can_restart(spec: LaunchSpec) -> bool:
    return spec.max_restarts > 0 or spec.min_nodes != spec.max_nodes


def _build_command(spec: LaunchSpec, host: Host, plan: Plan) -> Command:
    orders = {
        "fd": SERVER_FD,
        "torch": plan.modules,
        "asked": spec.preload,
        "wanted": [
            one for one in plan.wanted if one[0].partition(".")[0] in {name.partition(".")[0] for name in spec.preload}
        ],
        "later": [name for name in _FOR_RESTARTS if _can_restart(spec) and name not in plan.modules],
        "first_path": None if is_on("PYTHONSAFEPATH") else str(plan.first_path),
        "latched": LATCHED,
    }
    return Command(
        argv=build_argv(spec.program, host.interpreter.path, 0),
        env={**build_shared_env(host.num_threads), "RANKWISE_WARM": json.dumps(orders), **hook_path_env()},
    )
