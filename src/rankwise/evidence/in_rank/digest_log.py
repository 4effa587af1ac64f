"""The logs in which a rank keeps the digests of its models: one for each model and optimizer, written where the parent can read them.

This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import base64
import json
import weakref
import zlib
from typing import Any

_MOST_LOGS, _MOST_MOMENTS, _MOST_DIGESTS = 8, 128, 6


class DigestLog:
    """All logs of this process."""

    def __init__(self, ring: Any, writer: Any) -> None:
        self._ring, self._writer = ring, writer
        self._logs: dict[tuple[Any, ...], dict[str, Any]] = {}

    def find(self, body: dict[str, Any], names: list[str], tensors: list[Any]) -> dict[str, Any]:
        """Return the log of a model as an optimizer changes it; another one if its parameters are not the same ones.

        Args:
            body: What is known of the model; newer than what the log says.
            names: Of its parameters.
            tensors: Its parameters.
        """
        shapes = [(tuple(one.shape), () if one.is_contiguous() else one.stride(), str(one.dtype)) for one in tensors]
        form = zlib.crc32(repr((names, shapes)).encode())
        key = (body["kind"], body["members"], body["model"], body["optimizer"], form)
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = {"form": form, "names": _squeeze(names), "moments": [], "digests": []}
            if len(self._logs) > _MOST_LOGS:
                del self._logs[next(iter(self._logs))]
        log.update(body)
        return log

    def write(self, now_s: float) -> None:
        """Write all logs, without the oldest ones and the oldest digests if there is no room for them."""
        room = self._ring.get_room("digests")
        raw = self._to_json()
        while len(raw) > room:
            if len(self._logs) > 1:
                del self._logs[next(iter(self._logs))]
            elif not _shrink(next(iter(self._logs.values()))):
                return
            raw = self._to_json()
        self._writer.report("digests", raw, now_s)

    def _to_json(self) -> bytes:
        return json.dumps(list(self._logs.values()), separators=(",", ":")).encode()


class Source:
    """What a log is about, so that it can be read once more at the end, when its optimizer may be gone.

    It keeps none of it alive.

    Attributes:
        log: It.
        refs: The parameters.
        names: Of them.
        model: The ref of the wrapper that they are in; None if they are in none.
        group: The ref of the process group.
        watched: The optimizer.
    """

    __slots__ = ("group", "log", "model", "names", "refs", "watched")

    def __init__(self, log: Any, chosen: list[Any], model: Any, group: Any, watched: Any) -> None:
        self.log, self.model, self.group, self.watched = log, model, weakref.ref(group), watched
        self.names, self.refs = [name for name, _ in chosen], [weakref.ref(one) for _, one in chosen]

    def find(self) -> list[Any]:
        """Return the parameters; nothing if some are gone, or in the model no more."""
        found = [ref() for ref in self.refs]
        if self.model is not None:
            ddp = self.model()
            there = dict(ddp.module.named_parameters()) if ddp is not None else {}
            found = [one if there.get(name) is one else None for name, one in zip(self.names, found, strict=True)]
        return [] if any(one is None for one in found) else found


def add(log: dict[str, Any], moment: dict[str, Any], sums: bytes, samples: bytes) -> None:
    """Add a digest to a log.

    Args:
        log: Where to.
        moment: When it was, and what was known of the model then.
        sums: Packed checksums of all parameters.
        samples: Packed elements of them.
    """
    moments, digests = log["moments"], log["digests"]
    for one in digests:
        one.pop("is_last", None)  # there was another one after it
    if not moment.get("is_last"):
        moments.append([moment["step"], moment["seq"], zlib.crc32(sums)])
    if len(moments) > _MOST_MOMENTS:
        del moments[_MOST_MOMENTS // 4]
    digests.append({**moment, "sums": _to_text(sums), "samples": _to_text(samples)})
    if len(digests) > _MOST_DIGESTS:
        _shrink(log)


def _shrink(log: dict[str, Any]) -> bool:
    """Let go of the oldest digest but the first; False if only three are left, which are the least that tell anything."""
    if len(log["digests"]) <= 3:
        return False
    del log["digests"][1]
    return True


def _squeeze(names: list[str]) -> str:
    return _to_text(zlib.compress(json.dumps(names).encode(), 1))


def _to_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
