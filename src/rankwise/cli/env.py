"""`rankwise env`: who this process is by its variables, which variable told what, and what among them can't be true."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING

from rankwise.base import terminal
from rankwise.base.environ import environ
from rankwise.base.flags import Parser
from rankwise.cli.printing import put
from rankwise.doctor.host import Host
from rankwise.doctor.units import align
from rankwise.doctor.variables.contradictions import find_contradictions, may_have_gpus
from rankwise.doctor.variables.masking import escape, list_variables
from rankwise.doctor.variables.table import report_misspellings
from rankwise.doctor.variables.understanding import understand
from rankwise.lint.reporters.text_form import paint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankwise.doctor.probe import Reading
    from rankwise.doctor.variables.masking import Listed
    from rankwise.doctor.variables.understanding import Understood

_NAMES = {
    "world_size": "world size",
    "local_rank": "local rank",
    "local_world_size": "local world size",
    "node_rank": "node rank",
    "num_nodes": "nodes",
    "master_addr": "master address",
    "master_port": "master port",
}
_TO_ALL = "pass MASTER_ADDR and MASTER_PORT on to all"
_PASS_ON = {
    "Open MPI": f"{_TO_ALL} (mpirun -x MASTER_ADDR -x MASTER_PORT …)",
    **dict.fromkeys(("MPICH", "Intel MPI"), f"{_TO_ALL} (mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 …)"),
    "MVAPICH2": f"{_TO_ALL} (mpirun_rsh … MASTER_ADDR=HOST MASTER_PORT=29500 python …)",
}
_WORDS = {"fail": "error", "warn": "warning"}


def main(argv: Sequence[str]) -> int:
    """Show what the environment says; return the exit code: 1 if something in it can't be true."""
    parser = Parser(
        prog="rankwise env",
        description="Show which rank this process is by its variables, which variable set what, and what contradicts what. "
        "Exit code 1: something can't be true. Secrets are not shown.",
    )
    parser.add_argument("--format", choices=["text", "json"], default="text", help="Lines, or a JSON object.")
    args = parser.parse_args(list(argv))
    env = environ()
    found = [*find_contradictions(env, has_gpus=may_have_gpus(Host(env=env))), *report_misspellings(env)]
    result, variables = understand(env), list_variables(env)
    if args.format == "json":
        put(json.dumps(_to_json(result, found, variables), indent=1) + "\n")
    else:
        put("\n".join(_write(result, found, variables, color=terminal.has_colour(1))) + "\n")
    return 1 if any(one.verdict == "fail" for one in found) else 0


def _to_json(value: Understood, found: Sequence[Reading], variables: Sequence[Listed]) -> Mapping[str, object]:
    place = value.place
    return {
        "role": value.role,
        "launcher": value.launcher or None,
        "problem": value.problem or None,
        "identity": {one.name: {"value": one.value, "from": one.how or None} for one in value.values} or None,
        "place": place and {"told_by": place.source, "what": place.what, "node_rank": place.node_rank, "num_nodes": place.num_nodes,
                            "command": place.command, "note": place.note or None},
        "other_sources": [{"source": name, "says": says} for name, says in value.others],
        "findings": [{"verdict": one.verdict, "what": one.what, "why": one.why, "fix": one.fix, "class": one.class_id or None} for one in found],
        "variables": [{"name": one.name, "value": shown, "family": one.family, "does": one.does or None} for one, shown in variables],
    }  # fmt: skip


def _write(value: Understood, found: Sequence[Reading], variables: Sequence[Listed], *, color: bool) -> Iterator[str]:
    yield from _write_role(value, color=color)
    if value.others:
        yield ""
        yield paint("other sources", "bold", color=color)
        yield from (f"  {line}" for line in align([(name, _plain(says)) for name, says in value.others]))
    for one in found:
        yield ""
        yield from _write_finding(one, color=color)
    for family, group in groupby(variables, key=lambda each: each[0].family):
        yield ""
        yield paint(family, "bold", color=color)
        rows = [(_plain(f"{one.name}={shown}"), one.does) for one, shown in group]
        width = max((len(name) for name, does in rows if len(name) <= 48), default=0)
        yield from (f"  {name.ljust(width)}  {does}".rstrip() for name, does in rows)


def _write_role(value: Understood, *, color: bool) -> Iterator[str]:
    values = {one.name: one for one in value.values}
    if value.role == "rank":
        head = f"rank {values['rank'].value} of {values['world_size'].value}, started by {value.launcher}"
        yield paint(head, "bold", color=color)
        yield from _write_values(value)
        if values["master_addr"].value is None and values["world_size"].value != 1:
            yield f"  nothing says where rank 0 is: {_PASS_ON.get(value.source, 'set MASTER_ADDR and MASTER_PORT, the same for all ranks')}"
        if value.place is not None:
            yield ""
            yield f"{value.place.what}: a launcher may be started here as well"
            yield f"  {_plain(value.place.command)}"
    elif value.role == "node" and value.place is not None:
        place = value.place
        where = (
            ""
            if place.node_rank is None
            else f", node {place.node_rank}" + (f" of {place.num_nodes}" if place.num_nodes else "")
        )
        yield paint(f"no rank, but a place to start a launcher: {place.what}{where}", "bold", color=color)
        yield f"  {_plain(place.command)}"
        if place.note:
            yield f"  ({place.note})"
        if values:
            yield ""
            yield f"a script that is started here without a launcher is rank {values['rank'].value} of {values['world_size'].value}:"
            yield from _write_values(value)
    elif value.role == "alone":
        yield paint("this process is alone: no variable says it is one of several", "bold", color=color)
        yield "to start one rank for each GPU, or for each CPU where there is none:"
        yield "  rankwise run --nproc-per-node auto train.py"
    else:
        yield paint("it is not clear which rank this is: see below", "bold", color=color)


def _plain(text: str) -> str:
    """Return a text as one line that does nothing to a terminal, with escapes as shells write them: a value may hold any sign."""
    return escape(text, newlines=True)


def _write_values(value: Understood) -> Iterator[str]:
    rows = [
        (_NAMES.get(one.name, one.name), "-" if one.value is None else _plain(str(one.value)), _plain(one.how) or "not set")
        for one in value.values
    ]  # fmt: skip
    yield from (f"  {line}" for line in align(rows))


def _write_finding(one: Reading, *, color: bool) -> Iterator[str]:
    head = paint(f"{_WORDS.get(one.verdict, one.verdict)}:", "red" if one.verdict == "fail" else "yellow", color=color)
    named = f" [{one.class_id}]" if one.class_id else ""
    columns = terminal.width(1)
    yield terminal.wrap(f"{head} {_plain(one.what)}{named}", columns)
    if one.why:
        yield terminal.wrap(f"  {_plain(one.why)}", columns)
    for line in one.fix.splitlines():
        command, _, remark = line.partition("  # ")
        if remark:
            yield f"  ({_plain(remark)})"
        yield f"  -> {_plain(command).removeprefix('# ')}"
