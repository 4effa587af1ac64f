"""The flags of `rankwise doctor`."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.base.flags import Parser
from rankwise.base.host_list import expand_hosts, find_fault
from rankwise.cli.flag_values import Given, read_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Reader = Callable[[str], object] | tuple[str, ...] | None
    Row = tuple[str, str, Reader, object, str]

EXIT_CODES = "exit codes: 0 nothing fails (with --strict: and no warnings); 1 something does; 2 the check could not run"
_DESCRIPTION = """\
Check whether this host, or several together, can run a distributed job: software, GPUs, limits, storage, names, interfaces, firewalls,
clocks, and every link between hosts. Each finding comes with what to do about it."""
_SEVERAL = """\
Several hosts: start the same command on each of them (under srun or mpirun without any of these flags), or let ssh do it with --hosts.
They use the rendezvous address and port of the job."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; it raises a UsageError."""
    parser = Parser(prog="rankwise doctor", description=_DESCRIPTION, epilog=EXIT_CODES, allow_abbrev=False)
    parser.add_argument(
        "--only",
        action=Given,
        metavar="PROBE,...",
        type=_split,
        default=(),
        help="Run only these probes: ids or topics.",
    )
    parser.add_argument("--skip", metavar="PROBE,...", type=_split, default=(), help="Skip these probes.")
    parser.add_argument("--list", action="store_true", help="List all probes, and exit.")
    group: argparse._ActionsContainer = parser
    for (title, about), rows in _list_flags().items():
        group = parser.add_argument_group(title, about)
        for flag, metavar, read, default, text in rows:
            _add(group, flag, metavar, read, default, text)
    # What the doctor that --hosts starts over ssh is given.
    parser.set_defaults(token="")
    parser.add_argument("--expect", type=_split, default=(), help=argparse.SUPPRESS)
    for flag in ("--end-with-input", "--token-from-input"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    shown = group.add_mutually_exclusive_group()
    shown.add_argument("-v", "--verbose", action="store_true", help="For several hosts, show also what passed.")
    shown.add_argument("-q", "--quiet", action="store_true", help="Show problems only.")
    return parser


def _list_flags() -> dict[tuple[str, str | None], tuple[Row, ...]]:
    """Return the flags by group: each with the name and the reader of its value (of a switch none, of a choice all of them), its default, and what it means."""
    return {
        ("the job to run", None): (
            ("--nproc-per-node", "N", _ranks, None, "Ranks on each host (default: one a GPU, or what the environment says)."),
            ("--workers", "N", _count_from_zero, None, "Data-loading workers of each rank."),
            ("--script", "FILE", read_path, None, "The script: is it the same on all hosts?"),
            ("--checkpoints", "FOLDER", read_path, None, "Where checkpoints go: checks space, speed, atomic renames, shared or not."),
            ("--backend", "", ("gloo", "nccl"), "", "Backend of the job (default: nccl if there are GPUs)."),
            ("--python", "PROGRAM", str, "", "The interpreter of the ranks (default: as `rankwise run` chooses it)."),
        ),
        ("several hosts", _SEVERAL): (
            ("--nnodes", "N", _nodes, None, "Number of hosts (default: from the environment, or 1)."),
            ("--node-rank", "R", int, None, "Number of this host, from 0; node 0 hosts the rendezvous."),
            ("--master-addr", "ADDRESS", str, "", "Name or address of node 0."),
            ("--master-port", "PORT", _port, None, "Port there (default: 29500)."),
            ("--rdzv-endpoint", "HOST:PORT", str, "", "Both in one; the host with that address hosts the rendezvous."),
            ("--hosts", "A,B,...", _split_hosts, (), "Start it on these hosts over ssh; the first one is node 0."),
            ("--hostfile", "FILE", read_path, None, "The same from a file with one host per line, as for Open MPI and DeepSpeed."),
            ("--ssh", "COMMAND", str, "ssh", "ssh command to reach them, such as 'ssh -p 2222 -i key' (default: ssh)."),
            ("--arrival-timeout", "S", _seconds, 30.0, "Seconds to wait for hosts (default: 30)."),
            ("--token-file", "FILE", read_path, None, "A file whose first line is a token, the same on all hosts: it keeps out strangers, and other rendezvous at this port (--hosts makes one)."),
        ),
        ("output", None): (
            ("--format", "", ("text", "json"), "text", "Output for people, or for programs."),
            ("--strict", "", None, False, "Exit with 1 for warnings too."),
        ),
    }  # fmt: skip


def _add(group: argparse._ActionsContainer, flag: str, metavar: str, read: Reader, default: object, text: str) -> None:
    """Add a flag, in torchrun's two spellings if it has a value; a text must not be empty."""
    if read is None:
        group.add_argument(flag, action="store_true", help=text)
    elif isinstance(read, tuple):
        group.add_argument(flag, choices=read, default=default, help=text)
    else:
        names = dict.fromkeys((flag, f"--{flag[2:].replace('-', '_')}"))
        action = Given if read in {str, read_path, _split_hosts} else "store"
        group.add_argument(*names, action=action, type=read, default=default, metavar=metavar, help=text)


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in text.replace(",", " ").split()))


def _split_hosts(text: str) -> tuple[str, ...]:
    joined = ",".join(re.sub(r"\s*,\s*", ",", text).split())
    if fault := find_fault(joined):
        raise argparse.ArgumentTypeError(fault)
    return tuple(dict.fromkeys(expand_hosts(joined)))


def _ranks(text: str) -> int | None:
    """Read a number of ranks; None for one that is to be counted."""
    return None if text in {"auto", "gpu", "cpu", "xpu"} else _count(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _count_from_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


def _nodes(text: str) -> int:
    """Read a number of hosts, in torchrun's form, too: ``4:4`` is 4."""
    least, colon, most = text.partition(":")
    if colon and least.isdecimal() and most.isdecimal() and int(least) != int(most):
        raise argparse.ArgumentTypeError(
            f"{text!r} leaves open how many hosts to expect: pass how many there are now, as in --nnodes {most}"
        )
    return _count(least if colon and least == most else text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Return the hosts of a file: the first word of each line that is no comment, each once.

    Raises:
        UsageError: It can't be read, or names none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the host file {path} can't be read: {error}", hint="check the path") from error
    words = [line.partition("#")[0].split() for line in lines]
    # Open MPI writes the number of slots behind a colon, and others in a second word.
    names = [found[0].partition(":")[0] if found[0].count(":") == 1 else found[0] for found in words if found]
    if fault := next(filter(None, map(find_fault, names)), ""):
        raise UsageError(f"the host file {path} can't be read: {fault}", hint="one name or address a line")
    hosts = tuple(dict.fromkeys(host for name in names for host in expand_hosts(name)))
    if not hosts:
        raise UsageError(f"the host file {path} names no host", hint="one name or address a line")
    return hosts


def check_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse flags that contradict each other.

    Raises:
        UsageError: They do.
    """
    _check_ssh(args, parser)
    _check_rendezvous(args, parser)


def _check_ssh(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not args.hosts and args.hostfile is None:
        return
    if args.hosts and args.hostfile is not None:
        parser.error("--hosts and --hostfile mean the same thing: pass one of them")
    flag = "--hosts" if args.hosts else "--hostfile"
    if args.nnodes is not None or args.node_rank is not None:
        parser.error(f"{flag} starts the nodes itself: leave out --nnodes and --node-rank")
    if args.rdzv_endpoint:
        parser.error(
            f"{flag} uses the first host for the rendezvous: leave out --rdzv-endpoint; --master-addr and --master-port change it"
        )
    if sys.platform == "win32":
        parser.error(f"{flag} needs a system with ssh and POSIX shells: start the command on each host yourself")


def _check_rendezvous(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.rdzv_endpoint and (args.master_addr or args.master_port):
        parser.error("--rdzv-endpoint and --master-addr/--master-port mean the same thing: pass one of them")
    if args.node_rank is not None and args.nnodes is None:
        parser.error("--node-rank without --nnodes: how many hosts are there?")
    if args.nnodes is None:
        return
    if args.node_rank is not None and not 0 <= args.node_rank < args.nnodes:
        parser.error(
            f"--node-rank {args.node_rank} with --nnodes {args.nnodes}: nodes are numbered from 0 to {args.nnodes - 1}"
        )
    if args.nnodes > 1 and not (args.master_addr or args.rdzv_endpoint):
        parser.error(f"--nnodes {args.nnodes}: pass their rendezvous: --master-addr ADDRESS-OF-NODE-0")


def read_token(path: Path) -> str:
    """Return the word in a file.

    Raises:
        UsageError: It can't be read, or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {path} can't be read: {error}", hint="its first line is the token") from error
    if not lines:
        raise UsageError(
            f"--token-file {path} is empty", hint="openssl rand -hex 16 > FILE; the same file on all hosts"
        )
    return lines[0]
