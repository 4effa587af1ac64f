"""A fault of ours in the watch never ends somebody's job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from clocks import FakeClock
from rankwise.launcher import camera
from rankwise.launcher.lookout import Lookout

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("method", ["look", "take_end", "take_last"])
def test_a_fault_in_the_watch_is_told_and_switches_it_off(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised becomes one line; the attempt goes on, is watched no more, and is not called hung."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a rule")

    said: list[str] = []
    clock = FakeClock()
    spec = SimpleNamespace(watch=True, hang_timeout_s=None, on_hang=None, logs=SimpleNamespace(is_off=True))
    job = SimpleNamespace(spec=spec, clock=clock, serial=None, console=SimpleNamespace(say=said.append))
    tower = Lookout(cast("Any", job), cast("Any", SimpleNamespace(world_size=1)), [], tmp_path)
    monkeypatch.setattr(camera.Camera, method, fail)
    clock.sleep(1)
    tower.poll()
    tower.take_last(is_final=True)
    tower.take_end()
    tower.poll()
    assert (tower.has_hung, tower.next_in_s) == (False, float("inf"))
    assert "the job goes on: ZeroDivisionError('a rule')" in said[0]
    assert not tower.is_left_behind
