"""Draw the documents' pictures: run their commands on a terminal of their own and keep what stands there as SVG.

Folders, ports and process numbers are replaced by fixed ones, so that a picture changes only when what it shows does. The curves
of a training are what its folder holds, and their speeds are those of the machine that draws. The chart of start times shows the table in
docs/explain/warm-start.md, which holds what `benchmarks/launch.py` printed.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
COLUMNS = 100


def read_file(document: Path, name: str) -> str:
    """Return the file ``name`` that a document holds as a Python block."""
    found = re.search(rf"^```python\n(# {re.escape(name)}\n.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"{document} holds no {name}")
    return found[1]


def run_on_terminal(command: list[str], folder: Path) -> str:
    """Return all that a command shows on a terminal, colours included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": path, "TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": str(COLUMNS)}
    for name in ("NO_COLOR", "PYTHONPATH", "OMP_NUM_THREADS"):
        env.pop(name, None)
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # Linux's way to say that the last program on this terminal is gone
            data = b""
        if not data:
            break
        shown += data
    os.close(ours)
    process.wait()
    return shown.decode("utf-8", "replace").replace("\r\n", "\n")


def make_neutral(text: str, folder: Path) -> str:
    """Put fixed names in the place of what differs from run to run and from machine to machine."""
    text = text.replace(str(folder.resolve()), "/home/you/job")
    text = re.sub(r"/\S*/site-packages/", ".../site-packages/", text)
    text = re.sub(r"/\S*/rankwise_\w{8}(?=/)", "/tmp/rankwise_1a2b3c4d", text)
    text = re.sub(r"\[/\S*/gloo/", "[.../gloo/", text)
    return re.sub(r"(\[127\.0\.0\.1\]:|pid )\d+", r"\g<1>12345", text)


def draw(name: str, command: str, text: str) -> None:
    """Write ``docs/pictures/<name>.svg``: a terminal with the command and what it showed."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(f"\x1b[1m$ {command}\x1b[0m"))
    # The last line would be cut below its base, and lose its underscores.
    console.print(Text.from_ansi(text.rstrip("\n") + "\n"))
    svg = console.export_svg(title="rankwise", unique_id=name)
    # No fonts from the network: a picture in a README may not load them, and a reader need not be counted.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    PICTURES.mkdir(exist_ok=True)
    target = PICTURES / f"{name}.svg"
    target.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"drew {target.relative_to(ROOT)}")


def round_numbers(text: str) -> str:
    """Return the text with at most two digits behind each point."""
    return re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), text)


def draw_curves() -> None:
    """Write ``docs/pictures/curves.svg``: what the tour's training leaves in its folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "fit.py").write_text(read_file(ROOT / "docs" / "tutorial" / "tour.md", "fit.py"))
        run_on_terminal(["rankwise", "run", "--nproc-per-node", "2", "fit.py", "two"], folder)
        svg = (folder / "two" / "curves.svg").read_text()
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    # A hundredth of a point is seen by nobody, and matplotlib writes six digits. Not in "scale(0.015625)", which letters are drawn by.
    svg = re.sub(r'\b(?:d|x|y|points)="[^"]*"', lambda found: round_numbers(found[0]), svg)
    target = PICTURES / "curves.svg"
    target.write_text("\n".join(line.strip() for line in svg.splitlines()) + "\n")
    print(f"drew {target.relative_to(ROOT)}")


def read_start_times() -> list[tuple[str, float, float]]:
    """Return what was started, and the seconds of rankwise and torchrun, from the table of the warm start: those of the newest torch."""
    text = (ROOT / "docs" / "explain" / "warm-start.md").read_text()
    rows = re.findall(r"^\| ([\w-]+, \d+ ranks?) \| .* \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", text, re.MULTILINE)
    return [(what, float(ours), float(theirs)) for what, ours, theirs in rows]


def draw_start() -> None:
    """Write ``docs/pictures/start.svg``: seconds to the first all-reduce, or backward, as bars."""
    rows, row_height, left, width = read_start_times(), 34, 150, 760
    scale = (width - left - 60) / max(theirs for _, _, theirs in rows)
    height = 44 + row_height * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13">',
        "<title>Seconds until the last rank has done its first all-reduce (DDP: its first backward)</title>",
        # A background of its own: a dark system shows this on light pages, too.
        "<style>text { fill: #1f2328 } .paper { fill: #fff } .ours { fill: #1a7f37 } .theirs { fill: #8c959f } "
        "@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .paper { fill: #0d1117 } .ours { fill: #3fb950 } .theirs { fill: #6e7681 } }</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text x="{left}" y="16">Seconds until the last rank has done its first all-reduce (DDP: its first backward)</text>',
    ]
    for number, (word, style) in enumerate((("rankwise", "ours"), ("torchrun", "theirs"))):
        x = left + 90 * number
        lines += [
            f'<rect class="{style}" x="{x}" y="24" width="11" height="11"/>',
            f'<text x="{x + 17}" y="34">{word}</text>',
        ]
    for number, (what, ours, theirs) in enumerate(rows):
        y = 46 + row_height * number
        lines.append(f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{what}</text>')
        for place, (seconds, style) in enumerate(((ours, "ours"), (theirs, "theirs"))):
            top = y + 13 * place
            lines += [
                f'<rect class="{style}" x="{left}" y="{top}" width="{seconds * scale:.1f}" height="11"/>',
                f'<text x="{left + seconds * scale + 5:.1f}" y="{top + 10}" font-size="11">{seconds:.2f}</text>',
            ]
    target = PICTURES / "start.svg"
    target.write_text("\n".join([*lines, "</svg>"]) + "\n")
    print(f"drew {target.relative_to(ROOT)}")


def main() -> None:
    """Draw all pictures."""
    draw_start()
    draw_curves()
    # The ranks' own output goes to files (-r 3): the picture is about the report.
    command = "rankwise run --nproc-per-node 2 -r 3 train.py --uneven"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text(read_file(ROOT / "README.md", "train.py"))
        draw("hang", command, make_neutral(run_on_terminal(command.split(), folder), folder))


if __name__ == "__main__":
    main()
