"""The driver of a job on Ray: one actor for each node in a placement group, started again after exit code 75 and after a loss."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import threading
from importlib import import_module
from io import FileIO
from typing import TYPE_CHECKING, Any, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import environ
from rankwise.base.errors import LaunchError
from rankwise.base.requeue import REQUEUE
from rankwise.cluster.job import JobSpec
from rankwise.cluster.job_fields import Table
from rankwise.cluster.job_process import Log, Start, add_deadline
from rankwise.cluster.launch_command import RendezvousPlace, build_launch, join_endpoint
from rankwise.cluster.ray_node import NodeLauncher

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How the driver's last line begins: `state` reads the reason from there.
OVER = "rankwise: the job is over: "
AGAIN = "rankwise: started again "
_SAY_S = 15.0


def to_text(spec: JobSpec, job_id: str) -> str:
    """Return a job as the driver's argument; of its variables only the names, as all users of a host can read command lines."""
    return json.dumps(
        {**dataclasses.asdict(spec), "own": dict(spec.own.values), "env": sorted(spec.env), "job_id": job_id}
    )


def from_text(text: str) -> tuple[JobSpec, str]:
    """Return a job, and its id, from the driver's argument, and from the environment that Ray has given it."""
    values = json.loads(text)
    job_id = values.pop("job_id")
    lists = {name: tuple(values[name]) for name in ("command", "files")}
    # To be given to the launchers by the driver: Ray sets some itself in actors, as OMP_NUM_THREADS.
    given = environ()
    env = {name: given[name] for name in values["env"]}
    return JobSpec(**{**values, **lists, "env": env, "own": Table(values["own"])}), job_id


def to_bundle(spec: JobSpec) -> dict[str, float]:
    """Return what Ray is to hold for a node."""
    asked = {"CPU": spec.cpus_per_node or 1, "GPU": spec.gpus_per_node, "memory": spec.memory_bytes}
    return {name: float(amount) for name, amount in asked.items() if amount}


def first_words(error: BaseException) -> str:
    """Return what Ray says of a death, without its lists of ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith(("\t", " "))]
    text = " ".join(lines)
    return text if len(text) <= 400 else text[:400].rpartition(" ")[0] + " …"


@final
class _ActorNode:
    """One node: the actor that runs its launcher, and a thread that logs what comes from there.

    Args:
        name: The node's.
        actor: Of a `NodeLauncher`.
        lines: What it yields.
        log: For all nodes.
    """

    def __init__(self, name: str, actor: Any, lines: Any, log: Log) -> None:
        self.name, self.cause, self._actor, self._lines, self._log = name, "", actor, lines, log
        self._ray: Any = import_module("ray")
        self._code: int | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def find_end(self) -> tuple[int | None] | None:
        """Return its exit code, None in it if the actor has died, which is its ``cause``; None while it runs."""
        return None if self._reader.is_alive() else (self._code,)

    def tell(self, words: bytes) -> None:
        """Say something to its launcher's guard."""
        self._actor.tell.remote(words)

    def kill(self) -> None:
        """Give it up."""
        self._ray.kill(self._actor)

    def _read(self) -> None:
        try:
            for one in map(self._ray.get, self._lines):
                if isinstance(one, int):
                    self._code = one
                else:
                    for line in one.splitlines():
                        self._log.write(line.encode(), self.name)
        except Exception as error:  # noqa: BLE001 - Ray raises what the actor's process died of, in its own classes
            self.cause = f"the actor on {self.name} has died: {first_words(error)}"
            self._log.say(self.cause)


@final
class Driver:
    """Holds a job until it is over.

    Args:
        spec: The job.
        job_id: Its id.
    """

    def __init__(self, spec: JobSpec, job_id: str) -> None:
        self._spec, self._job_id = spec, job_id
        self._ray: Any = import_module("ray")
        self._exceptions: Any = import_module("ray.exceptions")
        self._wait_s = float(spec.own.number("wait_s", 300))
        self._log = Log(FileIO(1, "wb", closefd=False), names_nodes=spec.num_nodes > 1)
        self._is_stopping = False
        self._starts = 0

    def run(self) -> int:
        """Start the job as often as it may be; return its exit code."""
        signal.signal(signal.SIGTERM, self._take_notice)
        self._ray.init(address="auto", logging_level="WARNING", log_to_driver=False)
        code, reason = 1, ""
        try:
            while True:
                self._starts += 1
                code, reason = self._start()
                if code != REQUEUE or self._is_stopping or self._starts > self._spec.requeue:
                    break
                self._log.write(
                    f"{AGAIN}({self._starts} of {self._spec.requeue}): {reason or f'exit code {REQUEUE}'}".encode()
                )
        except LaunchError as error:
            reason = str(error)
        if code == REQUEUE and reason:
            code = 1  # a node was lost, and nobody has saved anything
        if code:
            self._log.write(f"{OVER}{reason or f'exit code {code}'}".encode())
        return code

    def _start(self) -> tuple[int, str]:
        """Start the job once, in a placement group of its own: Ray mends one that has lost a node, but only after a while."""
        group, number = self._find_group()
        try:
            return self._run_once(group, number)
        except LaunchError as error:
            if self._starts == 1:
                raise
            return REQUEUE, error.message  # on a node that was lost, and Ray did not know it yet
        finally:
            import_module("ray.util.placement_group").remove_placement_group(group)

    def _take_notice(self, _number: int, _frame: object) -> None:
        self._is_stopping = True

    def _find_group(self) -> tuple[Any, int]:
        """Wait for a placement group of as many nodes as are wanted, or of as few as are enough.

        Raises:
            LaunchError: There is none within the time.
        """
        spec, bundle = self._spec, to_bundle(self._spec)
        strategy = spec.own.text("strategy", "STRICT_SPREAD")
        place = import_module("ray.util.placement_group")
        for number in dict.fromkeys((spec.num_nodes, spec.min_nodes)):
            group = place.placement_group([bundle] * number, strategy=strategy, name=self._job_id)
            end_s = SYSTEM_CLOCK.monotonic() + self._wait_s
            while (left_s := end_s - SYSTEM_CLOCK.monotonic()) > 0 and not self._is_stopping:
                if group.wait(min(_SAY_S, left_s)):
                    return group, number
                self._log.say(f"waits for {self._describe(number, bundle, strategy)}")
            place.remove_placement_group(group)
        raise LaunchError(f"Ray has no place for {self._describe(number, bundle, strategy)}, after {self._wait_s:g} s")

    def _describe(self, number: int, bundle: dict[str, float], strategy: str) -> str:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        fitting = sum(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes)
        return f"{number} nodes with {_amounts(bundle)} each ({strategy}): of the cluster's {len(nodes)} nodes {fitting} have that much, {_amounts(self._ray.available_resources())} are free"

    def _run_once(self, group: Any, number: int) -> tuple[int, str]:
        """Start a launcher on each node, show their lines, and wait for all of them."""
        spec = self._spec
        actors = [self._make_actor(group, index) for index in range(number)]
        try:
            places = self._find_places(actors)
            names = _name_nodes([host for host, _, _ in places])
            env = add_deadline(spec.variables, spec.time_s)
            _, first, port = places[0]
            nodes = list[_ActorNode]()
            for index, (actor, (_, address, _)) in enumerate(zip(actors, places, strict=True)):
                place = (
                    None
                    if number == 1
                    else RendezvousPlace(
                        endpoint=join_endpoint(first, port), run_id=f"{self._job_id}-{self._starts}", local_addr=address
                    )
                )
                words = build_launch(spec, place, python=spec.python or sys.executable)
                if place is not None:
                    # By its address alone torch may not see which node is meant: a host's name can lead to its
                    # loopback.
                    at = len(words) - len(spec.command)
                    words[at:at] = ["--rdzv-conf", f"is_host={int(index == 0)}"]
                lines = actor.run.options(num_returns="streaming").remote(
                    words, env, "" if spec.files else spec.workdir, spec.grace_s
                )
                nodes.append(_ActorNode(names[index], actor, lines, self._log))
            limits = {"min_nodes": spec.min_nodes, "grace_s": spec.grace_s, "time_s": spec.time_s}
            code, reason = Start(nodes, self._log, **limits).run(lambda: (self._is_stopping, False))
            # Beside a requeue only a loss is a reason.
            return code, "; ".join(one.cause for one in nodes if one.cause) if code == REQUEUE else reason
        finally:
            for actor in actors:
                self._ray.kill(actor)

    def _make_actor(self, group: Any, index: int) -> Any:
        bundle = to_bundle(self._spec)
        strategies = import_module("ray.util.scheduling_strategies")
        where = strategies.PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        # Two calls at once: one that runs, and one that is told something.
        options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "memory": bundle.get("memory", 0),
            "max_concurrency": 2,
            "scheduling_strategy": where,
        }
        return self._ray.remote(NodeLauncher).options(**options).remote()

    def _find_places(self, actors: Sequence[Any]) -> list[tuple[str, str, int]]:
        """Return name, address and a free port of each node.

        Raises:
            LaunchError: Some can't be reached.
        """
        try:
            found: list[tuple[str, str, int]] = self._ray.get(
                [actor.find_place.remote() for actor in actors], timeout=self._wait_s
            )
        except self._exceptions.GetTimeoutError:
            raise LaunchError(
                f"Ray has started no actor on some of the {len(actors)} nodes within {self._wait_s:g} s"
            ) from None
        except self._exceptions.RayError as error:
            raise LaunchError(
                f"a node can't start a launcher: {first_words(error)}",
                hint="rankwise must be installed on every node, as Ray's runtime_env or in its image",
            ) from None
        return found


def _amounts(bundle: dict[str, float]) -> str:
    shown = {
        name: f"{bundle[name] / 2**30:.3g} GiB of memory" if name == "memory" else f"{bundle[name]:g} {name}s"
        for name in ("CPU", "GPU", "memory")
        if bundle.get(name)
    }
    return ", ".join(shown.values()) or "nothing"


def _name_nodes(hosts: Sequence[str]) -> list[str]:
    """Return a name for each node: its host's, unless several have that."""
    return [host if hosts.count(host) == 1 else f"{host}-{index}" for index, host in enumerate(hosts)]


if __name__ == "__main__":
    sys.exit(Driver(*from_text(sys.argv[1])).run())
