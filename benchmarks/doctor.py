"""How long `rankwise doctor` takes: on one host beside tools that print an environment, and by the number of hosts.

One host: the whole command, as a user would start it, beside `python -m torch.utils.collect_env` and `accelerate env`, where they are
installed. These print what there is and judge nothing, so the ratio tells only whether a verdict costs more than a list.

Several hosts: all are played by this machine, a thread each with an address of its own in 127.0.0.0/8, so that every connection is
real: N hosts try N x (N - 1) ways. A cluster does that on N machines at once; here it shares the cores of one, so the seconds are
an upper bound. Probes of the single hosts are left out (they take the same time on each), and so is the all-reduce. `links` are the
seconds of the meeting with all ways tried, `speed` with latency and bandwidth measured, too.

A dead host: one of the set never comes; how long until it is named, with an arrival timeout of 5 s.

Run it as `python benchmarks/doctor.py [--hosts 2,4,...]`. The machine should be idle.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from parts.jobs import describe_host

from rankwise.base.os_calls import raise_file_limit
from rankwise.doctor.host import Host
from rankwise.doctor.multi_host.examine_hosts import examine_hosts
from rankwise.doctor.multi_host.plan import Plan

if TYPE_CHECKING:
    from rankwise.doctor.multi_host.cluster_report import ClusterReport

HOSTS = (2, 4, 8, 16, 32, 64, 128, 256)
#: With these, everything is through within a minute on any machine.
MEASURED_UP_TO = 32
ARRIVAL_S = 5.0


def time_command(command: list[str]) -> float:
    """Return the seconds of a command, the best of three."""
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=300,
            check=False,
        )
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def find_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def play(num_hosts: int, *, measure: bool, absent: int = 0, arrival_s: float = 120.0) -> tuple[float, ClusterReport]:
    """Let this machine play some hosts, and return the seconds and what they found.

    Args:
        num_hosts: How many are to come.
        measure: Whether latency and bandwidth are measured.
        absent: How many of them never come.
        arrival_s: How long they are waited for.

    Raises:
        RuntimeError: A host did not get through.
    """
    port = find_port()
    results: dict[int, ClusterReport] = {}
    failed: list[Exception] = []

    def take_part(number: int) -> None:
        plan = Plan(
            endpoint_host="127.1.0.1", endpoint_port=port, num_hosts=num_hosts, node_rank=number, is_coordinator=number == 0, measure=measure,
            listen_address=f"127.1.{number // 250}.{number % 250 + 1}", token="benchmark", arrival_timeout_s=arrival_s,
            timeout_factor=10,
        )  # fmt: skip
        try:
            results[number] = examine_hosts(Host(name=f"host{number}", env={}), (), plan, lambda _line: None)
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(num_hosts - absent)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if failed:
        raise RuntimeError(f"{len(failed)} of {num_hosts} hosts did not get through: {failed[0]!r}")
    return seconds, results[0]


def show_one_host() -> None:
    """Print the seconds of the whole command beside its peers'."""
    ours = time_command([sys.executable, "-m", "rankwise", "doctor"])
    print(f"one host          {'seconds':>8}  ours / theirs")
    print(f"rankwise doctor   {ours:8.2f}")
    peers = {"collect_env": [sys.executable, "-m", "torch.utils.collect_env"]}
    if accelerate := shutil.which("accelerate"):
        peers["accelerate env"] = [accelerate, "env"]
    for name, command in peers.items():
        theirs = time_command(command)
        print(f"{name:<17} {theirs:8.2f}  {ours / theirs:.2f}")


def show_several(numbers: list[int]) -> None:
    """Print the seconds by the number of hosts."""
    print(f"\n{'hosts':>5}  {'ways':>6}  {'links (s)':>9}  {'speed (s)':>9}  alarms")
    for number in numbers:
        links, found = play(number, measure=False)
        bad = [one for one in found.readings if one.verdict in {"fail", "warn"}]
        speed = ""
        if number <= MEASURED_UP_TO:
            seconds, measured = play(number, measure=True)
            speed = f"{seconds:.2f}"
            bad += [one for one in measured.readings if one.verdict in {"fail", "warn"}]
        opened = sum(link.outcome == "ok" for link in found.links)
        print(f"{number:5}  {opened:6}  {links:9.2f}  {speed:>9}  {len(bad)}", flush=True)
        for one in bad[:3]:
            print(f"       {one.verdict} {one.probe}: {one.what}")


def show_absent() -> None:
    """Print how long it takes to name a host that never comes."""
    for number in (4, 32):
        seconds, found = play(number, measure=False, absent=1, arrival_s=ARRIVAL_S)
        print(
            f"\n1 of {number} hosts never comes: {', '.join(found.missing)} named after {seconds:.2f} s (arrival timeout {ARRIVAL_S:.0f} s)"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--hosts", default=",".join(map(str, HOSTS)), help="Numbers of hosts, with commas between them."
    )
    args = parser.parse_args()
    raise_file_limit()
    print(describe_host())
    show_one_host()
    show_several([int(number) for number in args.hosts.split(",")])
    show_absent()


if __name__ == "__main__":
    main()
