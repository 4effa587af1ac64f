"""A job of several nodes: torch's own rendezvous (static, c10d, …), held in the helper process.

It speaks torchrun's keys, so that nodes started by either of the two meet in one job.
"""

from __future__ import annotations

import difflib
import math
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.errors import LaunchError, RankwiseError, RendezvousError, UsageError
from rankwise.base.host import listen_tcp
from rankwise.launcher.helper import InterruptedByUser
from rankwise.launcher.node_link import EndedElsewhere, NodeLink
from rankwise.launcher.rendezvous.assignment import Assignment, NotNeeded
from rankwise.launcher.rendezvous.single_node import bind_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launcher.console import Console
    from rankwise.launcher.helper import Helper
    from rankwise.launcher.spec import LaunchSpec

#: Those of torch.
_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_EXIT_BARRIER_S = 300.0
#: So often nodes that have met may lose one in the same moment.
_MOST_TRIES = 4
_IMPORT_S = 60.0
#: A shorter wait for more nodes needs no explanation.
_WORTH_A_LINE_S = 5.0


@final
class _Door:
    """Lets nodes join, since all ranks restart for them, only every so often; but at once those that replace lost ones.

    Args:
        every_s: How often, at most.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s, self._most, self._opens_s, self._is_short = every_s, 0, 0.0, False

    def note(self, num_nodes: int, now_s: float) -> None:
        """Note how many nodes have met."""
        if num_nodes > self._most:
            self._most, self._opens_s = num_nodes, now_s + self._every_s
        self._is_short = num_nodes < self._most

    def is_open(self, now_s: float) -> bool:
        """Tell whether nodes that wait may join."""
        return self._is_short or now_s >= self._opens_s


@final
class SeveralNodes:
    """Asks the helper; says on the console for whom it waits.

    Args:
        spec: What is launched.
        num_ranks: Ranks on this node.
        helper: Has torch.
        console: Where to speak.
        find_causes: Returns what on this host may keep nodes apart, as sentences; asked once, when they have not met
            for some seconds.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        num_ranks: int,
        helper: Helper,
        console: Console,
        find_causes: Callable[[], tuple[str, ...]],
    ) -> None:
        self._spec, self._helper, self._console = spec, helper, console
        self._link: NodeLink | None = None
        self._find_causes: Callable[[], tuple[str, ...]] | None = find_causes
        self._has_told_enough = False
        self._door = _Door(spec.join_every_s)
        conf: dict[str, object] = dict(spec.rendezvous.conf)
        if spec.rendezvous.backend == "static":
            conf["rank"] = spec.node_rank
        # torch's own bound, and a little for the helper to say so itself.
        self._timeout_s = 60 + float(
            str(conf.get("join_timeout" if spec.rendezvous.backend != "static" else "timeout", 600))
        )
        try:
            opened = helper.ask(
                "open",
                timeout_s=_IMPORT_S + 2 * float(str(conf.get("read_timeout", 60))),  # torch connects twice
                on_wait=self._say_connecting,
                backend=spec.rendezvous.backend,
                endpoint=spec.rendezvous.endpoint,
                run_id=spec.rendezvous.run_id,
                job=Path(spec.program.script).name,
                min_nodes=spec.min_nodes,
                max_nodes=spec.max_nodes,
                local_addr=spec.rendezvous.local_addr,
                conf=conf,
                role=spec.role,
                local_world_size=num_ranks,
            )
        except LaunchError as error:
            raise self._explain_refusal(error) from error
        if note := opened.get("note"):
            console.say(f"rankwise: {note}")

    @property
    def run_id(self) -> str:
        """The name that all nodes give."""
        return self._spec.rendezvous.run_id

    def join(self, restart: int) -> Assignment:
        """Meet the others and number the ranks."""
        self._helper.forget_news()
        self._has_told_enough = False
        host = socket.gethostname() if self._spec.watch else ""
        part: dict[str, object] = {"again": ""}
        listener: socket.socket | None = None
        num_failed = num_tries = 0
        while "again" in part:
            self._stand_by()
            num_tries += 1
            part, listener = self._meet(restart, host)
            if why := str(part.get("again", "")):
                num_failed += 1
                self._console.say(f"rankwise: {why}: the nodes meet again")
                if num_failed == _MOST_TRIES:
                    raise RendezvousError(
                        f"node {self._spec.node_rank} met the other nodes {_MOST_TRIES} times, and each time {why}",
                        hint="look at the output of the other nodes' launchers: one of them is stopped or overloaded",
                    )
        self._check_roles(int(str(part["num_nodes"])), int(str(part["world_size"])))
        self._door.note(int(str(part["num_nodes"])), self._helper.clock.monotonic())
        addr, port = str(part["master_addr"]), int(str(part["master_port"]))
        return Assignment(
            node_rank=int(str(part["node_rank"])),
            num_nodes=int(str(part["num_nodes"])),
            base_rank=int(str(part["base_rank"])),
            world_size=int(str(part["world_size"])),
            base_role_rank=int(str(part["base_role_rank"])),
            role_world_size=int(str(part["role_world_size"])),
            master_addr=addr,
            master_port=port,
            run_id=str(part["run_id"]),
            listener=listener,
            secret=str(part["secret"]),
            has_come_anew=num_tries > num_failed + 1 or bool(part["was_cut_off"]),
            link=self._open_link(part, host),
        )

    def _meet(self, restart: int, host: str) -> tuple[dict[str, object], socket.socket | None]:
        """Meet once; return this node's part, and where it serves the ranks' store, if it does.

        That port is held before others are told of it: one that was only free when torch looked may be another
            program's by then.
        """
        with ExitStack() as held:
            listener = held.enter_context(listen_tcp("", 0))
            held_port = listener.getsockname()[1]
            part = self._ask("join", restart=restart, host=host, num_roles=len(self._spec.roles), store_port=held_port)
            if part.get("node_rank") != 0 or part["store_is_served"]:
                return part, None
            if (port := int(str(part["master_port"]))) != held_port:  # a torch that chooses it in another way
                return part, bind_store("", port)
            held.pop_all()
            return part, listener

    def _stand_by(self) -> None:
        """Wait, as long as the job lasts, while all its nodes are there already; for no longer than for others while these meet again."""
        has_printed: list[bool] = []

        def say(waited_s: float) -> None:
            spec = self._spec
            if self._helper.news("standing_by") and not has_printed:
                has_printed.append(True)
                self._console.say(
                    f"rankwise: all {spec.max_nodes} places of this job are taken (--nnodes {spec.min_nodes}:{spec.max_nodes}): this node stands by, and replaces one that is lost"
                )
            elif not has_printed and round(waited_s) in {10, 60, 300}:
                self._console.say(
                    f"rankwise: waiting at {spec.rendezvous.endpoint}, {waited_s:.0f} s so far: a node was lost, and this one joins when the others have met again"
                )

        over = str(self._ask("stand_by", on_wait=say)["over"])
        if over:
            raise NotNeeded(over)

    def _check_roles(self, num_nodes: int, world_size: int) -> None:
        if (wanted := len(self._spec.roles)) and wanted != world_size:
            counts = ",".join(f"{name}={number}" for name, number in self._spec.role_counts)
            raise UsageError(
                f"{num_nodes} nodes have {world_size} ranks in all, and --role-counts {counts} makes {wanted}",
                hint="give each node its part: --nproc-per-node N",
            )

    def _open_link(self, part: dict[str, object], host: str) -> NodeLink | None:
        if part["judge"] is None:
            return None
        node_rank, judge = int(str(part["node_rank"])), int(str(part["judge"]))
        self._link = NodeLink(self._helper, str(part["round"]), node_rank=node_rank, judge=judge, host=host)
        return self._link

    def nodes_waiting(self) -> int:
        """Return how many nodes wait to join; say what the helper has to say."""
        self._say_messages()
        if (lost := self._helper.news("lost")) is not None:
            self._helper.forget_news("lost", "waiting")
            self._console.say(f"rankwise: the rendezvous is lost, nodes can't join any more: {lost}")
        return int(str(self._helper.news("waiting") or 0))

    def has_to_regroup(self) -> bool:
        """Whether nodes wait to join, and may by now: another node, whose door has opened before, may let them in at any time."""
        return self.nodes_waiting() > 0 and self._door.is_open(self._helper.clock.monotonic())

    def nodes_standing_by(self) -> int:
        """Return how many nodes wait for the place of one that is lost."""
        return int(str(self._helper.news("standby") or 0))

    def finish(self, on_tick: Callable[[], None] | None = None) -> bool:
        """Wait for the other nodes' ranks; the store on one of them serves all.

        A node that is lost meanwhile will not come.

        Raises:
            EndedElsewhere: One of them has failed.
        """
        link = self._link
        known = 0 if link is None else len(link.lost_nodes)

        def look() -> None:
            if link is not None and len(lost := link.lost_nodes) > known:
                raise LaunchError("; ".join(one.describe() for one in lost[known:]))
            if link is not None and link.ended_elsewhere is not None:
                raise EndedElsewhere
            if on_tick is not None:
                on_tick()

        try:
            self._helper.ask(
                "finish",
                timeout_s=_EXIT_BARRIER_S + 10,
                on_wait=self._say_waiting_to_end,
                on_tick=look,
                barrier_s=_EXIT_BARRIER_S,
                num_lost=known,
            )
        except LaunchError as error:
            self._console.say(f"rankwise: this node has finished, but not all others have said so: {error.message}")
            return False
        return True

    def close(self) -> None:
        """Close the rendezvous, so that nobody waits for us; first, all hear why one has ended the attempt."""
        if self._link is not None:
            self._link.wait_end_heard()
        try:
            self._helper.ask("close", timeout_s=10)
        except (LaunchError, InterruptedByUser):
            return  # its place is gone already, or the user is in a hurry

    def _ask(self, op: str, *, on_wait: Callable[[float], None] | None = None, **facts: object) -> dict[str, object]:
        rendezvous = self._spec.rendezvous
        # Who stands by may do so for weeks; the helper has bounds of its own for all else.
        timeout_s = math.inf if on_wait is not None else self._timeout_s
        try:
            return self._helper.ask(
                op, timeout_s=timeout_s, on_wait=on_wait or self._say_waiting, on_tick=None, **facts
            )
        except LaunchError as error:
            raise RendezvousError(
                f"node {self._spec.node_rank} did not meet the other nodes at {rendezvous.endpoint} "
                f"({rendezvous.backend}, --nnodes {self._spec.min_nodes}:{self._spec.max_nodes}): {error.message}",
                hint="start the same command on every node; check with `nc -vz HOST PORT` that the endpoint is reached, and the network between the nodes",
            ) from error
        finally:
            self._say_messages()

    def _explain_refusal(self, error: LaunchError) -> RankwiseError:
        """Return why this node could not even begin to meet the others."""
        rendezvous, text = self._spec.rendezvous, error.message
        is_unknown = "is not registered" in text
        if is_unknown or not rendezvous.endpoint or "Connection" not in text:
            near = difflib.get_close_matches(rendezvous.backend, _BACKENDS, n=1) if is_unknown else []
            return UsageError(
                f"--rdzv-backend {rendezvous.backend} can't be used: {'torch knows no such backend' if is_unknown else text}",
                hint=f"did you mean {near[0]}?"
                if near
                else "static and c10d are always there; others need their own package",
            )
        self._say_causes()
        return RendezvousError(
            f"node {self._spec.node_rank} did not reach the store at {rendezvous.endpoint} ({rendezvous.backend}): {text}",
            hint="is the launcher on that host started, and does the endpoint lead there? `rankwise doctor` on both hosts says what is between them",
        )

    def _say_causes(self) -> None:
        """Say, once, what on this host may keep nodes apart."""
        if self._find_causes is None:
            return
        find, self._find_causes = self._find_causes, None
        for cause in find():
            self._console.say(f"rankwise: {cause}")

    def _say_connecting(self, waited_s: float) -> None:
        if round(waited_s) in {10, 30}:
            self._console.say(
                f"rankwise: opening the rendezvous at {self._spec.rendezvous.endpoint}, {waited_s:.0f} s so far"
            )
            self._say_causes()

    def _say_messages(self) -> None:
        for text in self._helper.take_messages():
            self._console.say(f"rankwise: {text}")

    def _say_waiting(self, waited_s: float) -> None:
        self._say_messages()
        spec, starts_in_s = self._spec, self._helper.news("starts_in_s")
        if starts_in_s is not None:  # torch sets this time once there are enough
            if not self._has_told_enough and float(str(starts_in_s)) > _WORTH_A_LINE_S:
                self._has_told_enough = True
                self._console.say(
                    f"rankwise: {self._helper.news('joined')} of --nnodes {spec.min_nodes}:{spec.max_nodes} nodes have joined, which is enough: "
                    f"waiting at most {float(str(starts_in_s)):.0f} s for more (--rdzv-conf last_call_timeout=SECONDS)"
                )
        elif round(waited_s) in {10, 60, 300}:
            joined = self._helper.news("joined")
            self._console.say(
                f"rankwise: waiting for other nodes at {spec.rendezvous.endpoint}, {waited_s:.0f} s so far: "
                + (f"{joined} of " if joined else "")
                + f"{self._helper.news('needed') or spec.min_nodes} {'are here' if joined else 'are needed'}"
            )
            self._say_causes()

    def _say_waiting_to_end(self, waited_s: float) -> None:
        if round(waited_s) in {10, 60}:
            self._console.say(
                f"rankwise: all ranks of this node have finished; waiting for the other nodes, {waited_s:.0f} s so far"
            )
