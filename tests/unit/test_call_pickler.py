"""Code on its way to the ranks and back."""

from __future__ import annotations

import io
import pickle
from types import CodeType
from typing import Any

import cloudpickle
import pytest

from rankwise.engine.call_process import make_pickler_class


@pytest.mark.parametrize("keeps", [True, False])
def test_code_keeps_its_file(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that travels by value raises in its own file, also with a cloudpickle that leaves that out (3.1.3)."""
    reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    def forget(code: CodeType) -> Any:
        return reduce(code.replace(co_filename="<dynamic-code>"))

    if not keeps:
        monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, forget)

    def travel(number: int) -> list[int]:
        return [number + each for each in range(3)]

    travel.__module__ = "__main__"
    file = io.BytesIO()
    make_pickler_class()(file, protocol=pickle.HIGHEST_PROTOCOL).dump(travel)
    made = pickle.loads(file.getvalue())
    assert made is not travel
    assert made(1) == [1, 2, 3]
    inner = [one for one in made.__code__.co_consts if isinstance(one, CodeType)]
    assert {one.co_filename for one in [made.__code__, *inner]} == {__file__}
    assert made.__code__.co_firstlineno == travel.__code__.co_firstlineno
