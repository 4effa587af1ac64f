"""`rankwise resident`: the warm servers that runs have left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base import terminal
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.flags import Parser
from rankwise.cli.printing import put
from rankwise.doctor.units import align, format_age, format_bytes, format_count
from rankwise.launcher.resident import list_servers, stop_servers

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """List or end this user's resident servers; return the exit code."""
    parser = Parser(
        prog="rankwise resident",
        description="The warm servers that `rankwise run --resident` has left behind: they end by themselves after 15 minutes without "
        "a run (RANKWISE_RESIDENT_IDLE, in seconds), when memory is short, and when what they have loaded changes on disk.",
    )
    what = "stop ends all of them; runs continue."
    parser.add_argument("what", nargs="?", choices=("list", "stop"), default="list", help=what)
    if parser.parse_args(argv).what == "stop":
        pids = stop_servers()
        put(f"ended {format_count(len(pids), 'resident server')}\n")
        return 0
    servers = list_servers()
    if not servers:
        put("no resident server: `rankwise run --resident` leaves one behind\n")
        return 0
    rows = [("pid", "key", "age", "memory", "runs", "running", "torch", "python")]
    rows += [
        (
            str(one.pid), one.key, format_age(SYSTEM_CLOCK.time() - one.begun), format_bytes(one.memory_bytes), str(one.served), str(one.running),
            one.torch, f"{one.python}{' --preload ' + ','.join(one.asked) if one.asked else ''}",
        )
        for one in servers
    ]  # fmt: skip
    put(terminal.wrap("\n".join([*align(rows), ""]), terminal.width(1)))
    return 0
