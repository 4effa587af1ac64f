"""From the command line to the spec: what torchrun's own rules make of a command, and our errors for wrong ones."""

from __future__ import annotations

import contextlib
import enum
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, strategies as st

from rankwise.base.errors import UsageError
from rankwise.cli.main import main
from rankwise.launcher import command
from rankwise.launcher.checks import check_command
from rankwise.launcher.command import parse
from rankwise.launcher.spec import LaunchSpec, RendezvousConfig, Std


def _parse(line: str, env: dict[str, str] | None = None) -> LaunchSpec:
    return parse(line.split(), env or {})


def _refusal(line: str, env: dict[str, str] | None = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        _parse(line, env)
    return caught.value


def test_a_bare_command_is_one_rank_on_one_node_on_a_free_port() -> None:
    """`run train.py` starts one rank, as torchrun does, and leaves the port to the rendezvous."""
    spec = _parse("train.py --lr 3")
    assert (spec.program.script, spec.program.args, spec.program.how) == ("train.py", ("--lr", "3"), "script")
    assert (spec.nproc_per_node, spec.min_nodes, spec.max_nodes) == ("1", 1, 1)
    assert (spec.master_addr, spec.master_port, spec.is_one_node) == (None, None, True)
    assert spec.watch
    assert not spec.cold


@pytest.mark.parametrize("line", ["--standalone t.py", "--master-addr 10.0.0.1 t.py", "--rdzv-id job t.py"])
def test_one_node_without_a_port_gets_a_free_one(line: str) -> None:
    """Torchrun takes a free port and a random id for one static node without --master-port, and for --standalone."""
    spec = _parse(line)
    assert (spec.master_addr, spec.master_port, spec.rendezvous) == (None, None, RendezvousConfig(run_id=""))


def test_standalone_ignores_what_is_given_beside_it() -> None:
    """--standalone wins over port, endpoint and backend, as under torchrun."""
    spec = _parse("--standalone --master-port 1 --rdzv-endpoint h:2 --rdzv-backend c10d t.py")
    assert (spec.master_port, spec.rendezvous.endpoint, spec.rendezvous.backend) == (None, "", "static")


@pytest.mark.parametrize(
    ("line", "addr", "port"),
    [
        ("--nnodes 2 t.py", "127.0.0.1", 29500),
        ("--nnodes 2 --master-addr h t.py", "h", 29500),
        ("--nnodes 2 --master-addr h --master-port 7 t.py", "h", 7),
        ("--master-port 7 t.py", "127.0.0.1", 7),
        ("--master-port 0 t.py", "127.0.0.1", 0),
        ("--rdzv-endpoint h:7 --master-addr q --master-port 8 t.py", "h", 7),
        ("--rdzv-endpoint [::1]:7 t.py", "::1", 7),
        ("--rdzv-endpoint :7 t.py", "127.0.0.1", 7),
    ],
)
def test_static_meetings_have_an_address_and_a_port(line: str, addr: str, port: int) -> None:
    """Several static nodes, or a port that is given, meet where --rdzv-endpoint or --master-* say; 29500 is the default."""
    spec = _parse(line)
    assert (spec.master_addr, spec.master_port) == (addr, port)


def test_other_backends_choose_address_and_port_themselves() -> None:
    """With c10d the ranks' address comes from the rendezvous, whatever --master-* say."""
    spec = _parse(
        "--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id j --rdzv-conf a=b --master-port 3 t.py"
    )
    assert (spec.master_addr, spec.master_port, spec.is_one_node) == (None, None, False)
    assert spec.rendezvous == RendezvousConfig(backend="c10d", endpoint="h:1", run_id="j", conf=(("a", "b"),))
    assert (spec.min_nodes, spec.max_nodes) == (2, 4)


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("t.py", "script"),
        ("-m a.b", "module"),
        ("--no-python ./x", "program"),
        ("--run-path /t.py", "run_path"),
        ("--run-path --no-python /t.py", "run_path"),
    ],
)
def test_how_the_program_is_run(line: str, how: str) -> None:
    """-m, --no-python and --run-path choose how; --run-path takes precedence over --no-python."""
    assert _parse(line).program.how == how


def test_flags_behind_the_script_are_the_scripts() -> None:
    """Everything behind the script goes to it untouched, a `--` and our own flags too."""
    spec = _parse("--nproc-per-node 2 t.py --report x -- --cold")
    assert spec.program.args == ("--report", "x", "--", "--cold")
    assert (spec.report, spec.cold) == (None, False)


def test_our_own_flags() -> None:
    """--report, --hang-timeout in both spellings, --cold and the two switches reach the spec."""
    spec = _parse("--report r.json --hang_timeout 2.5 --cold t.py")
    assert (spec.report, spec.hang_timeout_s, spec.cold) == (Path("r.json"), 2.5, True)
    assert _parse("t.py", {"RANKWISE_COLD": "1"}).cold
    assert not _parse("t.py", {"RANKWISE_WATCH": "0"}).watch
    assert not _parse("t.py", {"RANKWISE_COLD": "0"}).cold


def test_role_counts_say_how_many_ranks_there_are() -> None:
    """Their sum is the number of ranks of one node, ranks find them in their environment, and contradictions are refused."""
    spec = _parse("--role-counts ps=2,worker=6 t.py")
    assert (spec.nproc_per_node, spec.variables) == ("8", (("RANKWISE_ROLE_COUNTS", "ps=2,worker=6"),))
    assert _parse("--role_counts ps=2,worker=6 --nproc-per-node 8 t.py").nproc_per_node == "8"
    assert _parse("--role-counts ps=2,worker=6 --nnodes 2 --nproc-per-node 4 t.py").nproc_per_node == "4"
    assert "makes 8 ranks" in _refusal("--role-counts ps=2,worker=6 --nproc-per-node 4 t.py").message
    assert "twice" in _refusal("--role-counts ps=2,ps=6 t.py").message
    for text in ("ps", "ps=0", "ps=2,", "ps=x"):
        assert "ROLE=NUMBER" in _refusal(f"--role-counts {text} t.py").message


def test_what_a_hang_leads_to() -> None:
    """--on-hang, RANKWISE_ON_HANG below it, --no-watch above RANKWISE_WATCH, --strict; a bound of 0 or off is none."""
    spec = _parse("t.py")
    assert (spec.on_hang, spec.strict, spec.hang_timeout_s) == (None, False, None)
    assert _parse("--strict --on_hang report t.py").on_hang == "report"
    assert _parse("--strict t.py").strict
    assert _parse("t.py", {"RANKWISE_ON_HANG": "restart"}).on_hang == "restart"
    assert _parse("--on-hang stop t.py", {"RANKWISE_ON_HANG": "restart"}).on_hang == "stop"
    assert "RANKWISE_ON_HANG" in _refusal("t.py", {"RANKWISE_ON_HANG": "wait"}).message
    assert not _parse("--no-watch t.py", {"RANKWISE_WATCH": "1"}).watch
    assert _parse("--watch t.py", {"RANKWISE_WATCH": "0"}).watch
    assert _parse("--hang-timeout 0 t.py").hang_timeout_s == float("inf")
    assert _parse("--hang-timeout off t.py").hang_timeout_s == float("inf")


def test_logs() -> None:
    """Streams by rank, filters and the prefix are read as torchrun reads them."""
    logs = _parse(
        "--logs-specs=default -r 3 -t 0:1,11:2 --local-ranks-filter 0,2 --log-dir d --duplicate-stdout-filters a,,b,c t.py",
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}> "},
    ).logs
    assert logs.redirects == {None: Std.ALL}
    assert logs.tee == {0: Std.OUT, 11: Std.ERR}
    assert (logs.shown_ranks, logs.folder, logs.out_filters) == (frozenset({0, 2}), Path("d"), ("a,b", "c"))
    assert logs.prefix == "<${rank}> "
    assert not logs.is_off
    assert _parse("--log-dir /dev/null t.py").logs.is_off


@pytest.mark.parametrize("value", ["4", "-1", "x", "0:4", "0:-1", "0", "0:1,", "0:1:2", ":1", "-1:3", "", "0:1,0"])
def test_streams_that_mean_nothing_are_refused(value: str) -> None:
    """Only 0 to 3, or pairs of a local rank and such a number, are streams; torchrun refuses all else too."""
    if value == "0":
        assert _parse("-r 0 t.py").logs.redirects == {None: Std.NONE}
        return
    with pytest.raises(UsageError):
        parse([f"--redirects={value}", "t.py"], {})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--standalone --nnodes 2 t.py", "one node"),
        ("--nnodes 0 t.py", "--nnodes"),
        ("--nnodes 3:2 t.py", "--nnodes"),
        ("--nnodes two t.py", "--nnodes"),
        ("--max-restarts -1 t.py", "--max-restarts"),
        ("--logs-specs mine t.py", "--logs-specs"),
        ("--no-python -m x", "--no-python"),
        ("--rdzv-endpoint h t.py", "no port"),
        ("--rdzv-endpoint h:x t.py", "no port"),
        ("--master-port 70000 t.py", "70000"),
        ("--master-port -3 t.py", "-3"),
        ("--rdzv-conf a t.py", "KEY=VALUE"),
        ("--local-ranks-filter a t.py", "--local-ranks-filter"),
        ("--signals-to-handle SIGTREM t.py", "SIGTREM"),
        ("--signals-to-handle SIGKILL t.py", "SIGKILL"),
        ("--hang-timeout -1 t.py", "hang"),
        ("--hang-timeout inf t.py", "hang"),
        ("--on-hang wait t.py", "on-hang"),
        ("--hang-timeout nan t.py", "hang"),
        ("--monitor-interval x t.py", "monitor"),
        ("--nproc-per-node", "expected one argument"),
        ("--nproc-per-node 2", "no script"),
        ("", "no script"),
        ("--numa-binding moon t.py", "numa"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(line: str, told: str) -> None:
    """A wrong value ends in one line that names it; nothing is started."""
    assert told in _refusal(line).message


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--nproc_pre_node 2 t.py", "--nproc-per-node"),
        ("--proc_per_node=2 t.py", "--nproc-per-node"),
        ("--nnode=2 --nod_rank=1 t.py", "--node-rank"),
        ("--master-prot 2 t.py", "--master-port"),
        ("--max-retarts=2 t.py", "--max-restarts"),
    ],
)
def test_a_misspelt_flag_is_guessed(line: str, meant: str) -> None:
    """The hint names the flag that was probably meant (L2)."""
    assert _refusal(line).hint == f"did you mean {meant}?"


def test_an_unknown_signal_is_guessed() -> None:
    """The hint names the signal that was probably meant."""
    assert _refusal("--signals-to-handle SIGTREM t.py").hint == "did you mean SIGTERM?"


@pytest.mark.parametrize("dash", ["\u2013", "\u2014", "\u2013\u2013", "\u2212", "\u2013-"])
@pytest.mark.parametrize("before", [[], ["--nproc-per-node", "4"], ["--nproc-per-node=4"], ["--standalone"]])
def test_typographic_dashes_are_named(dash: str, before: list[str]) -> None:
    """A dash pasted from a web page is called that, wherever it stands before the script (L5)."""
    with pytest.raises(UsageError) as caught:
        parse([*before, f"{dash}nnodes", "2", "t.py"], {})
    assert "dash" in caught.value.message
    assert "--nnodes" in (caught.value.hint or "")


def test_typographic_dashes_of_the_script_are_its_own() -> None:
    """What stands behind the script is no business of ours."""
    assert parse(["t.py", "\u2013x"], {}).program.args == ("\u2013x",)


def test_the_default_signals_are_those_that_the_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has neither SIGHUP nor SIGQUIT: a command without --signals-to-handle works there."""
    windows = enum.IntEnum("Signals", {"SIGINT": 2, "SIGTERM": 15, "SIGABRT": 22, "SIGBREAK": 21})  # type: ignore[misc]
    monkeypatch.setattr(command, "signal", SimpleNamespace(Signals=windows))
    assert set(_parse("t.py").signals) <= {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}


def test_signals_are_kept_in_order() -> None:
    """Names are trimmed, empty ones dropped."""
    assert _parse("--signals-to-handle SIGTERM,SIGUSR1, t.py").signals == ("SIGTERM", "SIGUSR1")
    assert all(name in signal.Signals.__members__ for name in _parse("t.py").signals)


def test_a_folder_for_logs_must_not_be_a_file(tmp_path: Path) -> None:
    """--log-dir FILE is refused before anything is started."""
    file = tmp_path / "log"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        parse(["--log-dir", str(file), "t.py"], {})


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"PET_MAX_RESTARTS": "x"}, "PET_MAX_RESTARTS"),
        ({"PET_STANDALONE": "yes"}, "PET_STANDALONE"),
        ({"PET_START_METHOD": "x"}, "PET_START_METHOD"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    ],
)
def test_a_wrong_variable_is_named(env: dict[str, str], told: str) -> None:
    """Who set PET_* wrongly reads the variable's name, not that of a flag never typed."""
    assert told in str(_refusal("t.py", env))


_FLAGS = ["--nproc-per-node", "--nnodes", "--redirects", "--tee", "--rdzv-endpoint", "--rdzv-conf", "--master-port",
          "--local-ranks-filter", "--signals-to-handle", "--hang-timeout", "--shutdown-timeout", "--role"]  # fmt: skip


@given(flag=st.sampled_from(_FLAGS), value=st.text(max_size=12).filter(lambda text: "\0" not in text))
@example(flag="--nproc-per-node", value="\u00b2")
@example(flag="--nnodes", value="--")
@example(flag="--nproc-per-node", value="--")
@example(flag="--rdzv-endpoint", value="h:\u00b2")
@example(flag="--redirects", value="\u0661")
@example(flag="--hang-timeout", value="inf")
def test_any_value_ends_in_a_spec_or_in_our_error(flag: str, value: str) -> None:
    """Whatever is typed, no traceback of Python's comes back."""
    argv = [f"{flag}={value}", "t.py"]
    with contextlib.suppress(UsageError):
        check_command(parse(argv, {}), argv)


@pytest.mark.parametrize("command", ["check", "checkpoint ls", "env"])
def test_each_command_guesses_what_a_flag_was_meant_to_be(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the flags of a command's commands, whose errors the outer parser raises."""
    assert main([*command.split(), "--fromat", "json", "x"]) == 2
    assert "did you mean --format?" in capsys.readouterr().err
