"""Where the job stands in a data set that can only be iterated: epoch, samples read, and the state of each stream."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import DataError
from rankwise.data.saved_positions import STREAM_KIND, VERSION, check_kind
from rankwise.data.stream_reader import Opening

if TYPE_CHECKING:
    from rankwise.data.stream_reader import Dealing

#: What must be the same too where each worker has a stream of its own.
_OF_OWN_STREAMS = ("world_size", "rank", "streams_per_rank", "global_batch")


@final
@dataclass(slots=True)
class StreamPlace:
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

    Attributes:
        epoch: The epoch.
        place: How far its streams have been delivered.
        is_under_way: Whether a step of this epoch was delivered here, since the cursor was last moved otherwise.
    """

    def __init__(self, dealing: Dealing, seed: int) -> None:
        self._dealing, self._seed = dealing, seed
        self.epoch, self.place = 0, self._make_start()
        # As in the sampler.
        self.is_under_way = self._was_begun = False
        self._resumed_at: StreamPlace | None = None

    def _make_start(self) -> StreamPlace:
        return StreamPlace(0, 0, 0, [Opening() for _ in range(self._dealing.num_shards)])

    def advance(self, num_read: int, openings: dict[int, Opening], turn: int) -> None:
        """Count a step as consumed.

        Args:
            num_read: Samples that were read for it.
            openings: Where the streams go on that it came from.
            turn: Which stream comes next.
        """
        place = self.place
        place.consumed, place.num_steps, place.turn = place.consumed + num_read, place.num_steps + 1, turn
        for shard, opening in openings.items():
            place.openings[shard] = opening
        self.is_under_way = True
        if self._was_begun:
            self._resumed_at = None

    def end_pass(self) -> None:
        """Go to the start of the next epoch."""
        self._go_to(self.epoch + 1, self._make_start())

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; that of the loaded epoch is, the first time, where the state was.

        Args:
            epoch: Which epoch, from 0.
        """
        resumed_at = self._resumed_at if epoch == self.epoch else None
        self._go_to(epoch, copy.deepcopy(resumed_at) or self._make_start())
        self._resumed_at, self._was_begun = resumed_at, True

    def _go_to(self, epoch: int, place: StreamPlace) -> None:
        self.epoch, self.place = epoch, place
        self._resumed_at, self.is_under_way, self._was_begun = None, False, False

    # ----------------------------------------------------------------------- state

    def _describe(self) -> dict[str, Any]:
        """Return what must be the same where a state is loaded."""
        dealing = self._dealing
        body = {"version": VERSION, "kind": STREAM_KIND, "split": dealing.split, "seed": self._seed}
        own = (dealing.world_size, dealing.rank, dealing.num_shards, dealing.global_batch)
        return body | (dict(zip(_OF_OWN_STREAMS, own, strict=True)) if dealing.split != "stride" else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and what must be the same where it is loaded."""
        place = self.place
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
            DataError: It was saved for another split, seed or, where each worker has its own stream, other ranks or
                workers; or it is damaged. The cursor stays where it was.
        """
        rank = self._dealing.rank
        check_kind(state, STREAM_KIND, rank)
        for name, own in self._describe().items():
            if state.get(name) != own:
                raise DataError(
                    f"the state was saved with {name} {state.get(name)!r}, and this loader has {own!r}",
                    rank=rank,
                    hint="with split='shard' or 'dataset' each rank loads its own state, with the same ranks, workers and"
                    " global batch; split='stride' resumes at any numbers"
                    if name in _OF_OWN_STREAMS
                    else "give the loader the arguments of the state",
                )
        numbers: list[Any] = [state.get(name) for name in ("epoch", "consumed", "num_steps", "turn")]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise self._damaged(f"epoch, consumed, steps, turn {numbers}")
        openings = self._read_openings(state.get("streams"))
        epoch, consumed, num_steps, turn = numbers
        if self._dealing.split == "stride":
            # The number of workers may be another one, and the turn belongs to the workers.
            openings, turn = openings * self._dealing.num_shards, 0
        elif turn >= self._dealing.num_shards:
            raise self._damaged(f"turn {turn} of {self._dealing.num_shards} streams")
        self._go_to(epoch, StreamPlace(consumed, num_steps, turn, openings))
        self._resumed_at = copy.deepcopy(self.place)

    def _read_openings(self, streams: Any) -> list[Opening]:
        wanted = 1 if self._dealing.split == "stride" else self._dealing.num_shards
        if not isinstance(streams, (list, tuple)) or len(streams) != wanted:
            text = len(streams) if isinstance(streams, (list, tuple)) else f"a {type(streams).__name__} as"
            raise self._damaged(f"{text} streams, but {wanted} are expected")
        openings = []
        for one in streams:
            num_read = one.get("num_read") if isinstance(one, dict) else None
            if type(num_read) is not int or num_read < 0:
                raise self._damaged(f"{num_read!r} elements read of a stream")
            state = one.get("state")
            openings.append(Opening(num_read=num_read, state=None if state is None else pickle.dumps(state)))
        return openings

    def _damaged(self, text: str) -> DataError:
        return DataError(
            f"the state says {text}",
            rank=self._dealing.rank,
            hint="the state is damaged: load an older one",
        )
