"""Every probe has a page that tells what, why and what to do, and docs/probes holds what these docstrings say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.doctor import registry
from rankwise.doctor.probe import TOPICS

if TYPE_CHECKING:
    from rankwise.doctor.probe import Probe

ROOT = Path(__file__).parents[2]


def load_script() -> Any:
    """Import docs/generate_probes.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("generate_probes", ROOT / "docs" / "generate_probes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("probe", registry.all_probes(), ids=lambda one: one.id)
def test_a_page_tells_why_how_and_what_to_do(probe: Probe) -> None:
    """The docstring opens with a sentence, and has the three parts in bold."""
    page = registry.page(probe)
    assert page.split("\n\n")[0].rstrip().endswith(".")
    for part in ("**Why it matters.**", "**How it is checked.**", "**What to do.**"):
        assert part in page, part
    assert "```" not in page
    assert re.fullmatch(r"[a-z][a-z0-9-]+", probe.id)


def test_pages_are_up_to_date() -> None:
    """docs/probes holds what `make docs` would write now, and nothing else."""
    pages = load_script().render()
    folder = ROOT / "docs" / "probes"
    assert {path.name for path in folder.iterdir()} == set(pages)
    for name, text in pages.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"{name}: run `make docs`"


def test_no_probe_is_called_like_a_topic() -> None:
    """`--only WORD` means one of them; whoever wants a probe alone can have it."""
    assert not {one.id for one in registry.all_probes()} & set(TOPICS)
    for one in registry.all_probes():
        assert registry.choose(one.id) == (one,)
        assert one in registry.choose(one.topic)


def test_unknown_probes_are_named() -> None:
    """A misspelt id says which one may be meant."""
    with pytest.raises(Exception, match="did you mean shared-memory") as told:
        registry.choose("shard-memory")
    assert "shard-memory" in str(told.value)
    assert registry.choose("Shared_Memory")[0].id == "shared-memory"
