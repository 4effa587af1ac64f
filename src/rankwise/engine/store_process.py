"""Serve the store that the ranks of one attempt meet at, on a socket that the parent already listens on.

A process of its own, so that neither rank 0 nor the parent takes the store with it. Started anew for every
attempt: addresses that dead ranks left in a store keep the next attempt from meeting.
"""

import os
import signal
import sys

if __name__ == "__main__":
    # Only the parent decides when the store goes: a `pkill -f` or a Ctrl-C meant for the job must not take it first.
    for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, _name):
            signal.signal(getattr(signal, _name), signal.SIG_IGN)
    del sys.path[0]  # our own folder: its names must not shadow anybody's

from datetime import timedelta

from torch.distributed import TCPStore


def main(listen_fd: int | str, port: int | str) -> None:
    """Serve until we are killed; also called in a fork of the warm server."""
    options = {"use_libuv": False} if os.environ.get("USE_LIBUV") == "0" else {}
    store = TCPStore(  # noqa: F841 - it serves as long as it lives
        "127.0.0.1",
        int(port),
        None,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=int(listen_fd),
        **options,
    )
    lifeline = os.environ.get("RANKWISE_LIFELINE")
    if lifeline is not None:
        # No parent-death signal here: the end of this pipe says that the parent is gone.
        os.read(int(lifeline), 1)
        return
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
