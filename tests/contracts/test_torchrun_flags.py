"""Contract: our command line is torchrun's, flag by flag, variable by variable.

torch is asked in one subprocess (it answers for all cases at once), so that this process stays without it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.base.errors import UsageError
from rankwise.launcher.command import OWN_FLAGS, build_parser, parse
from rankwise.launcher.run_flags import LATER_FLAGS
from support import IS_COMPARABLE, NOT_COMPARABLE, find_torch

if TYPE_CHECKING:
    import argparse

pytestmark = pytest.mark.skipif(not IS_COMPARABLE, reason=NOT_COMPARABLE)

Env = dict[str, str]
Namespace = dict[str, Any]

_LATER_DESTS = {"log_line_prefix_template", "print_completion"}
_OWN_DESTS = {
    "report",
    "hang_timeout",
    "on_hang",
    "watch",
    "check",
    "strict",
    "cold",
    "resident",
    "preload",
    "role_counts",
    "join_every",
}

# Reads {"cases": [[argv, env]…], "launches": [argv…]}; tells torchrun's actions, namespaces and launch configurations.
_ASK_TORCH = r"""
import contextlib, io, json, os, sys
from torch.distributed import run
asked = json.load(sys.stdin)

def parse(argv, env):
    os.environ.update(env)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return vars(run.get_args_parser().parse_args(argv))
    except (SystemExit, ValueError):
        return None
    finally:
        for name in env:
            del os.environ[name]

def launch(argv):
    told = {}
    def take(config, entrypoint):
        def call(*args):
            specs = config.logs_specs
            redirects, tee = specs._redirects, specs._tee
            std = lambda s: {str(k): v.value for k, v in s.items()} if isinstance(s, dict) else s.value
            told.update(
                nodes=[config.min_nodes, config.max_nodes], nproc=config.nproc_per_node, run_id=config.run_id,
                role=config.role, endpoint=config.rdzv_endpoint, backend=config.rdzv_backend,
                conf={k: str(v) for k, v in config.rdzv_configs.items() if k != "timeout"},
                max_restarts=config.max_restarts, monitor_interval=config.monitor_interval,
                local_addr=config.local_addr, signals=config.signals_to_handle,
                out_filters=config.duplicate_stdout_filters, err_filters=config.duplicate_stderr_filters,
                virtual=config.virtual_local_rank, shutdown=config.shutdown_timeout,
                redirects=std(redirects), tee=std(tee), shown=sorted(specs._local_ranks_filter or []),
                how="run_path" if callable(entrypoint) else "program" if entrypoint != sys.executable
                else "module" if args[1] == "-m" else "script", args=list(args),
            )
        return call
    run.elastic_launch = take
    try:
        run.run(run.parse_args(argv))
    except (Exception, SystemExit):
        return None
    return told

actions = []
for action in run.get_args_parser()._actions:
    actions.append({"strings": action.option_strings, "dest": action.dest, "default": action.default,
        "nargs": action.nargs, "choices": list(action.choices) if action.choices else None,
        "reads_env": type(action).__name__ in ("env", "check_env"), "is_help": type(action).__name__ == "_HelpAction"})
json.dump({"actions": actions, "namespaces": [parse(*case) for case in asked["cases"]],
           "launches": [launch(argv) for argv in asked["launches"]]}, sys.stdout)
"""

#: Command lines as people write them; each is parsed by both.
COMMANDS = [
    line.split()
    for line in """
train.py
train.py --epochs 3
--nproc-per-node 4 train.py
--nproc_per_node 4 train.py
--nproc_per_node=4 train.py --nproc_per_node 8
--nproc-per-node=gpu train.py
--nproc-per-node auto train.py
--nproc-per 2 train.py
--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 train.py
--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29501 train.py
--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint host:29400 --rdzv-id job train.py
--nnodes 1:4 --rdzv_backend c10d --rdzv_endpoint host:29400 --rdzv_id job train.py
--rdzv-conf timeout=900,is_host=1 train.py
--rdzv_conf=timeout=900 train.py
--standalone train.py
--standalone --nproc-per-node 2 train.py -- --x
--max-restarts 3 train.py
--max_restarts=3 train.py
--max-r 3 train.py
--monitor-interval 0.5 train.py
--monitor_interval 5 train.py
--start-method fork train.py
--start_method=forkserver train.py
--start-method teleport train.py
--event-log-handler console train.py
--event_log_handler=console train.py
--role trainer train.py
-m package.module
-m package.module --flag value -x
--module package.module
--mod package.module
--no-python ./run.sh 1 2
--no_python ./run.sh
--run-path /abs/train.py
--run_path /abs/train.py
--log-dir logs train.py
--log_dir=logs train.py
-r 3 train.py
-r3 train.py
-r 0:1,1:2 train.py
--redirects 3 train.py
--redirects=0:3 train.py
--red 2 train.py
-t 3 train.py
-t1 train.py
-t=3 train.py
--tee 3 train.py
--tee=0:1,1:2 train.py
-r 1 -t 2 train.py -r 3 -t 3
--local-ranks-filter 0,1 train.py
--local_ranks_filter=0 train.py
--duplicate-stdout-filters apple,orange train.py
--duplicate_stdout_filters=a,,b,c train.py
--duplicate-stderr-filters error train.py
--duplicate_stderr_filters= train.py
--master-port 0 train.py
--master-port x train.py
--master-port=-1 train.py
--local-addr 10.0.0.2 train.py
--local_addr=::1 train.py
--logs-specs mine train.py
--logs_specs=mine train.py
--numa-binding node train.py
--numa_binding=core-complex train.py
--numa-binding nowhere train.py
--signals-to-handle SIGTERM,SIGUSR1 train.py
--signals_to_handle=SIGTERM train.py
--shutdown-timeout 5 train.py
--shutdown_timeout=5 train.py
--shutdown-timeout 1.5 train.py
--virtual-local-rank train.py
--virtual_local_rank train.py
--standalone=1 train.py
-- train.py --nproc_per_node 2
--nproc-per-node 2 -- train.py --epochs 1 -- more
--nproc-per-node 2 train.py -m pdb --standalone --report x --help
--nproc-per-node 2 -m pdb train.py
--nproc-per-node 2 --nproc-per-node 3 train.py
--nproc-per-node
--nproc-per-node 2
--proc_per_node=2 train.py
--nproc_per_nodes=2 train.py
--gpus 2 train.py
-n 2 train.py
-x train.py
--rdzv-backend
--n 2 train.py
--master 1 train.py
- train.py
--role= train.py
""".splitlines()
    if line.strip()
] + [[], ["--role", "", "train.py"], ["--role", "-1", "train.py"], ["train.py", "", "--", "a b"]]

#: Variables as a cluster's template sets them.
ENVS: list[Env] = [
    {"PET_NPROC_PER_NODE": "8", "PET_NNODES": "2:3"},
    {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h:1", "PET_RDZV_ID": "7", "PET_RDZV_CONF": "a=b"},
    {"PET_STANDALONE": "1", "PET_MODULE": "1", "PET_NO_PYTHON": "0", "PET_RUN_PATH": "2"},
    {"PET_VIRTUAL_LOCAL_RANK": "1", "PET_STANDALONE": "0"},
    {"PET_MAX_RESTARTS": "3", "PET_MONITOR_INTERVAL": "2", "PET_SHUTDOWN_TIMEOUT": "7"},
    {"PET_START_METHOD": "fork", "PET_EVENT_LOG_HANDLER": "console", "PET_ROLE": "a"},
    {
        "PET_LOG_DIR": "l",
        "PET_REDIRECTS": "3",
        "PET_TEE": "0:1",
        "PET_LOCAL_RANKS_FILTER": "0",
        "PET_LOG_LINE_PREFIX_TEMPLATE": "$rank ",
    },
    {"PET_DUPLICATE_STDOUT_FILTERS": "a,,b,c", "PET_DUPLICATE_STDERR_FILTERS": "e"},
    {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "x", "PET_MASTER_PORT": "5", "PET_LOCAL_ADDR": "y"},
    {"PET_SIGNALS_TO_HANDLE": "SIGTERM"},
    {"PET_LOGS_SPECS": "no", "PET_NUMA_BINDING": "node", "PET_R": "3", "PET_T": "3", "PET_M": "1"},
    {"PET_ROLE": "", "PET_LOG_DIR": "", "PET_RDZV_ENDPOINT": ""},
    {"PET_MAX_RESTARTS": "many"},
    {"PET_MASTER_PORT": ""},
    {"PET_STANDALONE": "yes"},
    {"PET_MODULE": ""},
]

#: What torchrun launches for these is what we launch.
LAUNCHES = [
    line.split()
    for line in """
train.py --a b
--nproc-per-node 4 train.py
--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train.py
--nnodes 2 --master-addr 10.0.0.1 --master-port 1234 train.py
--nnodes 2 --rdzv-endpoint h:1234 train.py
--rdzv-endpoint h:1234 train.py
--master-port 1234 train.py
--master-addr 10.0.0.1 train.py
--standalone --nproc-per-node 2 --rdzv-id mine train.py
--standalone --master-port 1234 train.py
--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id job --rdzv-conf a=b,c=d train.py
--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:1 --master-addr q --master-port 3 train.py
--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint h:1 train.py
--rdzv-id job train.py
-m a.b --c
--no-python prog x
--run-path /x/y.py z
--run-path --no-python /x/y.py z
--max-restarts 3 --monitor-interval 2 --shutdown-timeout 9 --role t train.py
-r 3 -t 0:1,1:3 --local-ranks-filter 0,1 train.py
-r 0:1,1:2 train.py
--virtual-local-rank --duplicate-stdout-filters a,b --duplicate-stderr-filters c train.py
--signals-to-handle SIGTERM,SIGINT train.py
""".splitlines()
    if line.strip()
]

#: What torchrun refuses when it makes its configuration, we refuse too.
REFUSED = [
    line.split()
    for line in """
--nnodes 0 train.py
--nnodes 3:2 train.py
--nnodes 1:2:3 train.py
--nnodes many train.py
--max-restarts -1 train.py
-r 4 train.py
-t 0:5 train.py
-r 0:-1 train.py
--redirects=-1:3 train.py
--local-ranks-filter a train.py
--rdzv-conf novalue train.py
--rdzv-conf a= train.py
--no-python -m x
""".splitlines()
    if line.strip()
]


@dataclass(frozen=True)
class Torch:
    """What torchrun's parser answered."""

    actions: list[dict[str, Any]]
    namespaces: dict[str, Namespace | None]
    launches: list[dict[str, Any] | None]


def _random_cases() -> list[tuple[list[str], Env]]:
    """Mix flags, spellings and variables, the same on every run."""
    chance = random.Random(20260101)
    values = {
        "nnodes": ["1", "2:4"], "nproc-per-node": ["2", "gpu"], "role": ["a"], "node-rank": ["1", "x"], "rdzv-id": ["j"],
        "master-addr": ["h"], "master-port": ["1", "65535"], "max-restarts": ["0", "2"], "monitor-interval": ["0.1", "3"],
        "log-dir": ["d"], "redirects": ["3"], "tee": ["1"], "duplicate-stdout-filters": ["a,b", ",,"],
        "shutdown-timeout": ["1"], "rdzv-backend": ["static", "c10d"], "local-ranks-filter": ["0,1"],
    }  # fmt: skip
    switches = ["standalone", "module", "no-python", "run-path", "virtual-local-rank"]
    cases = []
    for _ in range(150):
        argv: list[str] = []
        for name in chance.sample([*values, *switches], chance.randrange(5)):
            flag = "--" + (name if chance.random() < 0.5 else name.replace("-", "_"))
            if name in switches:
                argv.append(flag)
            elif chance.random() < 0.5:
                argv.append(f"{flag}={chance.choice(values[name])}")
            else:
                argv += [flag, chance.choice(values[name])]
        env = {}
        for name in chance.sample([*values, *switches], chance.randrange(4)):
            value = chance.choice(values.get(name, ["0", "1"]))
            env[f"PET_{name.upper().replace('-', '_')}"] = value
        tail = chance.choice([[], ["train.py"], ["train.py"], ["train.py", "--role", "x"], ["--", "t.py", "-m"]])
        cases.append(([*argv, *tail], env))
    return cases


# Every prefix of every long flag, with a value that all of them take, or none.
_PREFIXES = sorted(
    {
        flag[:length]
        for action in build_parser({})._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag not in {*OWN_FLAGS, *LATER_FLAGS}
        for length in range(3, len(flag) + 1)
    }
)
_PREFIX_CASES: list[tuple[list[str], Env]] = [
    case for prefix in _PREFIXES for case in (([f"{prefix}=1", "t.py"], {}), ([prefix, "t.py"], {}))
]
# Words behind the script that look like the beginning of a flag of ours.
_BEHIND: list[tuple[list[str], Env]] = [
    (["--role", "a", "train.py", flag[:length], "3"], {}) for flag in OWN_FLAGS for length in range(3, len(flag) + 1)
]
_CASES: list[tuple[list[str], Env]] = [
    *_BEHIND,
    *((argv, {}) for argv in COMMANDS),
    *((["train.py"], env) for env in ENVS),
    *((["--nproc-per-node=3", "-r", "1", "train.py"], env) for env in ENVS),
    *_random_cases(),
    *_PREFIX_CASES,
]


def _key(argv: list[str], env: Env) -> str:
    return json.dumps([argv, env])


def _clean_env() -> Env:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_"))
    }


@pytest.fixture(scope="module")
def torch_says() -> Torch:
    asked = {"cases": _CASES, "launches": [*LAUNCHES, *REFUSED]}
    done = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH], input=json.dumps(asked), capture_output=True, text=True,
        timeout=100, env={**_clean_env(), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    namespaces = {_key(*case): namespace for case, namespace in zip(_CASES, answer["namespaces"], strict=True)}
    return Torch(answer["actions"], namespaces, answer["launches"])


def _ours(argv: list[str], env: Env) -> Namespace | None:
    try:
        return vars(build_parser(env).parse_args(argv))
    except (UsageError, SystemExit):
        return None


def _without_own(namespace: Namespace | None) -> Namespace | None:
    """Return what every torch's torchrun has."""
    if namespace is None:
        return None
    return {name: value for name, value in namespace.items() if name not in _OWN_DESTS | _LATER_DESTS}


def _said(torch_says: Torch, argv: list[str], env: Env) -> Namespace | None:
    return _without_own(torch_says.namespaces[_key(argv, env)])


def _by_string() -> dict[str, argparse.Action]:
    return {flag: action for action in build_parser({})._actions for flag in action.option_strings}


def test_every_flag_of_torchrun_is_ours_with_its_dest_default_choices_and_shape(torch_says: Torch) -> None:
    """Each option string of torchrun leads here to the same dest, default, choices and number of values."""
    ours, wrong = _by_string(), []
    for theirs in torch_says.actions:
        for flag in theirs["strings"]:
            action = ours.get(flag)
            if action is None:
                wrong.append(f"{flag} is missing")
                continue
            choices = list(action.choices) if action.choices else None
            if flag in LATER_FLAGS and theirs["dest"] == "print_completion":
                # Those that the installed shtab knows; ours asks it only if the flag is given.
                choices = theirs["choices"]
            mine = (action.dest, action.default, action.nargs, choices)
            if mine != (theirs["dest"], theirs["default"], theirs["nargs"], theirs["choices"]):
                wrong.append(f"{flag}: {mine} instead of {theirs}")
    assert not wrong, "\n".join(wrong)


def test_our_additional_flags_are_exactly_own_flags(torch_says: Torch) -> None:
    """Nothing is added to torchrun's flags, those of a later torch included, beyond OWN_FLAGS, and all of OWN_FLAGS are additional."""
    theirs = {flag for action in torch_says.actions for flag in action["strings"]}
    assert set(_by_string()) - theirs - set(LATER_FLAGS) == set(OWN_FLAGS)
    assert theirs & set(LATER_FLAGS) == (set(LATER_FLAGS) if find_torch() >= (2, 15) else set())


def test_a_shell_completes_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """What --print-completion prints knows the flags of `rankwise run`; nothing is started."""
    with pytest.raises(SystemExit) as ended:
        build_parser({}).parse_args(["--print-completion", "bash"])
    assert not ended.value.code
    words = capsys.readouterr().out
    assert "--log-line-prefix-template" in words
    assert "--on-hang" in words
    with pytest.raises(UsageError, match="shtab knows no shell 'xyzsh'"):
        build_parser({}).parse_args(["--print-completion", "xyzsh"])


def test_positional_arguments_are_torchruns(torch_says: Torch) -> None:
    """The script, then all the rest, whatever it looks like."""
    theirs = [(action["dest"], action["nargs"]) for action in torch_says.actions if not action["strings"]]
    mine = [(action.dest, action.nargs) for action in build_parser({})._actions if not action.option_strings]
    assert mine == theirs


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_command_line_means_the_same(argv: list[str], torch_says: Torch) -> None:
    """Both parsers take, or refuse, a command line, and get the same values from it."""
    assert _without_own(_ours(argv, {})) == _said(torch_says, argv, {})


@pytest.mark.parametrize("env", ENVS, ids=str)
@pytest.mark.parametrize("argv", [["train.py"], ["--nproc-per-node=3", "-r", "1", "train.py"]], ids=" ".join)
def test_a_variable_means_the_same(argv: list[str], env: Env, torch_says: Torch) -> None:
    """PET_* stands in for an absent flag, and a flag wins over it, as under torchrun."""
    assert _without_own(_ours(argv, env)) == _said(torch_says, argv, env)


def test_every_variable_that_torch_reads_is_tried_here(torch_says: Torch) -> None:
    """No PET_* variable is left out of the list of this test."""
    read = {f"PET_{action['dest'].upper()}" for action in torch_says.actions if action["reads_env"]}
    assert read <= {name for env in ENVS for name in env}


def test_variables_are_read_from_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an explicit mapping the variables are this process's."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    assert build_parser().parse_args(["t.py"]).nproc_per_node == "5"
    assert parse(["t.py"]).nproc_per_node == "5"


def test_mixed_flags_and_variables_mean_the_same(torch_says: Torch) -> None:
    """Any mixture of flags, spellings and variables gives the same values in both parsers."""
    wrong = []
    for argv, env in _random_cases():
        mine, theirs = _without_own(_ours(argv, env)), _said(torch_says, argv, env)
        if mine != theirs:
            wrong.append(f"{env} {argv}: {mine} instead of {theirs}")
    assert not wrong, "\n".join(wrong)


def test_abbreviations_mean_the_same(torch_says: Torch, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix that torchrun takes is taken here, whatever flags of our own begin like it."""
    lost = set()
    for argv, env in _PREFIX_CASES:
        mine, theirs = _without_own(_ours(argv, env)), _said(torch_says, argv, env)
        if theirs is not None and mine != theirs:
            lost.add(argv[0].partition("=")[0])
    assert lost == set()


def test_no_word_behind_the_script_is_taken_for_ours(torch_says: Torch) -> None:
    """`train.py --h 256` reaches the script as under torchrun, though --hang-timeout begins like that."""
    wrong = []
    for argv, env in _BEHIND:
        theirs = _said(torch_says, argv, env)
        # argparse may take such a word for one of torchrun's own (2.15: `--pr`), and refuse it.
        if theirs is not None and _without_own(_ours(argv, env)) != theirs:
            wrong.append(argv[3])
    assert wrong == []


@pytest.mark.parametrize(
    "argv",
    [["--gpus", "2", "t.py"], ["--proc_per_node=2", "t.py"], ["-q", "t.py"], ["--n", "2", "t.py"]],
    ids=" ".join,
)
def test_unknown_flags_are_refused_with_our_error(argv: list[str], torch_says: Torch) -> None:
    """An unknown or ambiguous flag ends in a UsageError that says what to do, never in SystemExit."""
    with pytest.raises(UsageError) as caught:
        build_parser({}).parse_args(argv)
    assert caught.value.hint


def _spec_as_torch_tells(argv: list[str]) -> dict[str, Any] | None:
    """Return our spec in the words of torch's LaunchConfig."""
    try:
        spec = parse(argv, {})
    except UsageError:
        return None
    program, rendezvous = spec.program, spec.rendezvous
    front = {"script": ["-u"], "module": ["-u", "-m"], "program": [], "run_path": []}[program.how]
    script = [] if program.how == "program" else [program.script]
    return {
        "nodes": [spec.min_nodes, spec.max_nodes],
        "nproc": int(spec.nproc_per_node),
        "role": spec.role,
        "max_restarts": spec.max_restarts,
        "monitor_interval": spec.monitor_interval_s,
        "local_addr": rendezvous.local_addr,
        "signals": ",".join(spec.signals),
        "out_filters": list(spec.logs.out_filters),
        "err_filters": list(spec.logs.err_filters),
        "virtual": spec.virtual_local_rank,
        "redirects": _std(spec.logs.redirects),
        "tee": _std(spec.logs.tee),
        "shown": sorted(spec.logs.shown_ranks or []),
        "how": program.how,
        "args": [*front, *script, *program.args],
    }


def _std(std: dict[int | None, Any]) -> Any:
    return std[None].value if None in std else {str(rank): value.value for rank, value in std.items()}


@pytest.mark.parametrize("argv", LAUNCHES, ids=" ".join)
def test_what_torchrun_would_launch_is_what_we_launch(argv: list[str], torch_says: Torch) -> None:
    """Nodes, ranks, role, streams, signals, filters and the ranks' command equal torchrun's."""
    theirs, mine = torch_says.launches[LAUNCHES.index(argv)], _spec_as_torch_tells(argv)
    assert theirs is not None
    assert mine == {name: theirs[name] for name in mine or theirs}


@pytest.mark.parametrize("argv", REFUSED, ids=" ".join)
def test_what_torchrun_refuses_to_launch_is_refused(argv: list[str], torch_says: Torch) -> None:
    """A value that torchrun finds wrong after parsing is a UsageError here."""
    assert torch_says.launches[len(LAUNCHES) + REFUSED.index(argv)] is None
    with pytest.raises(UsageError):
        parse(argv, {})


@pytest.mark.parametrize("argv", LAUNCHES, ids=" ".join)
def test_where_torchrun_would_meet_is_where_we_meet(argv: list[str], torch_says: Torch) -> None:
    """Backend, endpoint, run id and settings equal torchrun's; its c10d on a free port of this host is our single node."""
    theirs, spec = torch_says.launches[LAUNCHES.index(argv)], parse(argv, {})
    rendezvous = spec.rendezvous
    assert theirs is not None
    if theirs["endpoint"] == "localhost:0":
        assert spec.is_one_node
        assert (spec.master_addr, spec.master_port, rendezvous.endpoint, rendezvous.run_id) == (None, None, "", "")
        return
    assert (rendezvous.backend, rendezvous.endpoint) == (theirs["backend"], theirs["endpoint"])
    assert rendezvous.run_id == theirs["run_id"]
    conf = dict(rendezvous.conf)
    if rendezvous.backend == "static":
        conf["rank"] = str(spec.node_rank)
        assert f"{spec.master_addr}:{spec.master_port}" == theirs["endpoint"]
    assert conf == theirs["conf"]


def test_shutdown_timeout_falls_back_as_torchruns_does() -> None:
    """The flag wins over TORCH_ELASTIC_SHUTDOWN_TIMEOUT, and that over 30 seconds."""
    named = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "12"}
    assert parse(["t.py"], {}).shutdown_timeout_s == 30
    assert parse(["t.py"], named).shutdown_timeout_s == 12
    assert parse(["--shutdown-timeout", "5", "t.py"], named).shutdown_timeout_s == 5
