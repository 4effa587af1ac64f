"""From the command line to what it asks for."""

from __future__ import annotations

import difflib
import itertools
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.environ import environ, is_on
from rankwise.base.errors import UsageError
from rankwise.base.roles import COUNTS, read_counts
from rankwise.launcher.run_flags import OWN_FLAGS, build_parser
from rankwise.launcher.spec import ON_HANG, LaunchSpec, Logs, Program, RendezvousConfig, Std, may_watch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rankwise.launcher.spec import OnHang

#: Known everywhere, also where the system lacks them: torchrun's default names two of them.
_POSIX_SIGNALS = ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_TYPOGRAPHIC_DASH = "[\u2010-\u2015\u2212]"

__all__ = ["OWN_FLAGS", "build_parser", "parse"]


def parse(argv: Sequence[str], env: Mapping[str, str] | None = None) -> LaunchSpec:
    """Turn a command line into a spec.

    Raises:
        UsageError: The command is wrong; it says what was typed and what was probably meant.
    """
    env = environ() if env is None else env
    try:
        args = build_parser(env).parse_args(list(argv))
    except UsageError as error:
        raise _explain(error, argv) from None
    for name, value in vars(args).items():
        # argparse makes an empty list of `--flag=--`.
        if value == [] and name not in {
            "training_script_args",
            "duplicate_stdout_filters",
            "duplicate_stderr_filters",
        }:
            raise UsageError(f"--{name.replace('_', '-')} has no value", hint="see `rankwise run --help`")
    _refuse_local_rank(argv[: len(argv) - len(args.training_script_args)])
    # What a text processor made of "--" is no flag: argparse takes it for the script.
    if re.match(_TYPOGRAPHIC_DASH, args.training_script):
        meant = "--" + re.sub(rf"^(?:{_TYPOGRAPHIC_DASH}|-)+", "", args.training_script)
        raise UsageError(
            f"{args.training_script!r} begins with a typographic dash, not with '--'", hint=f"type {meant}"
        )
    return _to_spec(args, env)


def _explain(error: UsageError, argv: Sequence[str]) -> UsageError:
    """Tell when the script went into a flag whose own value was forgotten."""
    for flag, word in itertools.pairwise(argv):
        if error.message == "no script given" and flag.startswith("--") and word.endswith(".py"):
            return UsageError(f"{flag} took {word!r} as its value, so no script is left", hint=f"give {flag} a value")
    return error


def _refuse_local_rank(argv: Sequence[str]) -> None:
    # argparse would take it for the beginning of --local-ranks-filter, and hide the output of all other ranks.
    for word in argv:
        if word.partition("=")[0] in {"--local_rank", "--local-rank"}:
            raise UsageError(
                f"{word}: the launcher passes each rank its LOCAL_RANK in the environment",
                hint="leave it out",
            )


def _to_spec(args: argparse.Namespace, env: Mapping[str, str]) -> LaunchSpec:
    nodes = _parse_nnodes(args.nnodes)
    if args.standalone and nodes[0] > 1:
        raise UsageError(
            f"--standalone means one node, but --nnodes {args.nnodes} asks for {nodes[0]} or more",
            hint="drop --standalone and give --master-addr or --rdzv-endpoint, or drop --nnodes",
        )
    if args.standalone:
        nodes = (1, 1)
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts {args.max_restarts}: expected 0 or more")
    if args.logs_specs not in {None, "default"}:
        raise UsageError(
            f"--logs-specs {args.logs_specs}: plug-ins of torchrun's agent can't be used here",
            hint="use --log-dir, -r and -t, or start this job with torchrun",
        )
    if args.module and args.no_python:
        raise UsageError("--module and --no-python contradict each other", hint="drop one of them")
    shutdown = args.shutdown_timeout
    if shutdown is None:
        shutdown = _read_number(env, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)
    rendezvous, master_addr, master_port = _to_rendezvous(args, nodes[1])
    nproc = _apply_role_counts(args, nodes)
    return LaunchSpec(
        program=Program(script=args.training_script, args=tuple(args.training_script_args), how=_how_to_run(args)),
        nproc_per_node=nproc,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        node_rank=args.node_rank,
        max_restarts=args.max_restarts,
        monitor_interval_s=args.monitor_interval,
        shutdown_timeout_s=float(shutdown),
        join_every_s=args.join_every,
        role=args.role,
        signals=_parse_signals(args.signals_to_handle),
        numa_binding=args.numa_binding,
        virtual_local_rank=args.virtual_local_rank,
        report=args.report,
        hang_timeout_s=args.hang_timeout,
        on_hang=_to_on_hang(args.on_hang, env),
        strict=args.strict,
        # --strict is typed for this run: a variable that is set for all of them does not switch its check off.
        check=(args.strict or is_on("RANKWISE_CHECK", default=True, env=env))
        if args.check is None
        else bool(args.check),
        logs=_to_logs(args, env),
        rendezvous=rendezvous,
        master_addr=master_addr,
        master_port=master_port,
        cold=args.cold or is_on("RANKWISE_COLD", env=env),
        resident=args.resident,
        preload=_parse_preload(args.preload if args.preload is not None else env.get("RANKWISE_PRELOAD", "")),
        by_variable=frozenset(f"--{name[4:].lower().replace('_', '-')}" for name in env if name.startswith("PET_")),
        watch=may_watch(env) if args.watch is None else bool(args.watch),
        variables=((COUNTS, args.role_counts),) if args.role_counts else (),
        role_counts=read_counts(args.role_counts or ""),
    )


def _apply_role_counts(args: argparse.Namespace, nodes: tuple[int, int]) -> str:
    """Return --nproc-per-node, which --role-counts gives where all nodes get equally many ranks, and must not contradict on one."""
    nproc = str(args.nproc_per_node)
    if args.role_counts is None:
        return nproc
    if not re.fullmatch(r"\w+=[1-9]\d*(,\w+=[1-9]\d*)*", args.role_counts):
        raise UsageError(
            f"--role-counts {args.role_counts!r}: expected ROLE=NUMBER",
            hint="as in ps=2,worker=6, without spaces",
        )
    counts = read_counts(args.role_counts)
    total = sum(number for _, number in counts)
    if len({role for role, _ in counts}) < len(counts):
        raise UsageError(f"--role-counts {args.role_counts} names a role twice", hint="give each role once")
    if nodes[1] > 1:
        share, rest = divmod(total, nodes[0])
        is_even = nodes[0] == nodes[1] and not rest
        return str(share) if nproc == "1" and is_even else nproc
    if nproc not in {"1", str(total)}:
        raise UsageError(
            f"--nproc-per-node {nproc}, and --role-counts {args.role_counts} makes {total} ranks",
            hint="leave out --nproc-per-node",
        )
    return str(total)


def _to_on_hang(given: str | None, env: Mapping[str, str]) -> OnHang | None:
    value = given or env.get("RANKWISE_ON_HANG", "").strip().lower()
    if value and value not in ON_HANG:
        raise UsageError(f"RANKWISE_ON_HANG={value!r} is not one of {', '.join(ON_HANG)}")
    return next((one for one in ON_HANG if one == value), None)


def _parse_preload(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name for name in re.split(r"[,\s]+", text) if name))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"--preload {text}: {name!r} is not a module name",
                hint="names with commas between them: --preload transformers,my_package.models",
            )
    return names


def _how_to_run(args: argparse.Namespace) -> str:
    if args.run_path:
        return "run_path"
    if args.no_python:
        return "program"
    return "module" if args.module else "script"


def _to_rendezvous(args: argparse.Namespace, max_nodes: int) -> tuple[RendezvousConfig, str | None, int | None]:
    """Return where the nodes meet, and the address and port that the ranks are told, if they are fixed."""
    conf = tuple(_parse_conf(args.rdzv_conf).items())
    if args.standalone:
        return RendezvousConfig(local_addr=args.local_addr, run_id=""), None, None
    endpoint, port, addr = args.rdzv_endpoint, args.master_port, args.master_addr
    run_id = args.rdzv_id
    if args.rdzv_backend == "static":
        if endpoint:
            addr, port = _split_endpoint(endpoint)
        elif port is None and max_nodes == 1:
            # torchrun picks a free port then, and names the job by a random id.
            return RendezvousConfig(local_addr=args.local_addr, run_id=""), None, None
        port = 29500 if port is None else port
        endpoint = f"{addr}:{port}"
    else:
        addr = port = None
    if port is not None and not 0 <= port < 65536:
        raise UsageError(
            f"{port} is not a TCP port",
            hint="one from 1024 to 65535; on one node, leave it out: a free one is taken",
        )
    rendezvous = RendezvousConfig(
        backend=args.rdzv_backend, endpoint=endpoint, run_id=run_id, conf=conf, local_addr=args.local_addr
    )
    return rendezvous, addr, port


def _to_logs(args: argparse.Namespace, env: Mapping[str, str]) -> Logs:
    folder = None if args.log_dir is None else Path(args.log_dir)
    if folder is not None and folder.is_file():
        raise UsageError(f"--log-dir {folder} is a file", hint="name a folder")
    try:
        shown = frozenset(map(int, args.local_ranks_filter.split(","))) if args.local_ranks_filter else None
    except ValueError:
        raise UsageError(
            f"--local-ranks-filter {args.local_ranks_filter!r} is not a list of ranks",
            hint="give numbers, as in 0,1,2",
        ) from None
    return Logs(
        folder=folder,
        redirects=_parse_std("--redirects", args.redirects),
        tee=_parse_std("--tee", args.tee),
        shown_ranks=shown,
        out_filters=tuple(args.duplicate_stdout_filters),
        err_filters=tuple(args.duplicate_stderr_filters),
        prefix=args.log_line_prefix_template
        or env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${local_rank}]:"),
    )


def _parse_std(flag: str, value: str) -> dict[int | None, Std]:
    """Read ``3`` or ``0:1,1:2``."""
    if re.fullmatch(r"[0-3]", value):
        return {None: Std(int(value))}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        raise UsageError(f"{flag} {value!r}: expected 0, 1, 2 or 3, or local rank and number as in 0:1,1:2")
    pairs = [item.split(":") for item in value.split(",")]
    return {int(rank): Std(int(std)) for rank, std in pairs}


def _parse_nnodes(value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", value)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {value!r}: expected a number, or MIN:MAX as in 1:4")
    return low, high


def _parse_conf(text: str) -> dict[str, str]:
    conf = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise UsageError(f"--rdzv-conf {text!r}: expected KEY=VALUE,KEY=VALUE")
        conf[key.strip()] = value.strip()
    return conf


def _split_endpoint(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal():
        raise UsageError(f"--rdzv-endpoint {endpoint!r} has no port", hint="give host:port")
    return host.strip("[]") or "127.0.0.1", int(port)


def _parse_signals(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    for name in names:
        if name in {"SIGKILL", "SIGSTOP"}:
            raise UsageError(f"--signals-to-handle: {name} can't be handled by any process", hint="leave it out")
        if name not in {*signal.Signals.__members__, *_POSIX_SIGNALS}:
            near = difflib.get_close_matches(name, signal.Signals.__members__, n=1)
            raise UsageError(
                f"--signals-to-handle: there is no signal {name!r}",
                hint=f"did you mean {near[0]}?" if near else None,
            )
    return names


def _read_number(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(env.get(name, default))
    except ValueError:
        raise UsageError(f"{name}={env[name]!r} is not a number") from None
