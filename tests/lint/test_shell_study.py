"""What is known of a shell text: words, variables, launches, places; and what happens with texts that are no shell."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from rankwise.base.errors import UsageError
from rankwise.launcher.run_flags import LATER_FLAGS
from rankwise.lint import registry
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.shell import study
from rankwise.lint.shell.flags import TABLES
from rankwise.lint.shell.study import study_shell, unit_of_command
from support import find_torch

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.lint.finding import Finding, Span
    from rankwise.lint.shell.model import Command, Launch
    from rankwise.lint.shell.study import Shell

pytest.importorskip("tree_sitter_bash")

RULES = [rule for rule in registry.all_rules() if rule.looks_at == "shell"]


def read(code: str, path: str = "job.sh") -> Shell:
    return study_shell(CodeUnit(path=path, language="shell", code=code))


def findings(shell: Shell) -> list[Finding]:
    return [finding for rule in RULES for finding in rule.check(shell)]


def texts(command: Command) -> list[str | None]:
    return [word.text for word in command.words]


def only(code: str) -> Launch:
    (launch,) = read(code).launches
    return launch


def slice_of(code: str, span: Span) -> str:
    lines = code.split("\n")
    assert span.line == span.end_line
    return lines[span.line - 1][span.col - 1 : span.end_col - 1]


# Words


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("A=1\nx $A", ["x", "1"]),
        ('A="1 2"\nx $A', ["x", "1", "2"]),
        ('A="1 2"\nx "$A"', ["x", "1 2"]),
        ("A='1 2'\nx --a=$A", ["x", "--a=1", "2"]),
        ("x 'a b'\"c\"d\\ e", ["x", "a bcd e"]),
        ("A=(1 '2 3')\nA+=(4)\nx \"${A[@]}\"", ["x", "1", "2 3", "4"]),
        ("A=1\nA+=2\nx $A", ["x", "12"]),
        ("N=2\nG=4\nx $((N * G)) $(($N + 1)) $((G / N)) $((G % 3))", ["x", "8", "3", "2", "1"]),
        ("x $((N * 4))", ["x", None]),
        ("A=3\nx ${A} ${A:-4} ${B:-4}", ["x", "3", "3", None]),
        ("x $(date) `date`", ["x", None, None]),
        ("x a \\\n b", ["x", "a", "b"]),
        ("A=1\nunset A\nx $A", ["x", None]),
        ("A=1\nread A\nx $A", ["x", None]),
        ("A=1\nif y; then A=2; fi\nx $A", ["x", None]),
        ("A=1\nif y; then A=1; fi\nx $A", ["x", "1"]),
        ("A=1\nwhile y; do A=2; done\nx $A", ["x", None]),
        ("A=1\n(A=2)\nx $A", ["x", "1"]),
        ("case $q in a) A=1;; *) A=2;; esac\nx $A", ["x", None]),
        ("export A=1 B=2\nx $A$B", ["x", "12"]),
        ("declare -x A=1\nx $A", ["x", "1"]),
        ('x "a $A b"', ["x", None]),
        ("#SBATCH --nodes=3\nx $SLURM_NNODES", ["x", "3"]),
    ],
)
def test_words_are_what_the_shell_makes_of_them(code: str, expected: list[str | None]) -> None:
    """Variables, arrays, arithmetic and quotes are expanded; what only the run knows is unknown."""
    assert texts(read(code).reading.commands[-1]) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("A=1 x", {"A": "1"}),
        ("A=1\nx", {}),
        ("export A=1\nx", {"A": "1"}),
        ("A=1\nexport A\nx", {"A": "1"}),
        ("export A=1\nA=2\nx", {"A": "2"}),
        ("export A=1\nunset A\nx", {}),
        ("set -a\nA=1\nx", {"A": "1"}),
        ("export A=1\nA=2 x", {"A": "2"}),
    ],
)
def test_a_command_sees_what_is_exported(code: str, expected: dict[str, str]) -> None:
    """Plain assignments stay in the shell; exported ones and those in front of a command reach it."""
    command = read(code).reading.commands[-1]
    assert {name: setting.value.text for name, setting in command.env.items()} == expected


@pytest.mark.parametrize(
    ("loop", "values"),
    [
        ("for i in 0 1 2; do x $i; done", ["0", "1", "2"]),
        ("for i in {0..2}; do x $i; done", ["0", "1", "2"]),
        ("for i in $(seq 0 2); do x $i; done", ["0", "1", "2"]),
        ("for i in $(seq 2); do x $i; done", ["1", "2"]),
        ("N=3; for i in $(seq 0 $((N - 1))); do x $i; done", ["0", "1", "2"]),
        ("for ((i = 0; i < 2; i++)); do x $i; done", ["0", "1"]),
        ("for i in $LIST; do x $i; done", [None]),
        ("while read i; do x $i; done", [None]),
    ],
)
def test_loops_of_known_length_are_run(loop: str, values: list[str | None]) -> None:
    """A loop over known values gives a command for each; any other loop gives one with an unknown value."""
    commands = [command for command in read(loop).reading.commands if command.words[0].text == "x"]
    assert [command.words[1].text for command in commands] == values


def test_loops_in_loops_are_not_run_for_each_of_thousands_of_choices() -> None:
    """A search over nine settings of four values each, 262,144 runs, is seen for the values of some loops alone."""
    names = "abcdefghi"
    code = " ".join(f"for {name} in 1 2 4 8; do" for name in names) + f" x ${' $'.join(names)};" + " done;" * len(names)
    commands = [command for command in read(code).reading.commands if command.words[0].text == "x"]
    assert 4 < len(commands) < 5000
    assert {command.words[1].text for command in commands} == {"1", "2", "4", "8"}
    assert None in {word.text for word in commands[0].words}


def test_arms_of_an_if_exclude_each_other() -> None:
    """Commands in two arms never both run; those in one arm, or in two ifs, may."""
    code = "if a; then x 1; x 2; else x 3; fi\nif b; then x 4; fi"
    one, two, three, four = (one for one in read(code).reading.commands if one.words[0].text == "x")
    assert one.excludes(three)
    assert not one.excludes(two)
    assert not one.excludes(four)


@pytest.mark.parametrize("code", ["x &", "x > log 2>&1 &", "(x) &", "{ x; } &", "a && x &", "nohup x &"])
def test_background_is_seen_through_what_is_around(code: str) -> None:
    """An ampersand holds for the command in front of it, whatever wraps it."""
    assert read(code).reading.commands[-1].is_background


# Launches


@pytest.mark.parametrize(
    ("code", "launcher"),
    [
        ("torchrun t.py", "torchrun"),
        ("python -m torch.distributed.run t.py", "torchrun"),
        ("python3 -u -W ignore -m torch.distributed.launch t.py", "launch"),
        ("accelerate launch t.py", "accelerate"),
        ("accelerate-launch t.py", "accelerate"),
        ("python -m accelerate.commands.launch t.py", "accelerate"),
        ("deepspeed t.py", "deepspeed"),
        ("rankwise run t.py", "rankwise"),
        ("python -m rankwise run t.py", "rankwise"),
        ("srun -N 2 --gres gpu:4 python t.py", "python"),
        ("mpirun -np 4 -x A python t.py", "python"),
        ("time env A=1 torchrun t.py", "torchrun"),
        ("timeout 3h uv run torchrun t.py", "torchrun"),
        ("TORCHRUN=/opt/bin/torchrun\n$TORCHRUN t.py", "torchrun"),
    ],
)
def test_launchers_are_known_under_their_names(code: str, launcher: str) -> None:
    """A launcher is found behind wrappers, as a module, by path and in a variable; its script is the same."""
    launch = only(code)
    assert (launch.launcher, launch.script and launch.script.text) == (launcher, "t.py")


@pytest.mark.parametrize(
    "code", ["echo torchrun t.py", "which torchrun", "accelerate config", "python", "python -c 'x'"]
)
def test_other_commands_are_no_launches(code: str) -> None:
    """A launcher's name among the words of another command starts nothing."""
    assert read(code).launches == ()


def test_flags_script_and_arguments_are_told_apart() -> None:
    """Both spellings, both ways to give a value, and switches; what follows the script is the script's."""
    launch = only("torchrun --nnodes 2 --nproc-per-node=4 --standalone -r3 t.py --nnodes 8")
    given = [(flag.name, flag.value.text if flag.value else None) for flag in launch.flags]
    assert given == [("nnodes", "2"), ("nproc_per_node", "4"), ("standalone", None), ("redirects", "3")]
    assert [word.text for word in launch.args] == ["--nnodes", "8"]
    assert (launch.num_nodes, launch.num_per_node) == (2, 4)


@pytest.mark.parametrize("code", ["torchrun $ARGS t.py", "torchrun --nnodes=$N t.py", "torchrun --odd=1 t.py"])
def test_what_is_not_told_is_not_guessed(code: str) -> None:
    """Where a flag may be hidden in a variable, misspelt or unknown, the number of nodes is unknown."""
    assert only(code).num_nodes is None


@pytest.mark.skipif(find_torch() < (2, 13), reason="torchrun before 2.13 has other flags")
def test_the_flag_table_is_torchs() -> None:
    """Every flag of torch's own parser is in the table with the same spellings, and no other is but a later torch's."""
    actions = import_module("torch.distributed.run").get_args_parser()._actions
    theirs = {flag: action.nargs == 0 for action in actions for flag in action.option_strings}
    table = TABLES["torchrun"]
    ours = {flag: name in table.switches for flag, name in table.spellings.items()}
    assert {flag: told for flag, told in ours.items() if flag in theirs or flag not in LATER_FLAGS} == theirs


def test_the_flags_of_rankwise_are_all_there() -> None:
    """Every flag of `rankwise run` is in the table, and takes a value or none as there."""
    from rankwise.launcher.run_flags import build_parser

    theirs = {flag: action.nargs == 0 for action in build_parser({})._actions for flag in action.option_strings}
    table = TABLES["rankwise"]
    ours = {flag: name in table.switches for flag, name in table.spellings.items()}
    assert {flag: ours.get(flag) for flag in theirs} == theirs


def test_accelerates_flags_are_known() -> None:
    """The flags of accelerate that the table names exist there, and take a value or none as there."""
    launch = pytest.importorskip("accelerate.commands.launch")
    theirs = {
        flag: action.nargs == 0 for action in launch.launch_command_parser()._actions for flag in action.option_strings
    }
    table = TABLES["accelerate"]
    ours = {flag: name in table.switches for flag, name in table.spellings.items()}
    assert {flag: is_switch for flag, is_switch in ours.items() if theirs.get(flag, is_switch) != is_switch} == {}
    assert {"--num_processes", "--num-machines", "--machine_rank", "--main_process_port"} <= set(ours) & set(theirs)


def test_scripts_that_are_launched_are_named() -> None:
    """Python files that a text starts are given with their arguments, once each; modules are not."""
    shell = read("torchrun a.py --lr 3\npython b/c.py\ntorchrun a.py\npython -m d\n$PY e.py")
    assert shell.scripts() == [("a.py", ("--lr", "3")), ("b/c.py", ())]


# Places


def test_places_are_those_of_the_text() -> None:
    """A finding points at the word, behind letters of several bytes, in a string and in an array too."""
    for code in (
        "X='äöü\u2013' torchrun --proc_per_node=2 t.py",
        'ssh höst "cd \\"ä\\"; torchrun --proc_per_node=2 t.py"',
        "bash -c 'echo ü; torchrun --proc_per_node=2 t.py'",
        'ARGS=(--proc_per_node=2)\ntorchrun "${ARGS[@]}" t.py',
        "cat > ä.sh <<EOF\ntorchrun --proc_per_node=2 t.py\nEOF",
    ):
        (finding,) = findings(read(code))
        assert slice_of(code, finding.span) == "--proc_per_node=2"


@pytest.mark.parametrize(
    ("code", "mended"),
    [
        ("torchrun --proc_per_node=4 t.py", "torchrun --nproc_per_node=4 t.py"),
        ("torchrun --nproc-per_node 4 t.py", "torchrun --nproc-per-node 4 t.py"),
        ("torchrun --num-gpus 4 t.py", "torchrun --nproc-per-node 4 t.py"),
        ("P=$((12000 + $random % 20000))", "P=$((12000 + $RANDOM % 20000))"),
        ("P=$((12000 + random % 20000))", "P=$((12000 + RANDOM % 20000))"),
        ("P=${Random}", "P=${RANDOM}"),
        ("PORT=1234\ntorchrun --master_port=PORT t.py", "PORT=1234\ntorchrun --master_port=$PORT t.py"),
        ("torchrun --nnodes=1 \\  \n  t.py", "torchrun --nnodes=1 \\\n  t.py"),
        (
            'ARGS=(--proc_per_node=2)\ntorchrun "${ARGS[@]}" t.py',
            'ARGS=(--nproc_per_node=2)\ntorchrun "${ARGS[@]}" t.py',
        ),
    ],
)
def test_edits_mend_the_text(code: str, mended: str) -> None:
    """The edits of the findings turn the text into the right one, and nothing is found in that any more."""
    lines = code.split("\n")
    edits = {edit for finding in findings(read(code)) for edit in finding.edits}
    for edit in sorted(edits, key=lambda one: one.span, reverse=True):
        line = lines[edit.span.line - 1]
        lines[edit.span.line - 1] = line[: edit.span.col - 1] + edit.text + line[edit.span.end_col - 1 :]
    assert "\n".join(lines) == mended
    assert [finding for finding in findings(read(mended)) if finding.edits] == []


def test_no_edit_where_the_word_is_not_typed() -> None:
    """A flag that comes out of a string in a variable is told, and not mended at the place of its use."""
    (finding,) = findings(read('ARGS="--proc_per_node 2"\ntorchrun $ARGS t.py'))
    assert finding.rule == "RW701"
    assert finding.edits == ()


# Texts that are no shell, or hardly


@pytest.mark.parametrize(
    "code",
    [
        "torchrun --nproc_per_node=2 'train.py",
        "if true; then\ntorchrun --nproc_per_node=2 t.py",
        "torchrun t.py )",
        "import torch\nfor x in range(3):\n    print(x)\n",
        "\x00\x01\x02 torchrun",
        "a\u2028torchrun t.py",
        "\udcff\udcfe torchrun t.py",
        "$(" * 300,
        "((" * 200 + "x",
        '"' * 999,
        "for" * 500,
        "x <<EOF\n",
        "}\n" * 300,
        "[" * 400,
        "${" * 300,
        "\\\n" * 50,
        "x=$((1/0)) y=$((1%0))",
        "torchrun --",
        "python -m",
        "python -W",
        "srun",
        "env",
        "=1 x",
        "A[3]=1 x",
    ],
)
def test_no_text_makes_it_fail(code: str) -> None:
    """Whatever the text, the check ends without an exception."""
    assert isinstance(findings(read(code)), list)


def test_bytes_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    """Bytes outside of UTF-8 in a comment do not hide the launch."""
    code = b"# caf\xe9\ntorchrun --proc_per_node=2 t.py\n".decode(errors="surrogateescape")
    assert [finding.rule for finding in findings(read(code))] == ["RW701"]


def test_carriage_returns_do_not_move_places() -> None:
    """A file from Windows has its findings in the same lines."""
    (finding,) = findings(read("true\r\ntorchrun --proc_per_node=2 t.py\r\n"))
    assert finding.span.line == 2


def test_broken_places_are_passed_over() -> None:
    """A launch that the parser stumbles over gives nothing; others in the text are still checked."""
    code = "torchrun --proc_per_node=2 t.py\nif then fi done (\n"
    assert [finding.rule for finding in findings(read(code))] in (["RW701"], [])


def test_a_text_that_can_not_be_read_is_told_once() -> None:
    """Only if nothing of a text can be read there is a finding, and it is one."""
    assert [finding.rule for finding in findings(read("((((\n"))] == ["RW902"]
    assert findings(read("fi\necho 1\n")) == []


def test_without_the_parser_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that was put together without the parser: an error of use, with the command that mends it."""
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    study._parser.cache_clear()
    with pytest.raises(UsageError, match="tree_sitter_bash") as caught:
        study_shell(unit_of_command(["torchrun", "t.py"]))
    study._parser.cache_clear()
    assert caught.value.hint == "pip install tree-sitter tree-sitter-bash"


def test_the_script_beside_the_text_is_asked(tmp_path: Path) -> None:
    """A launcher's flag behind the script is right where the script's own text has that option."""
    (tmp_path / "own.py").write_text('parser.add_argument("--nproc_per_node")\n')
    (tmp_path / "other.py").write_text("print(1)\n")
    path = str(tmp_path / "job.sh")
    assert findings(read("torchrun own.py --nproc_per_node=2", path)) == []
    assert findings(read("python own.py --nproc_per_node=2", path)) == []
    assert [one.severity for one in findings(read("python other.py --nproc_per_node=2", path))] == ["error"]


def test_long_scripts_are_read_fast() -> None:
    """2000 lines take no longer than a few passes of a plain loop, on a slow host as on a fast one."""
    block = (
        'export A_{i}=1\nif [ "$A_{i}" -eq 1 ]; then\n  D_{i}="$ROOT/out_{i}"\nfi\nmkdir -p "$D_{i}" && cd "$D_{i}" || exit 1\n'
        "torchrun --nproc_per_node=2 --nnodes=$N \\\n  --rdzv_backend=c10d --rdzv_endpoint=$H:29400 \\\n  t.py --lr 0.{i}\n"
        "for f in *.log; do\n  echo \"$f\" | sed 's/x/y/' >> all_{i}.txt\ndone\n"
    )
    code = "".join(block.format(i=i) for i in range(182))
    assert code.count("\n") > 2000
    ratios = []
    for _ in range(3):
        begin = time.process_time()
        sum(i * i for i in range(1_000_000))
        middle = time.process_time()
        assert findings(read(code)) == []
        ratios.append((time.process_time() - middle) / (middle - begin))
    assert min(ratios) < 8
