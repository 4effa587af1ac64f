"""A worker: links to all servers, pulls parameters into the model, pushes gradients out of it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CollectiveError, RankwiseError, RendezvousError, UsageError
from rankwise.parallel.servers.embedding import TableFacts, find_tables
from rankwise.parallel.servers.layout import Part, ShardLayout, gather_states
from rankwise.parallel.servers.link import Kind, Link, LinkLostError, Message
from rankwise.parallel.servers.listener import RETURN_S, connect

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.parallel.servers.shard import Rules

#: Beyond the time after which a server leaves others out: what its answer takes.
_GRACE_S, _BYE_S = 30.0, 5.0
#: So long a server may take until it listens, or may be frozen before it answers.
_JOIN_S, _RETRY_S = 60.0, 0.05


@final
@dataclass(slots=True)
class Position:
    """Where a worker stands with one shard.

    Attributes:
        clock: Of the next gradient.
        version: What was pulled last.
        last: The gradient that was pushed last: its body is as it was until the next one is made.
        num_lost: How many gradients a server took with it when it died.
    """

    shard: int
    clock: int = 0
    version: int = 0
    last: Message | None = None
    num_lost: int = 0


@final
class Worker:
    """The links of one worker.

    Shard N is on server N. With ``returns`` one that has died is started again, so that we wait for it.

    Raises:
        RendezvousError: A server can't be reached; names it.
        CollectiveError: A server refuses us.
    """

    def __init__(
        self,
        rank: int,
        model: nn.Module,
        layouts: Sequence[ShardLayout],
        *,
        layout_digest: str,
        rules: Rules,
        store: dist.Store,
        returns: bool = False,
    ) -> None:
        parameters = dict(model.named_parameters())
        self._rank, self._parameters = rank, list(parameters.values())
        self._rules = rules
        self._parts = [Part(layout, parameters) for layout in layouts]
        self._model, self._tables = model, list(find_tables(model).values())
        self._timeout_s = 2 * rules.timeout_s + _GRACE_S
        self._has_pulled = False
        self._store, self._returns = store, returns
        self._digest = layout_digest
        self.incarnation = int(store.add(f"incarnations/worker/{rank}", 1))
        self._links: dict[int, Link] = {}
        self.is_closed = False
        self._positions, self._num_servers = dict[int, Position](), len(layouts)
        for number in range(len(layouts)):
            self._join(number, RETURN_S if returns else _JOIN_S)
        for place, table in enumerate(self._tables):
            table.bind(partial(self._fetch, table.facts, place))

    def _join(self, number: int, timeout_s: float) -> None:
        """Connect to a server, or to the process in its place; send again what it does not have of us."""
        peer = f"server {number} (rank {number})"  # servers are the first ranks
        end = SYSTEM_CLOCK.monotonic() + timeout_s
        note = {"worker": self._rank, "incarnation": self.incarnation, "digest": self._digest}
        while True:
            left_s = max(0.0, end - SYSTEM_CLOCK.monotonic())
            link = connect(
                self._store,
                str(number),
                peer=peer,
                rank=self._rank,
                timeout_s=left_s,
                may_return=self._returns,
            )
            try:
                link.send(Message(Kind.HELLO, note=note), timeout_s=self._timeout_s)
                answer = self._check(link.receive(timeout_s=self._timeout_s))
                for shard, clock in answer.note["clocks"].items():
                    at = self._positions.setdefault(int(shard), Position(int(shard), clock))
                    self._resume_shard(at, link, clock)
            except RankwiseError as error:
                link.close()
                has_died = isinstance(error, LinkLostError)  # in between
                if not has_died or not self._returns or not left_s:
                    raise
                SYSTEM_CLOCK.sleep(_RETRY_S)
            else:
                break
        if (former := self._links.get(number)) is not None:
            former.close()
        self._links[number] = link

    def _resume_shard(self, at: Position, link: Link, clock: int) -> None:
        """Continue with a shard over another link, whose server expects the gradient of ``clock`` next: later ones are lost.

        Raises:
            LinkLostError: This server has died too, and what is sent again with it; nothing is counted yet.
        """
        num_missing, last = at.clock - clock, at.last
        is_last = last is not None and last.number == at.clock - 1
        can_repeat = is_last and (num_missing == 1 or (num_missing > 1 and self._rules.is_async))
        if can_repeat and last is not None:
            link.send(last, timeout_s=self._timeout_s)
        elif not self._rules.is_async:
            at.clock = clock
        if num_missing > 0:
            at.num_lost += num_missing - can_repeat

    def _find_server(self, at: Position) -> int:
        return at.shard % self._num_servers

    def _check(self, answer: Message) -> Message:
        if answer.kind == Kind.REFUSED:
            raise CollectiveError(answer.note["error"], rank=self._rank, hint="see the server's output")
        return answer

    # -------------------------------------------------------------------- steps

    def pull(self) -> int:
        """Fill the model with the newest parameters that the mode allows; return the least version among the shards."""
        at = [self._positions[part.layout.number] for part in self._parts]
        whom = [(one, None) for one in at]
        answers = self._ask(Kind.PULL, whom, lambda message, _: self._parts[message.shard].values)
        for part, answer in zip(self._parts, answers, strict=True):
            self._note(answer)
            part.write_back()
        self._has_pulled = True
        # Of more servers than parameters some have none, and make no version.
        held = [one.version for one, part in zip(at, self._parts, strict=True) if part.layout.pieces]
        return min(held, default=0)

    def _ask(self, kind: Kind, whom: Sequence[tuple[Position, Tensor | None]], place: Any = None) -> list[Message]:
        """Ask some shards, then take the answers of all; where a server has died, ask the process in its place."""
        answers: dict[int, Message] = {}
        while True:
            # One for each link: a server that sends an answer reads no second question, and both would wait for the
            # other to read.
            wave: dict[int, Message] = {}
            for at, body in whom:
                if at.shard not in answers:
                    question = Message(kind, at.shard, at.clock - self._rules.staleness, body=body)
                    wave.setdefault(self._find_server(at), question)
            if not wave:
                return [answers[at.shard] for at, _ in whom]
            received, lost = self._exchange(wave, place)
            answers |= {answer.shard: answer for answer in received}
            for server, why in lost.items():
                self._replace(server, why)

    def _replace(self, server: int, error: RankwiseError) -> None:
        """Continue with the process that is started in the place of a server that died.

        Raises:
            RankwiseError: The given one: none is.
        """
        if not self._returns:
            raise error
        try:
            self._join(server, RETURN_S)
        except RendezvousError as late:
            raise error from late

    def _note(self, answer: Message) -> None:
        at = self._positions[answer.shard]
        at.version = answer.number
        if not self._rules.is_async:
            at.clock = max(at.clock, at.version)

    def _find_shard(self, table: int, server: int) -> Position:
        return self._positions[(table + 1) * self._num_servers + server]

    def _fetch(self, facts: TableFacts, table: int, rows: Tensor) -> Tensor:
        """Return some rows of a table from those servers that have them."""
        parts = [part for part in facts.deal_out(rows, self._num_servers) if len(part[2])]
        whom = [(self._find_shard(table, server), places.view(torch.uint8)) for server, _, places in parts]
        answers = self._ask(Kind.ROWS, whom)
        got: list[Tensor] = []
        for one in answers:
            self._note(one)
            if one.body is not None:
                got.append(one.body.view(facts.dtype).view(-1, facts.size))
        if len(got) == 1:
            return got[0]  # all are of one server: in order
        values = torch.empty(len(rows), facts.size, dtype=facts.dtype)
        for (_, mask, _), some in zip(parts, got, strict=True):
            values[mask] = some
        return values

    def push(self, weight: float) -> None:
        """Send the model's gradients to the servers, and take them out of the model."""
        if not self._has_pulled:
            raise UsageError(
                "push() before the first pull()", rank=self._rank, hint="each step: pull(), backward, push()"
            )
        if not 0 <= weight < math.inf:
            raise UsageError(
                f"weight={weight!r} is not a number of samples",
                rank=self._rank,
                hint="pass the number of samples of this worker's batch",
            )
        rows = [table.collect() for table in self._tables]
        factor = self._find_factor([gradient for _, gradient in rows])
        for part in self._parts:
            missing = part.collect(factor)
            if self._rules.is_async and len(missing) == len(part.layout.pieces):
                continue  # where all are waited for, those that have nothing must say so
            note: dict[str, Any] = {"missing": missing} if missing else {}
            self._send_gradient(self._positions[part.layout.number], weight, note, part.gradients)
        for place, (table, (needed, gradient)) in enumerate(zip(self._tables, rows, strict=True)):
            self._push_rows(table.facts, place, needed, gradient * factor, weight)
        for parameter in self._parameters:
            parameter.grad = None

    def _push_rows(self, facts: TableFacts, table: int, rows: Tensor, gradient: Tensor, weight: float) -> None:
        for server, mask, own in facts.deal_out(rows, self._num_servers):
            if len(own) == 0 and self._rules.is_async:
                continue  # where all are waited for, those that have nothing must say so
            part = gradient if len(own) == len(rows) else gradient[mask]
            body = torch.cat([own.view(torch.uint8), part.reshape(-1).view(torch.uint8)])
            self._send_gradient(self._find_shard(table, server), weight, {}, body)

    def _send_gradient(self, at: Position, weight: float, note: dict[str, Any], body: Tensor) -> None:
        at.last = Message(Kind.PUSH, at.shard, at.clock, float(weight), at.version, note, body)
        at.clock += 1
        server = self._find_server(at)
        try:
            self._links[server].send(at.last, timeout_s=self._timeout_s)
        except LinkLostError as error:
            self._replace(server, error)

    def _find_factor(self, gradients: list[Tensor]) -> float:
        """Return what clips this worker's own gradient; where all are averaged, the servers clip the average."""
        bound = self._rules.clip_norm
        if bound is None or not self._rules.is_async:
            return 1.0
        own = [one.grad for one in self._parameters if one.grad is not None]
        return min(1.0, bound / (float(nn.utils.get_total_norm([*own, *gradients])) + 1e-6))

    # ------------------------------------------------------------------- others

    def gather(self) -> torch.optim.Optimizer:
        """Fill the model, and return a plain optimizer with the servers' states."""
        layouts = [part.layout for part in self._parts]
        # An answer arrives when all that we have pushed is in the states, or waits for others.
        answers = self._ask(Kind.STATE, [(self._positions[one.number], None) for one in layouts])
        packed = {one.shard: one.body for one in answers if one.body is not None}
        return gather_states(self._model, layouts, packed, self._rules.optimizer)

    def fetch_stats(self) -> list[dict[str, Any]]:
        """Return each server's report."""
        answers, lost = self._exchange({number: Message(Kind.STATS) for number in self._links})
        for error in lost.values():
            raise error
        return [dict(one.note) for one in answers]

    @property
    def num_lost(self) -> int:
        """How many gradients servers took with them when they died; one that went to several is counted for each."""
        return sum(at.num_lost for at in self._positions.values())

    def _exchange(
        self, questions: Mapping[int, Message], place: Any = None
    ) -> tuple[list[Message], dict[int, LinkLostError]]:
        """Ask servers, and take one answer of each, also where another failed: else its answer would be taken for the next one's.

        Returns the answers, and the servers that are gone; any other error is raised when all links are read.
        """
        answers, lost = list[Message](), dict[int, LinkLostError]()
        trouble: RankwiseError | None = None
        asked: list[int] = []
        for is_answer, server in chain(((False, one) for one in questions), ((True, one) for one in asked)):
            link = self._links[server]
            try:
                if is_answer:
                    answers.append(self._check(link.receive(timeout_s=self._timeout_s, place=place)))
                else:
                    link.send(questions[server], timeout_s=self._timeout_s)
                    asked.append(server)
            except LinkLostError as error:
                lost[server] = error
            except RankwiseError as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble
        return answers, lost

    def close(self, *, has_ended: bool = True, is_stopped: bool = False) -> None:
        """Close the links; with ``has_ended`` all servers learn that this worker has ended, else they have lost it.

        With ``is_stopped`` it has ended because the job is to stop, which a server may learn later than this.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if has_ended:
            with suppress(RuntimeError, RendezvousError):
                self._store.set(f"ended/{self._rank}", "1")
        for link in self._links.values():
            with suppress(RankwiseError):
                if has_ended:
                    link.send(Message(Kind.BYE, note={"stopped": is_stopped}), timeout_s=_BYE_S)
            link.close()
