"""ssh daemons on hosts for tests, with keys of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nodes.hosts import Host

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)
needs_sshd = pytest.mark.skipif(
    SSHD is None or not shutil.which("ssh") or os.geteuid() != 0,
    reason="needs root, ssh and sshd (apt-get install openssh-server)",
)


@contextlib.contextmanager
def serve(hosts: Sequence[Host], folder: Path) -> Iterator[str]:
    """Run an ssh daemon on each host, with keys of their own; give the ssh command that is let in."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=20
        )
    shutil.copy(folder / "key.pub", folder / "authorized")
    (folder / "authorized").chmod(0o600)
    settings = {
        "HostKey": folder / "host_key", "AuthorizedKeysFile": folder / "authorized", "PermitRootLogin": "yes", "StrictModes": "no",
        "PasswordAuthentication": "no", "UsePAM": "no", "PidFile": "none", "PrintMotd": "no",
    }  # fmt: skip
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    daemons = [host.start([str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")]) for host in hosts]
    try:
        yield (
            f"ssh -F none -i {folder / 'key'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o IdentitiesOnly=yes"
        )
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
            assert daemon.stdout is not None
            daemon.stdout.close()
