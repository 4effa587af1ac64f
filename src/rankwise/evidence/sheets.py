"""The sheets on which a rank keeps the digests of its models: one for each model and optimizer, written where the parent can read them.

This file stands alone, as ``recorder.py`` does.
"""

from __future__ import annotations

import base64
import json
import weakref
import zlib
from typing import Any

_MOST_SHEETS, _MOST_MOMENTS, _MOST_DIGESTS = 8, 128, 6


class Sheets:
    """All sheets of this process.

    Args:
        ring: The module of that name.
        writer: Writes into the memory file.
    """

    def __init__(self, ring: Any, writer: Any) -> None:
        self._ring, self._writer = ring, writer
        self._sheets: dict[tuple[Any, ...], dict[str, Any]] = {}

    def find(self, told: dict[str, Any], names: list[str], tensors: list[Any]) -> dict[str, Any]:
        """Return the sheet of a model as an optimizer changes it; another one if its parameters are not the same ones.

        Args:
            told: What is known of the model; newer than what the sheet says.
            names: Of its parameters.
            tensors: Its parameters.
        """
        shapes = [(tuple(one.shape), () if one.is_contiguous() else one.stride(), str(one.dtype)) for one in tensors]  # fmt: skip
        form = zlib.crc32(repr((names, shapes)).encode())
        key = (told["kind"], told["members"], told["model"], told["optimizer"], form)
        sheet = self._sheets.get(key)
        if sheet is None:
            sheet = self._sheets[key] = {"form": form, "names": _squeeze(names), "moments": [], "digests": []}
            if len(self._sheets) > _MOST_SHEETS:
                del self._sheets[next(iter(self._sheets))]
        sheet.update(told)
        return sheet

    def write(self, now_s: float) -> None:
        """Write all sheets, without the oldest ones and the oldest digests if there is no room for them."""
        room = self._ring.get_room("digests")
        raw = self._to_json()
        while len(raw) > room:
            if len(self._sheets) > 1:
                del self._sheets[next(iter(self._sheets))]
            elif not _shrink(next(iter(self._sheets.values()))):
                return
            raw = self._to_json()
        self._writer.report("digests", raw, now_s)

    def _to_json(self) -> bytes:
        return json.dumps(list(self._sheets.values()), separators=(",", ":")).encode()


class Source:
    """What a sheet tells of, so that it can be read once more at the end, when its optimizer may be gone. It keeps none of it alive.

    Args:
        sheet: It.
        chosen: The parameters, with their names.
        model: The ref of the wrapper that they are in; None if they are in none.
        group: The process group.
        watched: What counts the optimizer's steps.

    Attributes:
        sheet: It.
        refs: The parameters.
        names: Of them.
        model: The ref of the wrapper that they are in; None if they are in none.
        group: The ref of the process group.
        watched: The optimizer.
    """

    __slots__ = ("group", "model", "names", "refs", "sheet", "watched")

    def __init__(self, sheet: Any, chosen: list[Any], model: Any, group: Any, watched: Any) -> None:
        self.sheet, self.model, self.group, self.watched = sheet, model, weakref.ref(group), watched
        self.names, self.refs = [name for name, _ in chosen], [weakref.ref(one) for _, one in chosen]

    def find(self) -> list[Any]:
        """Return the parameters; nothing if some are gone, or in the model no more."""
        found = [ref() for ref in self.refs]
        if self.model is not None:
            ddp = self.model()
            there = dict(ddp.module.named_parameters()) if ddp is not None else {}
            found = [
                one if there.get(name) is one else None for name, one in zip(self.names, found, strict=True)
            ]
        return [] if any(one is None for one in found) else found


def add(sheet: dict[str, Any], moment: dict[str, Any], sums: bytes, samples: bytes) -> None:
    """Put a digest on a sheet.

    Args:
        sheet: Where to.
        moment: When it was, and what was known of the model then.
        sums: Packed checksums of all parameters.
        samples: Packed elements of them.
    """
    moments, digests = sheet["moments"], sheet["digests"]
    for one in digests:
        one.pop("is_last", None)  # there was another one after it
    if not moment.get("is_last"):
        moments.append([moment["step"], moment["seq"], zlib.crc32(sums)])
    if len(moments) > _MOST_MOMENTS:
        del moments[_MOST_MOMENTS // 4]
    digests.append({**moment, "sums": _to_text(sums), "samples": _to_text(samples)})
    if len(digests) > _MOST_DIGESTS:
        _shrink(sheet)


def _shrink(sheet: dict[str, Any]) -> bool:
    """Let go of the oldest digest but the first; False if only three are left, which are the least that tell anything."""
    if len(sheet["digests"]) <= 3:
        return False
    del sheet["digests"][1]
    return True


def _squeeze(names: list[str]) -> str:
    return _to_text(zlib.compress(json.dumps(names).encode(), 1))


def _to_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
