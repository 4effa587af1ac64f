"""Draw docs/pictures/commit.svg: what happens when a checkpoint is saved, and what a kill at each moment leaves behind."""

from __future__ import annotations

from html import escape
from pathlib import Path

TARGET = Path(__file__).parent / "pictures" / "commit.svg"
WIDTH, HEIGHT = 980, 430
LEFT, RIGHT = 150, 960
INK, PALE, LINE = "#1f2933", "#6b7785", "#cbd2d9"
TRAIN, STALL, WRITE, COMMIT, OLD = "#d9e8fb", "#f3c98b", "#cfe8d5", "#2f7d4f", "#eceff3"

#: The moments on the time axis.
SAVE, COPIED, WRITTEN_1, WRITTEN_0, INDEXED, COMMITTED, END = 190, 270, 470, 520, 690, 760, 950


def text(x: float, y: float, words: str, *, size: int = 13, fill: str = INK, anchor: str = "start", weight: str = "normal") -> str:  # fmt: skip
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def box(start: float, end: float, y: float, words: str, fill: str, *, height: float = 30) -> str:
    """Return a bar on the time axis with words in it."""
    middle = text((start + end) / 2, y + height / 2 + 4.5, words, size=12, anchor="middle")
    return f'<rect x="{start}" y="{y}" width="{end - start}" height="{height}" rx="3" fill="{fill}" stroke="{LINE}"/>{middle}'


def moment(x: float, top: float, bottom: float, *, fill: str = LINE, width: float = 1, dash: str = "3 3") -> str:
    """Return a vertical line through a moment."""
    return f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="{fill}" stroke-width="{width}" stroke-dasharray="{dash}"/>'


def draw_ranks() -> list[str]:
    """Return the rows of the two ranks: the training above, the writing thread below."""
    rows = []
    for name, y, written in (("rank 0", 60, WRITTEN_0), ("rank 1", 150, WRITTEN_1)):
        rows += [text(20, y + 20, name, weight="bold"), text(LEFT - 14, y + 20, "training", size=12, fill=PALE, anchor="end")]  # fmt: skip
        rows += [
            box(LEFT, SAVE, y, "", TRAIN),
            box(SAVE, COPIED, y, "copy", STALL),
            box(COPIED, RIGHT, y, "the next steps", TRAIN),
        ]
        rows += [text(LEFT - 14, y + 52, "writing", size=12, fill=PALE, anchor="end")]
        rows += [box(COPIED, written, y + 34, f"shard-0000{name[-1]}, fsync", WRITE, height=26)]
    rows += [box(WRITTEN_0, INDEXED, 94, "index, manifest, fsync", WRITE, height=26), box(INDEXED, COMMITTED, 94, "rename", WRITE, height=26)]  # fmt: skip
    rows += [box(COMMITTED, 880, 94, "delete old ones", OLD, height=26)]
    rows += [f'<path d="M {WRITTEN_1} 184 C {WRITTEN_1 + 25} 160, {WRITTEN_0 - 30} 140, {WRITTEN_0} 124" fill="none" stroke="{PALE}" marker-end="url(#tip)"/>']  # fmt: skip
    return rows


def draw_folder() -> list[str]:
    """Return the rows below: what stands in the folder, and what a job that starts again loads."""
    rows = [text(20, 258, "in the folder", weight="bold")]
    rows += [box(LEFT, 880, 238, "step-500/", OLD, height=26)]
    rows += [
        box(COPIED, COMMITTED, 270, "step-600.tmp-4f1c…/", WRITE, height=26),
        box(COMMITTED, RIGHT, 270, "step-600/", "#9fd3ae", height=26),
    ]
    rows += [text(20, 340, "after a kill,"), text(20, 357, "load() returns")]
    for start, end, words, fill in ((LEFT, COMMITTED, "step 500, complete", OLD), (COMMITTED, RIGHT, "step 600, complete", "#9fd3ae")):  # fmt: skip
        rows.append(box(start, end, 330, words, fill))
    return rows


def main() -> None:
    """Write the picture."""
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" role="img">',
        "<title>A save of two ranks over time: only the rename makes the new checkpoint one</title>",
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="{PALE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(20, 28, "save(..., step=600, background=True)", size=15, weight="bold"),
        text(SAVE, 50, "training pauses", size=12, fill=PALE),
        moment(SAVE, 56, 212),
        moment(COPIED, 56, 212),
        *draw_ranks(),
        *draw_folder(),
        moment(COMMITTED, 56, 376, fill=COMMIT, width=2.5, dash="none"),
        text(COMMITTED, 50, "the commit", size=13, fill=COMMIT, anchor="middle", weight="bold"),
        f'<line x1="{LEFT}" y1="392" x2="{RIGHT}" y2="392" stroke="{PALE}" marker-end="url(#tip)"/>',
        text(RIGHT, 410, "time", size=12, fill=PALE, anchor="end"),
        text(
            LEFT,
            410,
            "Lengths are not to scale: the copy takes the least time, the shards the most.",
            size=12,
            fill=PALE,
        ),
        "</svg>",
    ]
    TARGET.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"drew {TARGET.name}")


if __name__ == "__main__":
    main()
