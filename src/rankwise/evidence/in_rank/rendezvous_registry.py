"""The registry of a job: each rank writes at the store who it is, and whoever reads it sees who is absent, double or odd.

It stands alone (standard library, and a store that is handed in): ``rankwise.init()`` uses it, and so does the watch
over scripts that call ``init_process_group`` themselves, in a Python that may have no rankwise.

Keys, under a prefix of the job's own: ``seats`` counts those who came, ``seat/N`` is the record of the N-th, ``rank/R``
counts those who claim rank R, ``verdict`` is what was found, ``heard`` counts those who leave because of it. A rank that comes needs four requests, however many ranks
there are; only the last one to come, or one that has waited in vain, reads them all.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from typing import Any

Record = dict[str, Any]
#: A problem that can't go well (``error``) or may (``doubt``), and what to do.
Problem = dict[str, str]

_MOST_NAMED = 8
_LENIENT = "; RANKWISE_HANDSHAKE=lenient makes it a warning"
_CONFLICTS = {"clash", "out of range", "world sizes", "gone"}


# ------------------------------------------------------------------ who I am


def describe_process(**known: Any) -> Record:
    """Return what a rank tells of itself.

    Args:
        **known: What the caller knows better: ``rank``, ``world_size``, ``local_rank``, ``backend``, ``device``, …

    Returns:
        A record that JSON can hold.
    """
    torch = sys.modules.get("torch")
    path = _find_script()
    record = {
        "host": socket.gethostname(), "boot": _read("/proc/sys/kernel/random/boot_id"), "space": _read_link("/proc/self/ns/pid"),
        "pid": os.getpid(), "parent": os.getppid(), "given": os.environ.get("LOCAL_RANK", ""), "started": _read_start("self"), "torch": str(getattr(torch, "__version__", "")),
        "python": ".".join(str(part) for part in sys.version_info[:3]), "script": path, "script_hash": _hash_file(path),
        "job": os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", ""),
        "loopback": "", "device": None, "local_rank": None, "backend": "", "nccl": "",
    }  # fmt: skip
    return {**record, **known}


def find_loopback(interface: str) -> str:
    """Return the loopback address under which other hosts would look for this one; empty if all is well.

    Args:
        interface: What GLOO_SOCKET_IFNAME says; if it says something, the host's name is not asked.
    """
    if interface:
        return ""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return address if address.startswith("127.") else ""


def is_gone(record: Record) -> bool:
    """Whether the process of a record has ended, as far as can be seen from here: on another host it can't."""
    if not record.get("boot"):
        return _is_gone_by_pid(record)
    if record["boot"] != _read("/proc/sys/kernel/random/boot_id"):
        return False
    if record.get("space") != _read_link("/proc/self/ns/pid"):
        return False
    return bool(_read_start(str(record["pid"])) != record["started"])


def _is_gone_by_pid(record: Record) -> bool:
    """Ask the system where there is no /proc, as on macOS."""
    if os.name != "posix" or record["host"] != socket.gethostname():
        return False
    try:
        os.kill(int(record["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _find_script() -> str:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return str(getattr(spec, "origin", None) or getattr(main, "__file__", None) or "")


def _hash_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read_start(pid: str) -> str:
    """Return when a process was started, in the kernel's ticks: pids are used again."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


# ------------------------------------------------------------------ the registry


class RendezvousRegistry:
    """The registry of one rendezvous."""

    def __init__(self, store: Any, record: Record) -> None:
        self._store, self.record = store, record
        self.seat = 0

    def enter(self) -> list[Problem]:
        """Write this rank down.

        Returns:
            What already shows to be wrong by comparison with the first that came; empty if nothing does.
        """
        self.seat = int(self._store.add("seats", 1))
        self._store.set(f"seat/{self.seat}", json.dumps(self.record))
        claims = int(self._store.add(f"rank/{self.record['rank']}", 1))
        if self.seat == 1:
            return [problem for problem in judge([self.record], None) if problem["kind"] in _CONFLICTS]
        first = json.loads(self._store.get("seat/1"))
        if claims > 1 or any(problem["kind"] in _CONFLICTS for problem in judge([first, self.record], None)):
            # Those that came before, and saw nothing wrong, find this when they look again.
            self._store.set("conflict", "1")
            return judge(self.read(), None)
        return []

    @property
    def is_contested(self) -> bool:
        """Whether any rank that came later has found a conflict."""
        return bool(self._store.check(["conflict"]))

    @property
    def is_full(self) -> bool:
        """Whether this rank was the last to come."""
        return self.seat >= int(self.record["world_size"])

    def read(self) -> list[Record]:
        """Return the records of all who have come, in the order of their coming."""
        count = int(self._store.add("seats", 0))
        return [json.loads(self._store.get(f"seat/{number}")) for number in range(1, count + 1)]

    def publish(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Write the verdict down, unless another rank has; return the one that counts."""
        found = self._store.compare_set("verdict", "", json.dumps(verdict))
        return dict(json.loads(found))

    def find_verdict(self) -> dict[str, Any] | None:
        """Return the verdict if there is one by now."""
        return dict(json.loads(self._store.get("verdict"))) if self._store.check(["verdict"]) else None

    def wait_verdict(self, timeout: Any) -> dict[str, Any] | None:
        """Wait for the verdict of whoever finds out.

        Args:
            timeout: A timedelta.

        Returns:
            The verdict; None if there was none in time.
        """
        try:
            self._store.wait(["verdict"], timeout)
        except RuntimeError:  # DistStoreError is one
            return self.find_verdict()
        return dict(json.loads(self._store.get("verdict")))

    def count_readers(self, more: int) -> tuple[int, int]:
        """Count ``more`` among those who have read a bad verdict; return how many have, and how many came."""
        return int(self._store.add("heard", more)), int(self._store.add("seats", 0))


def conclude(records: list[Record], waited_s: float | None, time_s: float) -> dict[str, Any]:
    """Return the verdict over those who came.

    Args:
        records: All who have come.
        waited_s: How long they have been waited for; None if the last has just come.
        time_s: The time of day here, by which others can tell how far their clocks are off.
    """
    problems = judge(records, waited_s)
    verdict: dict[str, Any] = {"problems": problems, "time_s": time_s, "nodes": None}
    hosts = list(dict.fromkeys(_machine(record) for record in sorted(records, key=_rank)))
    verdict["num_nodes"] = len(hosts)
    if any(record["local_rank"] is None for record in records):
        # Somebody can't tell its place on its host: each finds it in here.
        verdict["nodes"] = [
            [record["rank"] for record in sorted(records, key=_rank) if _machine(record) == host] for host in hosts
        ]
    return verdict


# ------------------------------------------------------------------ the judge


def judge(records: list[Record], waited_s: float | None) -> list[Problem]:
    """Find what can't go well among those who came.

    Args:
        records: Whoever has come.
        waited_s: How long the absent have been waited for; None while they may still come.

    Returns:
        The problems, the gravest first: those after it may only follow from it.
    """
    sizes = _group(records, "world_size")
    if len(sizes) > 1:
        shown = "; ".join(f"{size} on {_name_all(members)}" for size, members in sizes.items())
        return [
            _error(
                "world sizes",
                f"the ranks disagree about the world size: {shown}",
                "start all ranks of a job with the same WORLD_SIZE (--nnodes times --nproc-per-node)",
            )
        ]
    world_size = int(records[0]["world_size"])
    problems = _find_misplaced(records, world_size)
    if not problems and waited_s is not None:
        problems += _find_absent(records, world_size, waited_s)
    return problems or [
        *_find_shared_devices(records),
        *_find_different(records),
        *_find_loopback_hosts(records),
    ]


def _find_misplaced(records: list[Record], world_size: int) -> list[Problem]:
    problems, rest = [], []
    absent = sorted(set(range(world_size)) - {record["rank"] for record in records})
    nobody = f"; no process claims {name_ranks(absent)} so far" if absent else ""
    for rank, members in _group(records, "rank").items():
        if len(members) < 2:
            continue
        what = f"{len(members)} processes claim rank {rank}"
        if _are_siblings(members):
            members.sort(key=lambda member: (len(member["given"]), member["given"]))
            where = " and ".join(
                f"{_place(member)} with LOCAL_RANK {member['given']}" for member in members[:_MOST_NAMED]
            )
            found = _error(
                "clash",
                f"{what}: {where}{nobody}",
                "don't set RANK or WORLD_SIZE in the script, nor pass rank=: the launcher gives each process its own RANK",
            )
            problems.append(found | {"local_ranks": " ".join(member["given"] for member in members)})
        else:
            where = " and ".join(_place(member) for member in members[:_MOST_NAMED])
            rest.append(
                _error(
                    "clash",
                    f"{what}: {where}{_describe_jobs(members)}{nobody}",
                    "give each process its own RANK (torchrun, rankwise: its own --node-rank), and terminate what is left of an earlier job",
                )
            )
    # Processes of one launch are no leftovers: those that claim a place twice have come and gone because of that.
    gone = [record for record in records if is_gone(record)]
    if gone:
        problems.append(
            _error(
                "gone",
                f"{_name_all(gone)}: left before all had joined",
                "look at its output; if it is of an earlier run, take another MASTER_PORT or a new file",
            )
        )
    wrong = [record for record in records if not 0 <= record["rank"] < world_size]
    if wrong:
        problems.append(
            _error(
                "out of range",
                f"{_name_all(wrong)}: the ranks of a world of {world_size} are 0 to {world_size - 1}",
                "give each process a RANK of its own below WORLD_SIZE; on several nodes, continue the numbers from node to node",
            )
        )
    return problems + rest


def _are_siblings(members: list[Record]) -> bool:
    """Whether one launcher has started them, each with a local rank of its own."""
    parents = {(_machine(member), member["space"], member.get("parent")) for member in members}
    given = {member.get("given") for member in members}
    return len(parents) == 1 and len(given) == len(members) and not given & {None, ""}


def _describe_jobs(members: list[Record]) -> str:
    """Say that doubles come from different jobs, where their ids tell so; alone, ids that differ are no mistake."""
    jobs = list(dict.fromkeys(record["job"] for record in members if record["job"]))
    return f" (of the jobs {', '.join(jobs)})" if len(jobs) > 1 else ""


def _find_absent(records: list[Record], world_size: int, waited_s: float) -> list[Problem]:
    absent = sorted(set(range(world_size)) - {record["rank"] for record in records})
    if not absent:
        return []
    verb = "has" if len(absent) == 1 else "have"
    return [_error("absent", f"after {round(waited_s, 1):g} s {name_ranks(absent)} of {world_size} {verb} not arrived; arrived: {_name_all(records)}",
                   f"start {'it' if len(absent) == 1 else 'them'}, or find out why {'it' if len(absent) == 1 else 'they'} ended or went elsewhere "
                   "before init; WORLD_SIZE must be the number of processes")]  # fmt: skip


def _find_shared_devices(records: list[Record]) -> list[Problem]:
    # NCCL refuses it after a while, with "Duplicate GPU detected"; with Gloo it is slow at worst.
    users: dict[str, list[Record]] = {}
    for record in records:
        if record["device"] and "nccl" in record["backend"]:
            users.setdefault(f"{record['boot'] or record['host']}/{record['device']}", []).append(record)
    fix = "pick the device by LOCAL_RANK, and start no more ranks on a host than it has visible GPUs"
    return [
        _error("device", f"{_name_all(members)} use the same GPU {members[0]['device']}", fix)
        for members in users.values()
        if len(members) > 1
    ]


def _find_different(records: list[Record]) -> list[Problem]:
    """Tell what differs between ranks and should not."""
    problems = []
    for key, kind, what, fix in (
        ("backend", "backends", "backends", "pass the same backend on all ranks, or none"),
        ("torch", "different", "versions of torch", f"install the same torch on all hosts{_LENIENT}"),
        ("nccl", "different", "versions of NCCL", f"install the same NCCL on all hosts{_LENIENT}"),
    ):
        if len(groups := _group(records, key)) > 1:
            problems.append(_error(kind, f"the ranks have different {what}: {_name_groups(groups)}", fix))
    # Two files started by hand are a job too: only one file of two contents is a mistake.
    scripts: dict[str, list[Record]] = {}
    for record in records:
        scripts.setdefault("/".join(record["script"].replace("\\", "/").split("/")[-2:]), []).append(record)
    for name, members in scripts.items():
        if name and len(groups := _group(members, "script_hash")) > 1:
            problems.append(
                _error(
                    "different",
                    f"{name} is not the same file on all ranks: {_name_groups(groups)}",
                    f"copy the same code to all hosts, or start it from a shared folder{_LENIENT}",
                )
            )
    return problems


def _find_loopback_hosts(records: list[Record]) -> list[Problem]:
    hosts = {record["host"] for record in records}
    lost = [record for record in sorted(records, key=_rank) if record["loopback"] and "gloo" in record["backend"]]
    if len(hosts) < 2 or not lost:
        return []
    shown = ", ".join(dict.fromkeys(f"{record['host']} is {record['loopback']}" for record in lost))
    return [
        _error(
            "address",
            f"{len(hosts)} hosts, some of which resolve their own names to loopback addresses, where Gloo listens: {shown}",
            "set GLOO_SOCKET_IFNAME to the interface that the hosts share (`ip -br addr` lists them), or fix /etc/hosts",
        )
    ]


def _error(kind: str, text: str, hint: str) -> Problem:
    return {"kind": kind, "text": text, "hint": hint}


def _name_groups(groups: dict[Any, list[Record]]) -> str:
    return "; ".join(f"{value or 'none'}: {_name_all(members)}" for value, members in groups.items())


def _machine(record: Record) -> tuple[str, str]:
    # Two machines may have one name, and two containers of one machine have two.
    return record["host"], record["boot"]


def _rank(record: Record) -> int:
    return int(record["rank"])


def _group(records: list[Record], key: str) -> dict[Any, list[Record]]:
    groups: dict[Any, list[Record]] = {}
    for record in sorted(records, key=_rank):
        groups.setdefault(record[key], []).append(record)
    return groups


def _place(record: Record) -> str:
    return f"pid {record['pid']} on {record['host']}" + (" (it has ended)" if is_gone(record) else "")


def _name_all(records: list[Record]) -> str:
    ordered = sorted(records, key=_rank)
    names = [f"rank {record['rank']} ({_place(record)})" for record in ordered[:_MOST_NAMED]]
    rest = len(ordered) - len(names)
    return ", ".join(names) + (f" and {rest} more" if rest > 0 else "")


def name_ranks(ranks: list[int]) -> str:
    """Name ranks, in ascending order, in few words: ``ranks 0-3, 7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:_MOST_NAMED])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (", …" if len(spans) > _MOST_NAMED else "")
