"""Serve the store that the ranks of one attempt meet at, on a socket that the parent already listens on.

A process of its own, so that neither rank 0 nor the parent takes the store with it. Started anew for every
attempt: addresses that dead ranks left in a store keep the next attempt from meeting.
"""

import importlib.util
import os
import signal
import sys
from datetime import timedelta
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    # Only the parent decides when the store goes: a `pkill -f` or a Ctrl-C meant for the job must not take it first.
    for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, _name):
            signal.signal(getattr(signal, _name), signal.SIG_IGN)
    del sys.path[0]  # our own folder: its names must not shadow anybody's


def import_stores(*more: str) -> None:
    """Import torch's C++ alone, and what stands on it, where torch is not there yet: a quarter of the CPU seconds of all of torch, which is imported where that fails.

    Args:
        *more: Modules of torch.distributed that need no more than its stores.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.loader is None:
        return
    if more and entry_points(group="torchrun.handlers"):
        return  # loaded with the rendezvous, and may need anything
    torch, distributed = importlib.util.module_from_spec(spec), ModuleType("torch.distributed")
    distributed.__path__ = [f"{folder}/distributed" for folder in torch.__path__]
    sys.modules.update({"torch": torch, "torch.distributed": distributed})
    try:
        core: Any = importlib.import_module("torch._C")
        is_made = core._c10d_init()
        core._c10d_init = lambda: is_made  # it can't be made again, if all of torch has to be imported
        vars(torch).update(_C=core, distributed=distributed)
        offered = {name: one for name, one in vars(core._distributed_c10d).items() if name[:2] != "__"}
        errors = {name[1:]: one for name, one in vars(core).items() if name.startswith("_Dist")}
        vars(distributed).update(offered | errors)
        for name in more:
            importlib.import_module(name)
    except Exception:  # noqa: BLE001 - whatever a later torch needs
        for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
            del sys.modules[name]
        vars(torch).pop("distributed", None)
        spec.loader.exec_module(torch)


def main(listen_fd: int | str, port: int | str) -> None:
    """Serve until we are killed; also called in a fork of the warm server."""
    import_stores()
    from torch.distributed import TCPStore

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
