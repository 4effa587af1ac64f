"""The agreement on the step at which all ranks stop, under every interleaving of main threads, threads and signals."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, strategies as st

from rankwise.runtime.stop_vote import StopVote


@dataclass
class Store:
    """What the ranks share."""

    is_requested: bool = False
    answers: dict[int, int] = field(default_factory=dict)
    num_answers: int = 0
    agreed: int | None = None


@dataclass
class Rank:
    """A rank as two actors: its main thread makes calls, its own thread speaks with the store, one request at a time."""

    number: int
    num_steps: int
    store: Store
    vote: StopVote = field(default_factory=StopVote)
    listens: bool = False
    has_notice: bool = False
    is_waiting: bool = False
    has_left: bool = False
    told: list[bool] = field(default_factory=list)
    todo: list[str] = field(default_factory=lambda: ["look"])
    answer: int = 0

    @property
    def is_through(self) -> bool:
        return self.has_left or (bool(self.told) and self.told[-1])

    def step_main(self, others: list[Rank], *, lockstep: bool) -> bool:
        """Do the main thread's next thing; False if it can't go on now."""
        if self.is_through:
            return False
        if self.is_waiting:
            told = self.vote.wait_settled(0)
            if told is not None:
                self.is_waiting = False
                self.told.append(told)
            return told is not None
        if len(self.told) == self.num_steps:
            self.has_left = True
            return True
        # A collective in each step: nobody is through with it before all that take part have reached it.
        if lockstep and any(len(other.told) < len(self.told) and not other.is_through for other in others):
            return False
        self.listens = True
        told = self.vote.begin_call()
        if told is None:
            self.is_waiting = True
        else:
            self.told.append(told)
        return True

    def step_thread(self, world_size: int) -> bool:
        """Do the thread's next thing; False if there is none now."""
        if not self.listens or not self.todo:
            return False
        match self.todo[0]:
            case "look":
                if self.has_left:
                    self.todo = ["set", "add"]
                elif self.has_notice or self.store.is_requested:
                    self.store.is_requested = True
                    self.todo = ["answer", "set", "add", "settle"]
                else:
                    return False
            case "answer":
                self.answer = self.vote.answer()
                self.todo.pop(0)
            case "set":
                self.store.answers[self.number] = self.answer
                self.todo.pop(0)
            case "add":
                self.store.num_answers += 1
                self.todo.pop(0)
                if self.store.num_answers == world_size:
                    self.todo.insert(0, "publish")
            case "publish":
                self.store.agreed = max(self.store.answers.values())
                self.todo.pop(0)
            case "settle":
                if self.store.agreed is None:
                    return False
                self.vote.settle(self.store.agreed)
                self.todo.pop(0)
        return True


@given(
    world_size=st.integers(2, 4),
    lockstep=st.booleans(),
    early=st.lists(st.booleans(), min_size=4, max_size=4),
    notices=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=4),
    schedule=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=120),
)
def test_all_ranks_stop_at_one_call(
    world_size: int,
    lockstep: bool,
    early: list[bool],
    notices: list[tuple[int, int]],
    schedule: list[tuple[int, bool]],
) -> None:
    """Whoever has a notice, whenever, and whoever is ahead: each rank's first True is at the same call, and nobody hangs."""
    store = Store()
    ranks = [Rank(number, 10_000, store, listens=early[number]) for number in range(world_size)]
    for moment, (number, is_main) in enumerate(schedule):
        for at, who in notices:
            if at == moment:
                ranks[who % world_size].has_notice = True
        _step(ranks[number % world_size], ranks, is_main=is_main, lockstep=lockstep)
    ranks[notices[0][1] % world_size].has_notice = True
    _run_to_the_end(ranks, lockstep=lockstep)
    stops = {len(rank.told) for rank in ranks}
    assert all(rank.told[:-1] == [False] * (len(rank.told) - 1) and rank.told[-1] for rank in ranks)
    assert len(stops) == 1, stops
    assert not any(rank.vote.begin_call() is not True for rank in ranks), "and it stays True"


@given(
    steps=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    notice_at=st.integers(0, 40),
    schedule=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80),
)
def test_ranks_that_leave_keep_nobody_waiting(
    steps: list[int], notice_at: int, schedule: list[tuple[int, bool]]
) -> None:
    """Ranks may have different numbers of steps: whoever has left is not waited for, and no two stop at different calls."""
    store = Store()
    ranks = [Rank(number, count, store) for number, count in enumerate(steps)]
    for moment, (number, is_main) in enumerate(schedule):
        if moment == notice_at:
            ranks[0].has_notice = True
        _step(ranks[number % len(ranks)], ranks, is_main=is_main, lockstep=False)
    _run_to_the_end(ranks, lockstep=False)
    stops = {len(rank.told) for rank in ranks if rank.told[-1]}
    assert len(stops) <= 1
    for rank in ranks:
        assert rank.told[-1] or len(rank.told) == rank.num_steps


def _step(rank: Rank, ranks: list[Rank], *, is_main: bool, lockstep: bool) -> bool:
    return rank.step_main(ranks, lockstep=lockstep) if is_main else rank.step_thread(len(ranks))


def _run_to_the_end(ranks: list[Rank], *, lockstep: bool) -> None:
    """Let everybody have turns until all are through; fail if all are stuck before."""
    while not all(rank.is_through for rank in ranks):
        moved = [_step(rank, ranks, is_main=main, lockstep=lockstep) for main in (True, False) for rank in ranks]
        assert any(moved), "everybody waits"
