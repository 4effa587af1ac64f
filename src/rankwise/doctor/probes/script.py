"""Whether all hosts have the same program.

**Why it matters.** Where the code is copied to each host, one of them easily keeps an older copy: the ranks there call other collectives or build
another model. They hang, or end with `params[0] in this process with sizes ... appears not to match`, or keep training silently.

**How it is checked.** The script is read, and the modules that it imports from its own folder, and theirs; of a folder, all of its
Python files. Nothing is run. Between hosts the contents are compared; only checksums leave a host.

**What to do.** Copy the code to all hosts again (`rsync -a`), or start from a shared folder.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from rankwise.doctor.differences import find_odd_hosts, format_groups, group_hosts, group_values
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Fact, Facts, Probe, Reading, fail, ok, skipped
from rankwise.doctor.units import format_count

#: More files than this are a library and no script.
_MOST_FILES = 400
_MOST_BYTES = 4 << 20
_NOT_OURS = {"site-packages", "node_modules", "__pycache__", "venv", "env", "build", "dist"}


def look(host: Host) -> Iterator[Reading]:
    if host.job.script is None:
        yield skipped("no script given (--script)", "nothing to compare between hosts")
        return
    script = host.path(str(host.job.script.absolute()))
    if not script.exists():
        yield fail(
            f"there is no {host.job.script} here", "each rank here ends at once: `can't open file`",
            f"ls -l {host.job.script}  # copy the code to this host, or mount its folder", facts={"missing": True}
        )  # fmt: skip
        return
    digests = _read_files(script)
    sums: dict[str, Fact] = dict(digests)
    listing = "".join(f"{name} {one}\n" for name, one in sorted(digests.items()))
    whole = hashlib.sha256(listing.encode()).hexdigest()[:12]
    what = f"{host.job.script}: {format_count(len(digests), 'file')}, checksum {whole}"
    yield ok(what, whole=whole, files=sums)


def compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    if len(group_hosts(facts, "whole")) < 2:
        return
    by_host = {host: files for host, info in facts.items() if isinstance(files := info.get("files"), dict)}
    found = []
    for name in sorted({name for files in by_host.values() for name in files}):
        groups = group_values({host: files.get(name) or "missing" for host, files in by_host.items()})
        found += [(name, groups)] if len(groups) > 1 else []
    if not found:
        return
    name, groups = found[0]
    more = f", and {format_count(len(found) - 1, 'more file')}" if len(found) > 1 else ""
    yield fail(
        f"{name} differs: {format_groups(groups)}{more}",
        "ranks with other code call other collectives or build another model: they hang, or keep training silently",
        "rsync -a ./ HOST:\"$PWD\"/  # to each of these hosts, from one whose code is right", "X19", hosts=find_odd_hosts(groups)
    )  # fmt: skip


def _read_files(script: Path) -> dict[str, str]:
    folder = script if script.is_dir() else script.parent
    waiting = [script]
    if script.is_dir():
        inside = ((path, path.relative_to(folder).parts) for path in sorted(folder.rglob("*.py")))
        own = (path for path, parts in inside if not any(one in _NOT_OURS or one.startswith(".") for one in parts))
        waiting = list(islice(own, _MOST_FILES))
    found: dict[str, str] = {}
    seen = set(waiting)
    while waiting and len(found) < _MOST_FILES:
        path = waiting.pop()
        try:
            text = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else b""
        except OSError:
            continue
        found[str(path.relative_to(folder))] = hashlib.sha256(text).hexdigest()[:12]
        if not script.is_dir():
            new = [one for one in _list_imported(text, path, folder) if one not in seen]
            seen.update(new)
            waiting += new
    return found


def _list_imported(text: bytes, path: Path, folder: Path) -> list[Path]:
    """Return the files of the folder that a file imports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, start = [one.name for one in node.names], folder
        elif isinstance(node, ast.ImportFrom):
            start = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            module = node.module or ""
            names = [module, *(f"{module}.{one.name}".lstrip(".") for one in node.names)]
        else:
            continue
        found += [file for name in names for file in _find_module(start, name) if file.is_relative_to(folder)]
    return list(dict.fromkeys(found))


def _find_module(start: Path, name: str) -> list[Path]:
    """Return the files that an import of a dotted name reads: the packages on its way, and the module."""
    found, here = [], start
    for part in name.split(".") if name else []:
        here = here / part
        found += [file for file in (here.with_name(f"{part}.py"), here / "__init__.py") if file.is_file()]
    return found


PROBE = Probe(
    "script", "the same program on all hosts", "software", "quick", look, classes=("X19", "D12", "C3"), compare=compare
)
