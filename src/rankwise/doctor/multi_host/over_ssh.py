"""Starts the doctor on other hosts over ssh: one process each, which ends when ours does."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, final

from rankwise.base.clock import Clock
from rankwise.base.deadline import call_within
from rankwise.base.errors import UsageError
from rankwise.base.ssh import SSH_FAILED, SSH_TRY_S, find_ssh_failure, read_ssh, write_ssh, write_ssh_test
from rankwise.doctor.probe import Reading, fail

_END_S, _LOOK_S = 5.0, 0.1


@dataclass(slots=True, kw_only=True)
class _Remote:
    host: str
    process: subprocess.Popen[bytes]
    words: IO[bytes]
    is_reported: bool = False


@final
class RemoteHosts:
    """The doctor on other hosts, by an ssh command with its own options (``ssh -p 2222``), in a folder there, if they have it; ``say`` shows a line on the terminal."""

    def __init__(self, ssh: str, folder: str, say: Callable[[str], None]) -> None:
        self._ssh, self._folder = read_ssh(ssh), folder
        self._describe = say
        self._remotes: list[_Remote] = []

    def start(self, host: str, command: Sequence[str], *, keeps_output: bool = False, secret: str = "") -> None:
        """Start a command on a host; UsageError if the ssh command is no program.

        ``secret`` is the first line of its standard input: a command line can be read by all users of a host. Only with
        ``keeps_output`` there is something for ``take_output``.
        """
        line = f"cd {shlex.quote(self._folder)} 2>/dev/null; exec {shlex.join(command)}"
        words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            process = subprocess.Popen(
                [*write_ssh(self._ssh, host), line], stdin=subprocess.PIPE, stderr=words,
                stdout=subprocess.PIPE if keeps_output else subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            words.close()
            what, hint = f"{self._ssh[0]} can't be run: {error.strerror}", "install ssh, or name it by --ssh"
            raise UsageError(what, hint=hint) from error
        if secret and process.stdin is not None:
            # Not through its buffer: what an ssh that has ended did not take would be written again when it is closed.
            with suppress(OSError):  # it has ended already: the next look says why
                os.write(process.stdin.fileno(), f"{secret}\n".encode())
        self._remotes.append(_Remote(host=host, process=process, words=words))

    def try_all(self, hosts: Sequence[str], command: Sequence[str], clock: Clock) -> list[Reading]:
        """Run a short command on all hosts at once, and forget it; return the readings of those where it could not be run (each was shown)."""
        for host in hosts:
            self.start(host, command)
        end_s = clock.monotonic() + SSH_TRY_S
        while any(one.process.poll() is None for one in self._remotes) and clock.monotonic() < end_s:
            clock.sleep(_LOOK_S)
            self.look()
        found = self.look()
        for host in (one.host for one in self._remotes if one.process.poll() is None):
            what = f"ssh to {host} does not end within {SSH_TRY_S:.0f} s"
            self._describe(f"rankwise: {what}")
            found.append(self._report(host, what, "the host, its login shell or its home folder hangs"))
        self.close(clock)
        self._remotes.clear()
        return found

    def _report(self, host: str, what: str, why: str) -> Reading:
        return fail(what, why, write_ssh_test(self._ssh, host)).of("rendezvous", host)

    def take_output(self, host: str, *, timeout_s: float) -> bytes:
        """Wait for a host's end, and return what it has printed; OverdueError: it has not ended in time."""
        remote = next(one for one in self._remotes if one.host == host)
        stream = remote.process.stdout
        if stream is None:
            return b""
        # Not `communicate`: that ends its input, and with it the doctor there.
        message = call_within(timeout_s, stream.read)
        remote.process.wait(timeout=_END_S)
        return message

    def look(self) -> list[Reading]:
        """Describe at once which hosts have failed, each once; return the readings of all of them."""
        found = []
        for remote in self._remotes:
            code = remote.process.poll()
            if code in {None, 0, 1}:  # 1: something is wrong there, which the rendezvous reports better
                continue
            reading = self._judge(remote, code or 0)
            found.append(reading)
            if not remote.is_reported:
                remote.is_reported = True
                self._describe(f"rankwise: {reading.what}")
        return found

    def close(self, clock: Clock) -> None:
        """End them: each one's standard input ends, and those that do not go by that are killed."""
        for remote in self._remotes:
            if remote.process.stdin is not None:
                remote.process.stdin.close()
        end_s = clock.monotonic() + _END_S
        for remote in self._remotes:
            while remote.process.poll() is None and clock.monotonic() < end_s:
                clock.sleep(_LOOK_S)
            if remote.process.poll() is None:
                remote.process.kill()
                remote.process.wait()
            if remote.process.stdout is not None:
                remote.process.stdout.close()
            remote.words.close()

    def _judge(self, remote: _Remote, code: int) -> Reading:
        remote.words.seek(0)
        lines = [line for line in remote.words.read().decode(errors="replace").splitlines() if line.strip()]
        if code == SSH_FAILED:
            why = "the host is down, its name is wrong, or it asks for a password"
            return self._report(remote.host, find_ssh_failure(remote.host, lines), why)
        output = " ".join(lines[-2:]) if lines else f"exit code {code}"
        what = f"the doctor could not be started on {remote.host}: {output}"
        is_absent = code in {126, 127} or "No module named" in output
        fix = "# install the same rankwise there, at the same path" if is_absent else ""
        return fail(what, fix=fix).of("rendezvous", remote.host)
