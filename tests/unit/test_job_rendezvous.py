"""What a node says while it waits for others: for whom, and until when."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from clocks import FakeClock
from rankwise.base.errors import RendezvousError
from rankwise.engine import job_rendezvous
from rankwise.engine.job_rendezvous import JobRendezvous, _UnnumberedError
from rankwise.engine.node_entry import Call
from rankwise.launcher.command import parse
from rankwise.launcher.rendezvous.assignment import NotNeeded
from rankwise.launcher.rendezvous.multi_node import SeveralNodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launcher.console import Console
    from rankwise.launcher.helper import Helper


class FakeHelper:
    """Has news of a rendezvous, and waits for as many seconds as it is told.

    Attributes:
        num_nodes: How many meet.
        over: Why this node does not.
        again: Why those that have met meet once more, each time; empty where others have met without this node.
        was_cut_off: Whether it reached too few of the others, or these met without it while it waited where it was.
        serves: Whether this node serves the ranks' store, at the port that it was told.
    """

    serves = False

    def __init__(self, news: dict[str, object]) -> None:
        self._news, self.clock = news, FakeClock()
        self.num_nodes, self.over, self.was_cut_off = 1, "", False
        self.again: list[str] = []

    def ask(self, op: str, *, on_wait: Callable[[float], None], **_facts: object) -> dict[str, object]:
        """Wait for 12 seconds, and find a world of one node; lose another at its end."""
        if op == "open":
            return {}
        if op == "stand_by":
            on_wait(1.0)
            return {"over": self.over}
        if op == "finish":
            look = cast("Callable[[], None]", _facts["on_tick"])
            look()
            self._news["1/lost_nodes"] = {"1": {"host": "b", "base": 2, "num": 2, "why": "it froze"}}
            look()
            raise AssertionError("it waits on for a node that is lost")
        if self.again:
            return {"again": self.again.pop()}
        for second in range(13):
            on_wait(float(second))
        if self.serves:
            socket.create_connection(("localhost", cast("int", _facts["store_port"]))).close()
        return {
            "master_addr": "h", "master_port": _facts["store_port"], "node_rank": 0, "num_nodes": self.num_nodes, "base_rank": 0, "world_size": 1,
            "base_role_rank": 0, "role_world_size": 1, "run_id": "x", "store_is_served": not self.serves, "judge": 0, "secret": "", "round": "1",
            "was_cut_off": self.was_cut_off,
        }  # fmt: skip

    def news(self, name: str) -> object:
        """Return what it has told unasked."""
        return self._news.get(name)

    def take_messages(self) -> list[str]:
        """Say nothing."""
        return []

    def forget_news(self, *_names: str) -> None:
        """Keep it: the test has said it once for all."""


class FakeConsole:
    """Remembers lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """Take one."""
        self.lines.append(text)


@pytest.mark.parametrize(
    ("news", "told"),
    [
        ({}, "waiting for other nodes at host:1, 10 s so far: 2 are needed"),
        ({"joined": 2, "starts_in_s": 1.0}, ""),
        ({"joined": 1, "starts_in_s": None}, "waiting for other nodes at host:1, 10 s so far: 1 of 2 are here"),
        (
            {"joined": 2, "starts_in_s": 29.6},
            "2 of --nnodes 2:4 nodes have joined, which is enough: waiting at most 30 s for more (--rdzv-conf last_call_timeout=SECONDS)",
        ),
    ],
)  # fmt: skip
def test_a_node_says_whom_it_waits_for(news: dict[str, object], told: str) -> None:
    """Once: how many are here and how many are needed; when there are enough, how long it waits for latecomers, if that is long."""
    spec = parse(["--nnodes", "2:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1", "train.py"], {})
    console = FakeConsole()
    nodes = SeveralNodes(spec, 1, cast("Helper", FakeHelper(news)), cast("Console", console), lambda: ())
    nodes.join(0)
    assert console.lines == [f"rankwise: {told}" for _ in range(bool(told))]


def test_at_its_end_a_node_does_not_wait_for_one_that_is_lost() -> None:
    """Its ranks have finished; another node is lost before it says that of its own: that is told at once, and not waited for."""
    spec = parse(["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1", "train.py"], {})
    console = FakeConsole()
    nodes = SeveralNodes(spec, 1, cast("Helper", FakeHelper({})), cast("Console", console), lambda: ())
    nodes.join(0)
    assert not nodes.finish()
    assert "not all others have said so: node 1 (host b, ranks 2, 3) is lost: it froze" in console.lines[-1]


def test_nodes_join_every_so_often_and_at_once_in_place_of_a_lost_one() -> None:
    """With --join-every 60 a node that waits is seen a minute after the last one has joined; when fewer are there than before, at once."""
    spec = parse(["--nnodes", "1:4", "--join-every", "60", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1", "train.py"], {})  # fmt: skip
    helper = FakeHelper({"waiting": 1})
    nodes = SeveralNodes(spec, 1, cast("Helper", helper), cast("Console", FakeConsole()), lambda: ())

    def look(num_nodes: int, *pauses_s: float) -> list[bool]:
        helper.num_nodes = num_nodes
        nodes.join(0)
        seen = []
        for pause_s in pauses_s:
            helper.clock.sleep(pause_s)
            seen.append(nodes.has_to_regroup())
            assert nodes.nodes_waiting() == 1  # another node may let it in before
        return seen

    assert look(2, 0, 59, 1) == [0, 0, 1]
    assert look(3, 0, 30) == [0, 0]  # one has joined
    assert look(3, 0, 29, 1) == [0, 0, 1]  # all were restarted meanwhile
    assert look(2, 0) == [1]  # one was lost
    assert look(3, 0) == [1]  # its replacement is no reason to wait again


def test_a_node_that_was_never_needed_leaves_with_the_job() -> None:
    """It says once that it stands by, and for which numbers; at the end of the job it does not join."""
    spec = parse(["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1", "train.py"], {})
    helper, console = FakeHelper({"standing_by": True}), FakeConsole()
    helper.over = "the job has ended"
    nodes = SeveralNodes(spec, 1, cast("Helper", helper), cast("Console", console), lambda: ())
    with pytest.raises(NotNeeded, match="the job has ended"):
        nodes.join(0)
    (line,) = console.lines
    assert (
        line
        == "rankwise: all 2 places of this job are taken (--nnodes 2:2): this node stands by, and replaces one that is lost"
    )


def test_nodes_that_meet_in_vain_again_and_again_end_with_an_error() -> None:
    """Each time they say why; after the fourth time the job is not tried again."""
    spec = parse(["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1", "train.py"], {})
    helper, console = FakeHelper({}), FakeConsole()
    helper.again = ["a node did not number its ranks"] * 9
    nodes = SeveralNodes(spec, 1, cast("Helper", helper), cast("Console", console), lambda: ())
    with pytest.raises(RendezvousError, match="4 times, and each time a node did not number its ranks"):
        nodes.join(0)
    assert console.lines == ["rankwise: a node did not number its ranks: the nodes meet again"] * 4


@pytest.mark.parametrize(
    ("again", "was_cut_off", "has_come_anew"),
    [([], False, False), (["one was lost"], False, False), ([""], False, True), ([], True, True)],
)
def test_a_node_knows_that_it_was_cut_off_itself(again: list[str], *, was_cut_off: bool, has_come_anew: bool) -> None:  # fmt: skip
    """The others have met without it, or it waited for more of them than it could reach: then the hosts that it had lost are not broken."""
    spec = parse(["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1", "train.py"], {})
    helper = FakeHelper({})
    helper.again, helper.was_cut_off = again, was_cut_off
    nodes = SeveralNodes(spec, 1, cast("Helper", helper), cast("Console", FakeConsole()), lambda: ())
    assert nodes.join(0).has_come_anew is has_come_anew


@pytest.mark.parametrize("serves", [True, False])
def test_the_port_of_the_ranks_store_is_held_before_others_know_it(*, serves: bool) -> None:
    """No other program can have it between; a node that does not serve the store lets it go."""
    spec = parse(["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1", "train.py"], {})
    helper = FakeHelper({})
    helper.serves = serves
    part = SeveralNodes(spec, 1, cast("Helper", helper), cast("Console", FakeConsole()), lambda: ()).join(0)
    if part.listener is not None:
        with part.listener as listener:
            assert listener.getsockname()[1] == part.master_port
    assert (part.listener is not None) == serves
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", part.master_port))


def test_who_took_part_does_not_go_on_with_newcomers_alone() -> None:
    """The round is complete, by torch's count, and too few of those that took part before are in it: they meet again, by what they know of each other, and no rank is numbered."""
    job = JobRendezvous.__new__(JobRendezvous)
    before = SimpleNamespace(restore=lambda: None, has_enough=lambda handler: handler is not job.handler)
    job.static, job.handler = True, SimpleNamespace(next_rendezvous=lambda: "a round")
    job.members, job.exchange, job.num_joined = before, None, 0
    job.orders = {"conf": {}}
    job._load = lambda _: SimpleNamespace(Entry=lambda *_: None, hold_port=lambda _: None)
    assert "too few of the nodes that took part" in str(job.join(1, "", num_roles=0, store_port=1)["again"])
    assert job.members is before


def test_nodes_that_waited_for_this_round_are_not_taken_for_others_that_wait() -> None:
    """Those that were quicker after a loss wait for a moment, and the parent may read that when it has met them: the number is told anew before it gets its answer, and before that of the next round."""
    job = JobRendezvous.__new__(JobRendezvous)
    told: list[object] = []
    store = SimpleNamespace(master_addr="h", master_port=1)
    info = SimpleNamespace(rank=0, world_size=1, store=None, bootstrap_store_info=store)
    job.static, job.handler, job.exchange = False, SimpleNamespace(get_run_id=lambda: "x"), None
    job.num_joined, job.watching = 1, False
    job._load = lambda _: SimpleNamespace(Entry=lambda *_: SimpleNamespace(meet=lambda _: info))
    job._say = lambda facts: told.append((facts, job.watching))
    vars(job)["_number_ranks"] = lambda *_: [0, 1, 0, 1]
    assert "node_rank" in job._join(None, 0, "", num_roles=0)
    assert told == [({"waiting": 0}, False)]
    assert job.watching


@pytest.mark.parametrize(
    ("is_frozen", "why"),
    [
        (False, "a node that had met the others was lost before all ranks were numbered (ConnectionError)"),
        (True, "the store did not answer within 1 s: its host is frozen or cut off"),
    ],
)
def test_a_store_that_goes_once_the_nodes_have_met_is_missed(
    why: str, *, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch tries for a minute to open another connection to it; the one that is there fails meanwhile, or never answers, and the nodes meet again."""
    job, end, tries = JobRendezvous.__new__(JobRendezvous), threading.Event(), []
    monkeypatch.setattr(job_rendezvous, "_AGREE_S", 1.0)

    def check(keys: list[str]) -> bool:
        tries.append(keys)
        if is_frozen:
            end.wait()
        elif len(tries) > 1:
            raise ConnectionError("Broken pipe")
        return False

    store = SimpleNamespace(clone=end.wait, check=check)
    place = SimpleNamespace(master_addr="h", master_port=1)
    job.static, job.exchange, job.members, job.num_joined = False, None, None, 0
    job.handler = SimpleNamespace()
    info = SimpleNamespace(rank=1, world_size=2, store=store, bootstrap_store_info=place)
    entry = SimpleNamespace(Entry=lambda *_: SimpleNamespace(meet=lambda _: info), Call=Call, hold_port=lambda _: None)
    job._load = lambda _: entry
    answer = job.join(0, "host", num_roles=0, store_port=1)["again"]
    end.set()
    assert answer == why
    assert len(tries) == (1 if is_frozen else 2)


@pytest.mark.parametrize("error", [None, _UnnumberedError("one was lost")])
def test_who_took_part_before_is_heard_until_the_next_round_has_begun(error: Exception | None) -> None:
    """The launchers' connections of the last round end then, in a static rendezvous as well; if one is lost before all ranks are numbered, those that are left meet by them again."""
    job = JobRendezvous.__new__(JobRendezvous)
    ended: list[str] = []
    before = SimpleNamespace(restore=lambda: ended.append("restore"), end=lambda: ended.append("end"))
    job.static, job.handler = True, SimpleNamespace(next_rendezvous=lambda: "a round")
    job.members, job.exchange, job.num_joined = before, None, 0
    job.orders = {"conf": {}}

    def join(before: object, *_args: object) -> dict[str, object]:
        met = job._meet(None, before)
        job.members = SimpleNamespace(end=lambda: ended.append("end of the new"))
        if error is not None:
            raise error
        return {"met": met}

    vars(job)["_join"] = join
    job._load = lambda _: SimpleNamespace(hold_port=lambda _: None)
    result = job.join(0, "", num_roles=0, store_port=1)
    if error is None:
        assert (result, ended) == ({"met": "a round"}, ["restore", "end"])
    else:
        assert (result, ended) == ({"again": "one was lost"}, ["restore", "end of the new"])
        assert job.members is before
