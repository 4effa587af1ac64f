"""The text of the user's files beside a scene."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.source_lines import with_sources
from scenes import op, rank, scene

if TYPE_CHECKING:
    from pathlib import Path


def test_the_users_files_are_read_and_no_others(tmp_path: Path) -> None:
    """Files of stacks and sites are read once; torch's own, and what is gone, are left out."""
    script, metric, gone = tmp_path / "train.py", tmp_path / "metric.py", tmp_path / "gone.py"
    script.write_text("x = 1\n")
    metric.write_text("y = 2\n")
    torch = tmp_path / "site-packages" / "torch.py"
    torch.parent.mkdir()
    torch.write_text("z = 3\n")
    stack = Stack(frames=tuple(Frame(file=str(path), line=1, function="f") for path in (torch, script, gone)))
    seen = scene(rank(0, op(at=f"{metric}:1"), op(at=f"{gone}:7"), at=stack), rank(1, at=None))
    assert with_sources(seen).sources == {str(script): "x = 1\n", str(metric): "y = 2\n"}


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    """A verdict is written in a moment, whatever the user's files are."""
    huge = tmp_path / "huge.py"
    huge.write_bytes(b"#" * (2 << 20))
    assert not with_sources(scene(rank(0, op(at=f"{huge}:1")))).sources
