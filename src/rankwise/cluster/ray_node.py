"""One node of a job on Ray: an actor that runs the launcher there, and hands its lines to the driver."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.cluster.node_process import ALIVE, ALIVE_EVERY_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_CHUNK = 1 << 16


@final
class NodeLauncher:
    """Runs a launcher; however this actor ends, the launcher's guard notices, and ends it, too."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        #: What came before there was a launcher: it goes there with its start.
        self._early, self._lock = b"", threading.Lock()

    def find_place(self) -> tuple[str, str, int]:
        """Return this host's name, its address as Ray knows it, and a port that is free here."""
        address = str(import_module("ray.util").get_node_ip_address())
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Not one that the system gives to whoever connects: it is served only once the launcher has started.
        for port in random.sample(range(10_000, 30_000), 100):
            with suppress(OSError), socket.socket(family) as probe:
                probe.bind((address, port))
                return socket.gethostname(), address, port
        raise OSError(f"no port of 100 between 10000 and 30000 is free at {address}")

    def run(self, words: Sequence[str], env: Mapping[str, str], folder: str, grace_s: int) -> Iterator[str | int]:
        """Run the launcher to its end.

        Args:
            words: Its command.
            env: What it finds in its environment beside the actor's.
            folder: Where it is run; empty: where the actor is, which is Ray's working_dir.
            grace_s: From the notice to the kill.

        Yields:
            Text, as it comes, in whole lines; at last the exit code.
        """
        guard = [sys.executable, "-m", "rankwise.cluster.node_process", str(grace_s), *words]
        process = subprocess.Popen(
            guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder or None
        )
        with self._lock:
            self._process = process
            self._write(json.dumps(dict(env)).encode() + b"\n" + self._early)
        threading.Thread(target=self._say_alive, args=(process,), daemon=True).start()
        rest = b""
        while process.stdout is not None and (chunk := os.read(process.stdout.fileno(), _CHUNK)):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                yield whole.decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")
        code = process.wait()
        with self._lock:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        yield code

    def tell(self, words: bytes) -> None:
        """Say something to the launcher's guard."""
        with self._lock:
            if self._process is None:
                self._early += words
            else:
                self._write(words)

    def _write(self, words: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended: `run` sees it, and closes its pipes
                os.write(self._process.stdin.fileno(), words)

    def _say_alive(self, process: subprocess.Popen[bytes]) -> None:
        """Say that somebody holds the launcher: Ray ends this actor with its driver, and a driver that is slow ends no training."""
        while process.poll() is None:
            SYSTEM_CLOCK.sleep(ALIVE_EVERY_S)
            self.tell(ALIVE)
