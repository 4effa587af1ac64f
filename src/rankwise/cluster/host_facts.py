"""What a host has, as one line of JSON; sent to it as text, for a Python that need not have rankwise: standard library only.

The argument is JSON: the workdir, the words of the command, the address where the nodes meet, and whether the port there is to be free here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:12]


def find_script(words: Sequence[str]) -> tuple[str, bool]:
    """Return the script of a command, or its module, and whether it is a module; empty if it is a program."""
    for number, word in enumerate(words):
        if word in ("-m", "--module") and number + 1 < len(words):
            return words[number + 1], True
        if word.endswith(".py"):
            return word, False
    return "", False


def _find_files(words: list[str]) -> dict[str, str | None]:
    """Return digests of the script, of the Python files beside it, and of all other files that the command names."""
    found: dict[str, str | None] = {}
    script, is_module = find_script(words)
    if is_module:
        sys.path.insert(0, os.getcwd())
        try:
            spec = importlib.util.find_spec(script)
        except (ImportError, ValueError):
            spec = None
        found[script] = _digest(spec.origin) if spec and spec.origin and os.path.isfile(spec.origin) else None
    elif os.path.isfile(script):
        folder = os.path.dirname(script)
        names = [name for name in sorted(os.listdir(folder or "."))[:1000] if name.endswith(".py")]
        found.update((path, _digest(path)) for path in [os.path.join(folder, name) for name in names])
    found.update((word, _digest(word)) for word in words if os.path.isfile(word) and os.path.getsize(word) < 1 << 24)
    return found


def _count_gpus() -> int:
    try:
        shown = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return shown.stdout.decode(errors="replace").count("GPU ")


def _try_rendezvous(asked: dict[str, Any]) -> str:
    """Return what is wrong with the address where the nodes meet, seen from here; empty if nothing is."""
    if not asked["address"]:
        return ""
    try:
        socket.getaddrinfo(asked["address"], None)
    except OSError:
        return "it can't resolve {!r}".format(asked["address"])
    if asked["is_first"]:
        try:
            with socket.create_server(("", asked["port"])):
                pass
        except OSError as error:
            return "port {} can't be taken: {}".format(asked["port"], error.strerror)
    return ""


def main() -> None:
    """Print the facts."""
    asked = json.loads(sys.argv[1])
    if asked["makes_workdir"]:
        os.makedirs(asked["workdir"], exist_ok=True)
    is_there = os.path.isdir(asked["workdir"])
    if is_there:
        os.chdir(asked["workdir"])
    facts = {
        "workdir": is_there,
        "python": platform.python_version(),
        "rankwise": _version("rankwise"),
        "torch": _version("torch"),
        "files": _find_files(asked["words"]) if is_there else {},
        "gpus": _count_gpus() if asked["counts_gpus"] else 0,
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "rendezvous": _try_rendezvous(asked),
    }
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
