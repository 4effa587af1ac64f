"""How fast the static check reads a tree, cold and from its cache, beside ruff with all rules and pylint.

Each line is one command, run as a user would: a process of its own, no cache of an earlier run but where it says `cached`.
`lines/s` counts every line of every Python file below the tree. The three look for different things: the numbers tell only
whether a check is cheap enough for a pre-commit hook. pylint is slow on large trees, so it gets a share of the files
(`--pylint-files`), chosen evenly, and its rate is that of the share.

Run it as `python benchmarks/check.py [TREE] [--pylint-files N] [--jobs N]`; TREE is the installed transformers unless given.
The machine should be idle. pylint is optional: `pip install pylint`.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

AIM_COLD_S, AIM_CACHED_S = 30.0, 2.0


def timed(command: list[str], limit_s: float = 1800) -> tuple[float, int]:
    """Run a command; its seconds and exit code."""
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=limit_s, check=False)
    return time.perf_counter() - begin, done.returncode


def num_lines(files: list[Path]) -> int:
    """Lines of all files together."""
    return sum(file.read_bytes().count(b"\n") for file in files)


def default_tree() -> Path:
    """The installed transformers, or torch where that is missing."""
    for name in ("transformers", "torch"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    raise SystemExit("neither transformers nor torch is installed: name a folder")


def ours(tree: Path, files: list[Path], jobs: int) -> list[tuple[str, float, int]]:
    """Our check, cold and cached."""
    with tempfile.TemporaryDirectory() as cache:
        command = [
            sys.executable,
            "-m",
            "rankwise",
            "check",
            str(tree),
            "--cache-dir",
            cache,
            "--jobs",
            str(jobs),
        ]
        command += ["--exit-zero", "--format", "concise"]
        cold, code = timed(command)
        if code != 0:
            raise SystemExit(f"rankwise check ended with {code}")
        cached, _ = timed(command)
    size = num_lines(files)
    return [("rankwise check, cold", cold, size), ("rankwise check, cached", cached, size)]


def peers(tree: Path, files: list[Path], jobs: int, num_for_pylint: int) -> list[tuple[str, float, int]]:
    """Ruff with all rules, and pylint on a share."""
    rows = []
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "ALL",
        "--no-cache",
        "--isolated",
        "--quiet",
        str(tree),
    ]
    rows.append(("ruff, all rules, cold", timed(ruff)[0], num_lines(files)))
    if find_spec("pylint") is None:
        print("pylint is not installed: its line is left out (pip install pylint)")
        return rows
    share = files[:: max(1, len(files) // num_for_pylint)][:num_for_pylint]
    pylint = [sys.executable, "-m", "pylint", "--jobs", str(jobs), "--exit-zero", *map(str, share)]
    rows.append((f"pylint, {len(share)} files", timed(pylint)[0], num_lines(share)))
    return rows


def main() -> None:
    """Run all, print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", type=Path)
    parser.add_argument("--pylint-files", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    tree = args.tree or default_tree()
    files = sorted(path for path in tree.rglob("*.py") if path.is_file())
    print(
        f"{tree.name}: {len(files)} files, {num_lines(files):,} lines; {args.jobs} jobs; Python {platform.python_version()}"
    )
    rows = [*ours(tree, files, args.jobs), *peers(tree, files, args.jobs, args.pylint_files)]
    print(f"{'':26} {'seconds':>8} {'lines/s':>12}")
    for name, seconds, size in rows:
        print(f"{name:26} {seconds:8.2f} {size / seconds:12,.0f}")
    rate = {name: size / seconds for name, seconds, size in rows}
    cold = rate["rankwise check, cold"]
    for name, value in rate.items():
        if not name.startswith("rankwise"):
            print(f"rankwise cold reads {cold / value:.3g} times as many lines a second as {name}")
    if args.tree is None and tree.name == "transformers":
        met = "met" if rows[0][1] <= AIM_COLD_S and rows[1][1] <= AIM_CACHED_S else "not met here"
        print(f"aim for transformers: {AIM_COLD_S:g} s cold, {AIM_CACHED_S:g} s cached: {met}")


if __name__ == "__main__":
    main()
