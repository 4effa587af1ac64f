"""Where the job stands in a data set that can only be iterated: epoch, samples read, and the state of each stream."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import DataError
from rankwise.data.stream_reader import Opening

if TYPE_CHECKING:
    from rankwise.data.stream_reader import Dealing

_VERSION = 1
#: As for the sampler: whoever has got fewer steps of a pass only looked.
_ENOUGH_STEPS = 2


@dataclass(slots=True)
class _Place:
    """How far the streams have been delivered.

    Attributes:
        consumed: Samples of the epoch that this rank's cursor counts: with ``stride`` those of all ranks.
        num_steps: Steps delivered.
        turn: Which stream of this rank comes next.
        openings: Where each stream of this rank goes on.
    """

    consumed: int
    num_steps: int
    turn: int
    openings: list[Opening]


@final
class StreamCursor:
    """Counts what was delivered, and decides where the next pass begins; the same words as the sampler's cursor.

    Args:
        dealing: How the elements are dealt out.
        seed: The loader's.
    """

    def __init__(self, dealing: Dealing, seed: int) -> None:
        self._dealing, self._seed = dealing, seed
        self.epoch, self._place = 0, self._make_start()
        self._num_delivered = 0
        self._pass_start: _Place | None = None
        self._resumed_at: _Place | None = None

    def _make_start(self) -> _Place:
        return _Place(0, 0, 0, [Opening() for _ in range(self._dealing.num_shards)])

    @property
    def consumed(self) -> int:
        """Samples of the epoch that were delivered."""
        return self._place.consumed

    @property
    def num_steps(self) -> int:
        """Steps of the epoch that were delivered."""
        return self._place.num_steps

    @property
    def turn(self) -> int:
        """Which stream of this rank comes next."""
        return self._place.turn

    @property
    def openings(self) -> list[Opening]:
        """Where each stream of this rank goes on."""
        return self._place.openings

    def begin_pass(self) -> None:
        """Begin a pass: where the cursor is, or after what the pass before has left."""
        if self._pass_start is not None:
            if self._num_delivered >= _ENOUGH_STEPS:
                self.end_pass()
            else:
                self._place = self._pass_start
        self._pass_start, self._num_delivered = copy.deepcopy(self._place), 0

    def advance(self, num_read: int, openings: dict[int, Opening], turn: int) -> None:
        """Count a step as consumed.

        Args:
            num_read: Samples that were read for it.
            openings: Where the streams go on that it came from.
            turn: Which stream comes next.
        """
        place = self._place
        place.consumed, place.num_steps, place.turn = place.consumed + num_read, place.num_steps + 1, turn
        for shard, opening in openings.items():
            place.openings[shard] = opening
        self._num_delivered += 1
        if self._num_delivered >= _ENOUGH_STEPS:
            self._resumed_at = None

    def end_pass(self) -> None:
        """Go to the start of the next epoch."""
        self._go_to(self.epoch + 1, self._make_start())

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the epoch that was loaded last goes on where it was.

        Args:
            epoch: Which epoch, from 0.
        """
        resumed_at = self._resumed_at if epoch == self.epoch else None
        self._go_to(epoch, copy.deepcopy(resumed_at) or self._make_start())
        self._resumed_at = resumed_at

    def _go_to(self, epoch: int, place: _Place) -> None:
        self.epoch, self._place = epoch, place
        self._pass_start = self._resumed_at = None

    # ----------------------------------------------------------------------- state

    def _describe(self) -> dict[str, Any]:
        """Return what must be the same where a state is loaded."""
        dealing = self._dealing
        told: dict[str, Any] = {"version": _VERSION, "split": dealing.split, "seed": self._seed}
        if dealing.split != "stride":
            told |= {
                "world_size": dealing.world_size,
                "rank": dealing.rank,
                "streams_per_rank": dealing.num_shards,
                "global_batch": dealing.global_batch,
            }
        return told

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and what must be the same where it is loaded."""
        place = self._place
        openings = place.openings if self._dealing.split != "stride" else place.openings[:1]
        streams = [
            {"num_read": one.num_read, "state": None if one.state is None else pickle.loads(one.state)}  # noqa: S301 - our own
            for one in openings
        ]
        return {
            **self._describe(),
            "epoch": self.epoch,
            "consumed": place.consumed,
            "num_steps": place.num_steps,
            "turn": place.turn,
            "streams": streams,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Args:
            state: What ``state_dict`` has returned.

        Raises:
            DataError: It was saved for another split, seed or, where each worker has its own stream, other ranks or workers.
        """
        rank = self._dealing.rank
        for name, own in self._describe().items():
            if state.get(name) != own:
                raise DataError(
                    f"the state was saved with {name} {state.get(name)!r}, and this loader has {own!r}",
                    rank=rank,
                    hint="with split='shard' or 'dataset' each rank loads its own state, with the same ranks, workers and"
                    " global batch; split='stride' resumes at any numbers"
                    if name in {"world_size", "rank", "streams_per_rank", "global_batch"}
                    else "give the loader the arguments of the state",
                )
        numbers = [state.get(name) for name in ("epoch", "consumed", "num_steps", "turn")]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise DataError(
                f"the state says epoch, consumed, steps, turn {numbers}",
                rank=rank,
                hint="the state is damaged: load an older one",
            )
        openings = [
            Opening(
                num_read=one["num_read"],
                state=None if one["state"] is None else pickle.dumps(one["state"]),
            )
            for one in state["streams"]
        ]
        if self._dealing.split == "stride":
            openings *= self._dealing.num_shards
        self._go_to(state["epoch"], _Place(state["consumed"], state["num_steps"], state["turn"], openings))
        self._resumed_at = copy.deepcopy(self._place)


def describe_dealing(dealing: Dealing) -> dict[str, Any]:
    """Return what all ranks must hold alike."""
    return {name: value for name, value in asdict(dealing).items() if name != "rank"}
