"""How long a job stands still when a rank is killed: from `kill -9` to the next all_reduce of the restarted ranks.

Two ranks on Gloo meet, reduce once, and rank 1 kills itself; the launcher starts all again (--max-restarts 2).
Run it as `python benchmarks/restart.py`; it prints ours, torchrun's and the ratio, from one run on this machine.
torchrun keeps one store over its restarts, with the dead ranks' addresses in it: it may never get there, and is
then stopped after LIMIT_S.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 5
LIMIT_S = 45.0

_SCRIPT = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
with open(("after" if again else "before") + os.environ["RANK"], "w") as file:
    file.write(str(time.monotonic()))
if not again and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if not again:
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def measure(launcher: list[str]) -> float | None:
    """Return the seconds without a working group in one job; None if it never came back."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(_SCRIPT)
        command = [*launcher, "--nproc-per-node", "2", "--max-restarts", "2", "train.py"]
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        after = [folder / "after0", folder / "after1"]
        if not all(path.exists() for path in after):
            return None
        return max(float(path.read_text()) for path in after) - float((folder / "before1").read_text())


def main() -> None:
    """Measure both, alternating, and print the ratio."""
    ours: list[float | None] = []
    theirs: list[float | None] = []
    for number in range(ROUNDS):
        ours.append(measure([sys.executable, "-m", "rankwise.run"]))
        theirs.append(measure([sys.executable, "-m", "torch.distributed.run"]))
        print(f"round {number + 1}: rankwise {_show(ours[-1])}, torchrun {_show(theirs[-1])}", flush=True)
        time.sleep(0.5)
    back = [one for one in theirs if one is not None]
    mine = statistics.median(one for one in ours if one is not None)
    print(f"rankwise: {mine:.2f} s (median), back in {sum(one is not None for one in ours)} of {ROUNDS}")
    print(
        f"torchrun: {_show(statistics.median(back) if back else None)} (median), back in {len(back)} of {ROUNDS}"
    )
    print(f"ratio: {statistics.median(back) / mine:.1f}" if back else f"ratio: above {LIMIT_S / mine:.0f}")


def _show(seconds: float | None) -> str:
    return f"not within {LIMIT_S:.0f} s" if seconds is None else f"{seconds:.2f} s"


if __name__ == "__main__":
    main()
