"""What the static check says of real code: how many findings of each rule, in packages that are installed or in folders.

Each package is one run of `rankwise check` without settings and without a cache. What is printed is to be read: for each
error, open the line and ask whether it breaks, hangs or is silently wrong as it stands. `--list` prints the errors, one a line.

Run it as `python benchmarks/check_precision.py torch accelerate lightning transformers` (names of installed packages, dotted
names of their parts, or folders), with `--select RW1,RW8` for some rules, `--jobs N`, and `--list`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SEVERITIES = ("error", "warning", "hint")
OK_EXITS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one run has said.

    Attributes:
        name: As it was asked for.
        num_files: Python files in there.
        num_lines: Their lines.
        seconds: How long the run took.
        exit_code: 2 if the check could not be done.
        findings: As `--format json` gives them.
    """

    name: str
    num_files: int
    num_lines: int
    seconds: float
    exit_code: int
    findings: tuple[dict[str, Any], ...]


def folder_of(name: str) -> Path:
    """The folder of an installed package, found without importing it, or the folder itself.

    Raises:
        SystemExit: There is neither.
    """
    if Path(name).exists():
        return Path(name)
    top, *rest = name.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name}: no installed package and no folder")
    return Path(spec.origin).parent.joinpath(*rest)


def look(name: str, arguments: list[str]) -> Told:
    """Check one package."""
    folder = folder_of(name)
    files = [folder] if folder.is_file() else list(folder.rglob("*.py"))
    command = [sys.executable, "-m", "rankwise", "check", str(folder), *arguments]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    return Told(
        name=name,
        num_files=len(files),
        num_lines=sum(file.read_bytes().count(b"\n") for file in files),
        seconds=seconds,
        exit_code=done.returncode,
        findings=tuple(json.loads(done.stdout or "[]")),
    )


def print_packages(reported: list[Told]) -> None:
    """One line for each package."""
    print(f"{'package':28} {'files':>6} {'lines':>9} {'seconds':>8} {'error':>6} {'warning':>8} {'hint':>5}  exit")
    for one in reported:
        counts = Counter(finding["severity"] for finding in one.findings)
        numbers = f"{counts['error']:6} {counts['warning']:8} {counts['hint']:5}"
        print(f"{one.name[-28:]:28} {one.num_files:6} {one.num_lines:9} {one.seconds:8.1f} {numbers}  {one.exit_code}")


def print_rules(reported: list[Told]) -> None:
    """One line for each rule that has said something."""
    rules = Counter((finding["rule"], finding["severity"]) for one in reported for finding in one.findings)
    print(f"\n{'rule':8} {'error':>6} {'warning':>8} {'hint':>5}")
    for rule in sorted({rule for rule, _ in rules}):
        error, warning, hint = (rules[rule, severity] for severity in SEVERITIES)
        print(f"{rule:8} {error:6} {warning:8} {hint:5}")


def main() -> int:
    """Check the packages and print both tables; 1 if a check could not be done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help="an installed package, or a folder")
    parser.add_argument("--select", help="rules, as `rankwise check --select` takes them")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print each error")
    options = parser.parse_args()
    arguments = [
        "--no-cache",
        "--isolated",
        "--severity",
        "hint",
        "--format",
        "json",
        "-j",
        str(options.jobs),
    ]
    if options.select:
        arguments += ["--select", options.select]
    reported = [look(name, arguments) for name in options.packages]
    print_packages(reported)
    print_rules(reported)
    if options.list:
        print()
        for finding in (finding for one in reported for finding in one.findings if finding["severity"] == "error"):
            print(f"{finding['path']}:{finding['line']}: {finding['rule']}: {finding['message']}")
    return 0 if all(one.exit_code in OK_EXITS for one in reported) else 1


if __name__ == "__main__":
    raise SystemExit(main())
