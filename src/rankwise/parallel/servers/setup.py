"""Which ranks are servers, and what makes a rank a server, a worker or the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import get
from rankwise.base.errors import CollectiveError, RendezvousError, UsageError
from rankwise.base.log import get_logger
from rankwise.base.rank_names import name_ranks
from rankwise.base.roles import RETURNS
from rankwise.parallel.servers.coordinator import COORDINATOR, Coordinator
from rankwise.parallel.servers.dense import DenseValues
from rankwise.parallel.servers.embedding import TableValues, find_tables
from rankwise.parallel.servers.layout import ShardLayout, digest
from rankwise.parallel.servers.listener import ClosedError, JobStore, Listener, find_host
from rankwise.parallel.servers.recovery import Recovery
from rankwise.parallel.servers.serving import Server
from rankwise.parallel.servers.shard import Shard
from rankwise.parallel.servers.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch.distributed as dist
    from torch import nn

    from rankwise.parallel.servers.shard import Rules
    from rankwise.runtime.context import RankContext

_LOGGER = get_logger(__name__)

#: Ranks arrive when they have imported torch, perhaps beside many others.
_ARRIVAL_S, _NOTICE_S, _POLL_S = 120.0, 10.0, 0.02


@final
class Setup:
    """Makes what this rank is: a server, a worker, or the coordinator."""

    def __init__(
        self, ctx: RankContext, model: nn.Module, rules: Rules, store: dist.Store, layouts: list[ShardLayout]
    ) -> None:
        self._ctx, self._model, self._rules, self.store, self._layouts = ctx, model, rules, store, layouts
        self._tables = list(find_tables(model).items())
        self._parameters = dict(model.named_parameters())
        self._digest = digest([*layouts, *((name, one.facts) for name, one in self._tables)])

    def make_server(self, states: Mapping[str, Mapping[str, Any]], num_updates: int) -> Server:
        """Make a server, which continues where one that died was if it takes its place."""
        ctx, rules, layouts = self._ctx, self._rules, self._layouts

        def make_shard(number: int, members: Iterable[int]) -> Shard:
            table, server = divmod(number, len(layouts))
            if table == 0:
                dense = DenseValues(layouts[server], rules)
                for piece, held in zip(layouts[server].pieces, dense.parameters, strict=True):
                    held.data.copy_(piece.take(self._parameters[piece.name].detach()))
                return Shard(server, dense, rules, members)
            name, module = self._tables[table - 1]
            held = TableValues(module.facts.draw(server, len(layouts)), rules)
            return Shard(f"{name}/{server}", held, rules, members)

        workers = range(len(layouts), ctx.world_size)
        numbers = range(ctx.rank, len(layouts) * (len(self._tables) + 1), len(layouts))
        server = Server(
            ctx.rank, {number: make_shard(number, workers) for number in numbers}, layout_digest=self._digest, workers=workers, store=self.store,
            listener=self._make_listener(str(ctx.rank)), timeout_s=2 * rules.timeout_s, returns=ctx.returns,
        )  # fmt: skip
        server.resume(states, num_updates)
        if rules.recovery_folder is not None:
            num_shards = len(layouts) * (len(self._tables) + 1)
            server.recovery = Recovery(rules.recovery_folder, rules.save_every, make_shard, num_shards)
        server.open(workers)
        return server

    def make_worker(self) -> Worker:
        """Make a worker; if it was started again when there is nothing left to do, the process ends."""
        returns, rank, key = self._ctx.returns, self._ctx.rank, f"ended/{self._ctx.rank}"
        # It had ended, and failed afterwards: its script starts anew, and so does its part in the training.
        if had_ended := self.store.check([key]):
            self.store.set(key, "")
        try:
            return Worker(
                rank, self._model, self._layouts, layout_digest=self._digest, rules=self._rules, store=self.store, returns=returns,
            )  # fmt: skip
        except ClosedError as error:
            if not returns:
                raise
            # Who was killed, or given up by the others, need not fail the job; but what it does after its end has
            # failed.
            if had_ended and (code := int(get(RETURNS))) > 0:
                raise CollectiveError(
                    f"this worker had ended, and then its process failed with exit code {code}: the servers are gone", rank=rank,
                    hint="look at its output; to have it started again, do what may fail before ps.close()",
                ) from error  # fmt: skip
            _LOGGER.info(f"[rank {rank}] {error.message}: nothing is left to do")
            raise SystemExit(0) from None

    def make_coordinator(self, workers: Sequence[int]) -> Coordinator:
        """Make the coordinator of some workers, and wait until they have connected."""
        return Coordinator(
            self._ctx.rank, workers, listener=self._make_listener(COORDINATOR), timeout_s=self._rules.timeout_s, returns=self._ctx.returns,
        )  # fmt: skip

    def _make_listener(self, name: str) -> Listener:
        ctx = self._ctx
        # Ranks with roles have not met: how many hosts there are may be unknown.
        host = "" if ctx.local_world_size == ctx.world_size else find_host(self.store, ctx.num_nodes)
        return Listener(self.store, name, rank=ctx.rank, host=host)


def count_servers(ctx: RankContext, servers: Any, *, coordinator: bool) -> int:
    """Return how many ranks are servers; they are the first ones.

    Raises:
        UsageError: Caller and roles contradict each other, or it leaves no server or no worker.
        RendezvousError: Some rank does not publish its role.
    """
    by_role = None if ctx.role is None else _count_by_role(ctx)
    if servers is not None and by_role is not None and servers != by_role:
        raise UsageError(
            f"servers={servers}, and {by_role} ranks have the role ps",
            rank=ctx.rank,
            hint="leave out servers",
        )
    num_servers = servers if servers is not None else (by_role or 1)
    if isinstance(num_servers, bool) or not isinstance(num_servers, int) or num_servers < 1:
        raise UsageError(f"servers={num_servers!r}", rank=ctx.rank, hint="at least one rank must be a server")
    check_num_ranks(ctx, num_servers, coordinator=coordinator)
    return num_servers


def check_num_ranks(ctx: RankContext, num_servers: int, *, coordinator: bool) -> None:
    """Refuse a job without a worker."""
    needed = num_servers + coordinator + 1
    if ctx.world_size >= needed:
        return
    servers = "1 server" if num_servers == 1 else f"{num_servers} servers"
    raise UsageError(
        f"this job has {ctx.world_size} {'rank' if ctx.world_size == 1 else 'ranks'}, and needs {needed} or more: {servers}, "
        f"{'1 coordinator, ' * coordinator}at least 1 worker",
        rank=ctx.rank, hint=f"rankwise run --nproc-per-node {needed} train.py; with TF_CONFIG, a task for each of them",
    )  # fmt: skip


def wait_for_keys(ctx: RankContext, keys: Mapping[int, str], do_what: str) -> dict[int, bytes]:
    """Wait until each of some ranks has set its key in the store, and return the values; whoever waits long says for whom.

    Raises:
        RendezvousError: Some did not arrive within 120 s; names them. Or the store is gone.
    """
    store, end, was_reported = JobStore(ctx.store, ctx.rank), SYSTEM_CLOCK.monotonic() + _ARRIVAL_S, False
    while True:
        absent = [rank for rank, key in keys.items() if not store.check([key])]
        if not absent:
            return {rank: store.get(key) for rank, key in keys.items()}
        left_s = end - SYSTEM_CLOCK.monotonic()
        if left_s < 0:
            raise RendezvousError(
                f"{name_ranks(absent)} did not arrive within {_ARRIVAL_S:g} s to {do_what}", rank=ctx.rank,
                hint="check that each of them was started, and look at its output",
            )  # fmt: skip
        if not was_reported and left_s < _ARRIVAL_S - _NOTICE_S:
            was_reported = True
            _LOGGER.info(f"[rank {ctx.rank}] waiting for {name_ranks(absent)} to {do_what}; for {left_s:.0f} s more")
        SYSTEM_CLOCK.sleep(_POLL_S)


def _count_by_role(ctx: RankContext) -> int:
    """Return how many ranks are servers by their roles, which all have written into the store."""
    keys = {rank: f"role/{rank}" for rank in range(ctx.world_size)}
    roles = [one.decode() for one in wait_for_keys(ctx, keys, "create the parameter server").values()]
    num_servers = roles.count("ps")
    if "ps" in roles[num_servers:]:
        raise UsageError(
            f"rank {roles.index('ps', num_servers)} is a server, and an earlier one is not", rank=ctx.rank,
            hint="servers are the first ranks: --role-counts ps=2,worker=6",
        )  # fmt: skip
    return num_servers
