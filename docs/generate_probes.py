"""Write docs/probes/ from the probes of `rankwise doctor`: a page for each probe, and the table of all."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.doctor import registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.doctor.probe import Probe

DOCS = Path(__file__).parent
TARGET = DOCS / "probes"
sys.path.insert(0, str(DOCS))
from generated_pages import find_anchors, write_pages  # noqa: E402 - a file beside this one

TITLES = {
    "environment": "The environment",
    "software": "Software",
    "gpu": "GPUs",
    "resources": "Resources of the host",
    "storage": "Disks and folders",
    "network": "The network",
    "hosts": "Between hosts",
}
_HEAD = """\
# Probes of the doctor

What `rankwise doctor` looks at on a host, and between hosts. How to use it: [Ask the doctor](../howto/doctor.md). These pages are made
from the probes by `make docs`; `rankwise rule hostname` shows one on the terminal. Classes are those of [failure classes](../reference/failure-classes.md).
"""


def link_classes(one: Probe, anchors: dict[str, str]) -> str:
    """Return a probe's failure classes as links to their entries.

    Raises:
        KeyError: One has none: write it.
    """
    return ", ".join(f"[{id_}](../reference/failure-classes.md#{anchors[id_]})" for id_ in one.classes)


def render_page(one: Probe, anchors: dict[str, str]) -> str:
    """Return the page of a probe."""
    facts = [
        f"`{one.id}`",
        TITLES[one.topic].lower(),
        f"class {link_classes(one, anchors)}" if one.classes else "",
    ]
    told = " · ".join(fact for fact in facts if fact)
    return f"# {one.title[0].upper()}{one.title[1:]}\n\n{told}\n\n{registry.page(one)}\n[All probes](README.md)\n"


def render_table(anchors: dict[str, str]) -> str:
    """Return the page with all probes, by topic."""

    def lines() -> Iterator[str]:
        yield _HEAD.rstrip()
        for topic, probes in groupby(registry.all_probes(), key=lambda one: one.topic):
            yield from ("", f"## {TITLES[topic]}", "", "| probe | looks at | class |", "|---|---|---|")
            for one in probes:
                yield f"| [{one.id}]({one.id}.md) | {one.title} | {link_classes(one, anchors)} |"

    return "\n".join(lines()) + "\n"


def render() -> dict[str, str]:
    """Return all pages by their names."""
    anchors = find_anchors()
    pages = {f"{one.id}.md": render_page(one, anchors) for one in registry.all_probes()}
    return {"README.md": render_table(anchors), **pages}


def main() -> None:
    """Write the pages, and remove those of probes that are gone."""
    write_pages(TARGET, render())


if __name__ == "__main__":
    main()
