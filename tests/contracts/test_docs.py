"""The documents say what is true: their commands are run here, and their lists are compared with the code.

How a document is written, so that it can be run:

- A ```` ```python ```` block begins with ``# name.py``: it is that file. So do blocks of ``bash``, ``toml`` and ``yaml``.
- A ```` ```console ```` block holds ``$ command`` lines, each followed by its output, both streams together. In the output, ``...``
  on a line of its own stands for any lines, and inside a line for any text. A command without output lines may print
  anything; one followed by ``(nothing)`` must print nothing.
- A comment right above a block: ``<!-- exit: N -->`` is the exit code of its last command (all others: 0),
  ``<!-- any order -->`` lets the lines of output come in any order and without their breaks (Python writes a break by itself,
  so another rank's line may come in between), ``<!-- not run: REASON -->`` takes one of the few reasons below.

A document runs as one reader would run it: from top to bottom, in one folder, so that what a section leaves behind is there for the
next. That folder is shown as ``/home/you/job``, and the launcher's temporary folder as ``/tmp/rankwise_1a2b3c4d``. The project's examples are there, too. Whether a
rank beside the failed one "lost its peer" or was "terminated by rankwise" first is a race of a moment: a document shows one, and both may come.
"""

from __future__ import annotations

import ast
import faulthandler
import functools
import html
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import gloo_words
import python_forks
from gloo_words import without_gloo
from rankwise.lint.registry import all_rules
from rankwise.lint.running.entry import find_errors
from support import find_torch, make_resident_env, without_patience

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rankwise"
COMMAND_TIMEOUT_S = 180
#: The documents' commands run with this one's installation: `make smoke` sets it to what the README's install line gives.
PYTHON = Path(os.environ.get("RANKWISE_DOCS_PYTHON") or sys.executable)
#: Languages of the blocks that are files, and how those files may end.
FILES = {"python": "py", "bash": "sh|sbatch", "toml": "toml", "yaml": "ya?ml"}
NOT_RUN = {
    "a target of the Makefile",
    "installs from the network",
    "needs two hosts",
    "needs a job that hangs",
}
#: Documents that are there in Chinese, too: `NAME.zh-CN.md` beside it.
TRANSLATED = ("README.md", "docs/tutorial/tour.md")

_BLOCK = re.compile(r"(?P<notes>(?:^<!-- .*? -->\n)*)^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
#: A script that launches ranks leaves it to them.
_NEEDS_TORCH = re.compile(r"^(?:import|from) torch\b|^from rankwise import |rankwise\.init\(", re.MULTILINE)
#: Whose launcher must be the process that the shell has started.
_IS_ABOUT_PROCESSES = re.compile(r"timeout |nohup|kill|pid|(?<![>&])&(?!&)|PYTHON|LC_|LANG|resident")
_CLASS_ID = re.compile(r"[A-Z]\d{1,2}")
#: What would change what a command does or prints: an outer launcher's variables, and the test runner's.
_NOT_PASSED_ON = ("PET_", "RANKWISE_", "TORCHELASTIC_", "MASTER_", "PYTEST_", "LOCAL_", "GROUP_", "ROLE_", "RANK",
                  "WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHON_EXEC", "NO_COLOR", "FORCE_COLOR")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a document, with the comments above it."""

    kind: str
    body: str
    notes: tuple[str, ...]
    line: int

    def note(self, name: str) -> str | None:
        """Return what stands behind ``name:`` in the comments, "" for a bare name, None if it is not there."""
        for note in self.notes:
            key, _, value = note.partition(":")
            if key.strip() == name:
                return value.strip()
        return None

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """The commands with the lines of output that follow each; a backslash continues a command."""
        found: list[tuple[str, list[str]]] = []
        continued = False
        for line in self.body.splitlines():
            if continued:
                command, output = found[-1]
                found[-1] = (f"{command}\n{line}", output)
            elif line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
            continued = line.endswith("\\") and (continued or line.startswith("$ "))
        return found


def run_documents() -> list[Path]:
    """List the documents whose commands are run; those in Chinese have the English ones' blocks.

    The examples on the pages of the check's rules are no files and no commands: tests/lint/test_rule_pages.py checks them.
    """
    pages = ROOT / "docs" / "rules" / "check"
    return [
        ROOT / "README.md",
        *sorted(
            path
            for path in (ROOT / "docs").rglob("*.md")
            if path.parent != pages and not path.name.endswith(".zh-CN.md")
        ),
    ]


def all_documents() -> list[Path]:
    """List every Markdown file of the project."""
    folders = ("docs", "examples", "benchmarks", "src", "tests")
    return sorted({*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))})


def find_blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a document."""
    return [
        Block(
            kind=found["kind"],
            body=found["body"],
            notes=tuple(re.findall(r"<!-- (.*?) -->", found["notes"])),
            line=text.count("\n", 0, found.start("kind")) + 1,
        )
        for found in _BLOCK.finditer(text)
    ]


def file_name(block: Block) -> str:
    """Return the name of the file that a block is."""
    found = re.match(rf"# ([\w./-]+\.(?:{FILES[block.kind]}))\n", block.body)
    assert found, f"the {block.kind} block at line {block.line} does not begin with '# name.{FILES[block.kind]}'"
    return found[1]


def _read_bash(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, encoding="utf-8", check=True, timeout=10)


def _read_toml(text: str) -> None:
    if sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(text)


def _read_yaml(text: str) -> None:
    pytest.importorskip("yaml").safe_load(text)


#: Each raises if a block is not what it says.
READABLE = {"python": ast.parse, "bash": _read_bash, "toml": _read_toml, "yaml": _read_yaml}


def is_run(block: Block) -> bool:
    """Tell whether a block holds commands that are run here."""
    return block.kind == "console" and block.note("not run") is None


def blocks_of(document: Path) -> list[Block]:
    """Return the fenced blocks of a document."""
    return find_blocks(document.read_text(encoding="utf-8"))


def name_of(document: Path) -> str:
    """Return the path of a document within the project."""
    return document.relative_to(ROOT).as_posix()


def run_command(command: str, folder: Path) -> tuple[int, str]:
    """Run a command as a reader would, with the tested installation first on PATH; return exit code and output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    env["PATH"] = os.pathsep.join([str(PYTHON.parent), env.get("PATH", os.defpath)])
    if str(PYTHON) == sys.executable and find_torch() < (2, 9):
        # What a document gives to another program of the shell is what a later torch writes.
        command = re.sub(
            r"(rankwise run [^|>]*)((?<!\d)>(?! \S+ 2>)|\|(?!\|))",
            rf"\1| {sys.executable} {gloo_words.__file__} \2",
            command,
        )
    env |= {
        "CUDA_VISIBLE_DEVICES": "",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "120",
        "XDG_STATE_HOME": str(folder.parent / "state"),
        **_resident_env(command, folder),
        **_check_env(command, folder),
    }
    fds = _fork_python(command, folder, env)
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", start_new_session=True, pass_fds=fds,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=10)
        pytest.fail(f"still running after {COMMAND_TIMEOUT_S} s: $ {command}\n{output}")
    return process.returncode, output


def _resident_env(command: str, folder: Path) -> dict[str, str]:
    """Return what gives a command one of this session's resident servers; what a document says of them is about its own."""
    if "resident" in command:
        return {"RANKWISE_RESIDENT_FOLDER": str(folder.parent / "residence")}
    # Not for the commands that show variables, nor where what users install is looked at.
    is_run = str(PYTHON) == sys.executable and not re.search(r"rankwise (env|doctor)", command)
    return make_resident_env() if is_run else {}


def _check_env(command: str, folder: Path) -> dict[str, str]:
    """Check a command's scripts here, as its launch would in a process of its own; return what leaves that out where there are no errors."""
    names = re.findall(r"[\w./-]+\.py\b", command)
    paths = [path for name in names if (path := folder / name).is_file()]
    is_plain = (
        str(PYTHON) == sys.executable and "rankwise run" in command and not re.search(r"strict|(?i:check)", command)
    )
    return {"RANKWISE_CHECK": "0"} if is_plain and paths and not any(find_errors(str(path)) for path in paths) else {}


def _fork_python(command: str, folder: Path, env: dict[str, str]) -> list[int]:
    """Have the `python` of a command that needs torch forked off one that has it, and `rankwise run` off one that has the launcher.

    The imports take them longer than all else, and there are hundreds. Return what the command inherits for that. `make smoke` runs the
    README with the Python itself.
    """
    if str(PYTHON) != sys.executable or "PYTHON_EXEC" in command:
        return []
    shells = [path.read_text(encoding="utf-8") for name in re.findall(r"\bbash ([\w-]+\.sh)\b", command) if (path := folder / name).is_file()]  # fmt: skip
    names = re.findall(r"(?<![\w./-])python ([\w./-]+\.py)\b", "\n".join([command, *shells]))
    texts = [path.read_text(encoding="utf-8") for name in names if (path := folder / name).is_file()]
    needs_torch = any(_NEEDS_TORCH.search(text) for text in texts) or re.search(
        r"rankwise (checkpoint (im|ex)port|compare)\b", command
    )
    launches = re.search(r"rankwise run\b", command) and not _IS_ABOUT_PROCESSES.search(command)
    lines: dict[str, list[str]] = {"python": [], "rankwise": []}
    fds, rankwise = [], PYTHON.with_name("rankwise")
    for is_wanted, modules, cases in (
        (needs_torch, python_forks.TRAINING, {"python": '"$1" in *.py', "rankwise": '"$1 $2" in "checkpoint import"|"checkpoint export"|compare\\ *'}),
        (launches, python_forks.LAUNCHING, {"rankwise": '"$1" in run'}),
    ):  # fmt: skip
        sock = python_forks.find_socket(modules) if is_wanted else None
        if sock is None:
            continue
        fds.append(sock.fileno())
        for name, case in cases.items():
            script = f"{rankwise} " if name == "rankwise" else ""
            shim = f'exec {PYTHON} -IS {python_forks.SHIM} {sock.fileno()} {script}"$@"'
            lines[name].append(f"case {case}) {shim};; esac")
    if fds:
        shims = folder.parent / "shims"
        shims.mkdir(exist_ok=True)
        for name, before in lines.items():
            (shims / name).write_text("\n".join(["#!/bin/sh", *before, f'exec {PYTHON.with_name(name)} "$@"', ""]))  # fmt: skip
            (shims / name).chmod(0o755)
        env["PATH"] = f"{shims}{os.pathsep}{env['PATH']}"
    return fds


def neutral(output: str, folder: Path) -> str:
    """Put the documents' names in the place of this run's folders."""
    output = output.replace(str(folder.resolve()), "/home/you/job").replace(str(folder), "/home/you/job")
    # On a busy machine a rank keeps others waiting for seconds, and the launcher says so.
    output = re.sub(r"(?m)^rankwise: .*; it may just be slow\n", "", output)
    # In a pipe for both streams nobody knows whether a rank has left half a line; on a terminal nothing of it is seen.
    output = re.sub(r"(^|\n)\n(?=rankwise: (?:the job|attempt) )", r"\1", output)
    return re.sub(r"/\S*/rankwise_\w{8}(?=/)", "/tmp/rankwise_1a2b3c4d", without_patience(without_gloo(output)))


def line_pattern(line: str) -> str:
    """Return the pattern of a line of output in a document."""
    pattern = re.escape(line.rstrip()).replace(r"\.\.\.", ".*")
    fates = [re.escape(fate) for fate in ("lost its peer", "terminated by rankwise")]
    return re.sub("|".join(map(re.escape, fates)), lambda _: f"(?:{'|'.join(fates)})", pattern)


def agrees(shown: list[str], output: str, *, in_any_order: bool = False) -> bool:
    """Tell whether a command's output is what the document shows."""
    if shown == ["(nothing)"]:
        return not output.strip()
    lines = [line.rstrip() for line in output.splitlines()]
    if in_any_order:
        rest = "\n".join(lines)
        for line in sorted((line.rstrip() for line in shown), key=len, reverse=True):
            before, found, after = rest.partition(line)
            if not found:
                return False
            rest = f"{before}\n{after}"
        return not rest.strip()
    parts = [r"(?:[^\n]*\n)*?" if line.strip() == "..." else line_pattern(line) + "\n" for line in shown]
    return re.fullmatch("".join(parts), "".join(f"{line}\n" for line in lines)) is not None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the documents show a Linux shell")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", [one for one in run_documents() if any(map(is_run, blocks_of(one)))], ids=name_of)
def test_commands_do_what_the_document_shows(document: Path, tmp_path: Path) -> None:
    """Whoever types a document from top to bottom into one folder gets the exit codes and the lines that it shows."""
    faulthandler.cancel_dump_traceback_later()  # a page takes minutes; its commands have their own limit
    folder = tmp_path / "job"
    folder.mkdir()
    # A reader stands in a clone: what the documents run of it is there.
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks_of(document):
        if block.kind in FILES:
            write(folder / file_name(block), block.body)
        if not is_run(block):
            continue
        for number, (command, shown) in enumerate(block.commands, 1):
            code, output = run_command(command, folder)
            output = neutral(output, folder)
            place = f"{name_of(document)}:{block.line}: $ {command}\n"
            wanted = int(block.note("exit") or 0) if number == len(block.commands) else 0
            kept = folder / "errors.txt"
            errors = kept.read_text(errors="replace")[-3000:] if code != wanted and kept.exists() else ""
            assert code == wanted, f"{place}exit code {code}, the document says {wanted}\n{output}{errors}"
            if shown:
                same = agrees(shown, output, in_any_order=block.note("any order") is not None)
                assert same, f"{place}printed\n{output}\nand the document shows\n" + "\n".join(shown)


def write(path: Path, text: str) -> None:
    """Write a file of a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("document", run_documents(), ids=lambda path: path.name)
def test_no_block_escapes(document: Path) -> None:
    """Every fenced block is a file or commands in the form above, and each that is not run names an accepted reason."""
    text = document.read_text(encoding="utf-8")
    blocks = find_blocks(text)
    fences = [line for line in text.splitlines() if line.lstrip(" >-*").startswith(("```", "~~~"))]
    assert len(fences) == 2 * len(blocks), "a fence is indented, unclosed or made of tildes"
    for block in blocks:
        assert block.kind in {*FILES, "console"}, f"line {block.line}: {block.kind or 'no language'}"
        reason = block.note("not run")
        assert reason is None or reason in NOT_RUN, f"line {block.line}: {reason!r}"
        if block.kind == "console":
            assert block.body.startswith("$ "), f"line {block.line}: no command"
        else:
            READABLE[block.kind](block.body)
            assert file_name(block)


def test_output_patterns() -> None:
    """Dots stand for lines or for text, everything else is exact: a wrong line of output is found."""
    assert agrees(["a", "...", "z ... y"], "a\nb\nc\nz x y\n")
    assert agrees(["..."], "")
    assert not agrees(["a"], "a\nb\n")
    assert not agrees(["rank 0 of 2"], "rank 1 of 2\n")
    assert agrees(["rank 0 lost its peer"], "rank 0 terminated by rankwise\n")
    assert not agrees(["rank 0 lost its peer"], "rank 0 finished\n")
    assert agrees(["b", "a"], "a\nb\n", in_any_order=True)
    assert agrees(["rank 0", "rank 1"], "rank 1rank 0\n\n", in_any_order=True)
    assert not agrees(["rank 0", "rank 1"], "rank 1\nrank 1\n", in_any_order=True)
    assert not agrees(["rank 0"], "rank 0\nrank 1\n", in_any_order=True)
    assert not agrees(["(nothing)"], "something\n")


@pytest.mark.parametrize("name", TRANSLATED)
def test_translations_have_the_same_commands(name: str) -> None:
    """A Chinese document has the English one's files and commands, in the same order, letter for letter."""
    english, chinese = (
        find_blocks((ROOT / one).read_text(encoding="utf-8")) for one in (name, name.replace(".md", ".zh-CN.md"))
    )
    assert [(block.kind, block.body, block.notes) for block in english] == [
        (block.kind, block.body, block.notes) for block in chinese
    ]


def test_the_index_has_every_page() -> None:
    """docs/README.md leads to every page that is not one of many of its kind."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)]+)\)", index))
    pages = {
        path.relative_to(ROOT / "docs").as_posix()
        for folder in ("tutorial", "howto", "explain", "reference")
        for path in (ROOT / "docs" / folder).glob("*.md")
    }
    assert pages <= linked, sorted(pages - linked)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Mkdocs takes each page, link and anchor; what leads out of docs/ has become plain words."""
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    built = (tmp_path / "site" / "howto" / "from-torchrun" / "index.html").read_text(encoding="utf-8")
    assert "ARCHITECTURE.md" not in built


def test_the_front_page_is_short() -> None:
    """Whoever sees the README for the first time reads it: 900 words at most, its code included."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_make_targets_exist() -> None:
    """The README names `make demo` and `make test`, and the Makefile has every target that a document calls."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in all_documents():
        named = set(re.findall(r"\bmake ([a-z-]+)\b(?=`|$)", document.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, f"{document.name}: {named - targets}"
        if document.parent == ROOT and document.name.startswith("README"):
            assert {"demo", "test"} <= named, document.name


def heading_anchor(heading: str) -> str:
    """Return the anchor that a heading gets on the usual hosts of Markdown."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def without_code(text: str) -> str:
    """Return a document without its blocks and its code in backticks."""
    return re.sub(r"`[^`\n]*`", "", _BLOCK.sub("", text))


@pytest.mark.parametrize("document", all_documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link in a document leads to a file, and to a heading of it if it names one."""
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", without_code(text)):
        link = target[0] or target[1]
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        file = (document.parent / name) if name else document
        assert file.exists(), f"{link} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {heading_anchor(heading) for heading in headings}, f"{link} leads to no heading"


def test_architecture_names_what_exists() -> None:
    """Every path in ARCHITECTURE.md exists, and every folder of the package stands in its list of rooms, which is short enough to be read."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 250
    named = [token for token in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[\w.*/-]+(/|\.\w+)", token)]
    paths = [token for token in named if "/" in token or re.search(r"\.(py|md|toml|txt|svg)$", token)]
    for path in set(paths) - {"step-500.tmp/"}:
        assert [*ROOT.glob(path.rstrip("/")), *SOURCE.glob(path.rstrip("/"))], f"{path} does not exist"
    drawn = re.search(r"^## The rooms\n.*?```\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert drawn
    shown, room = set(), ""
    for indent, name in re.findall(r"^( *)(\w+)/ ", drawn[1], re.MULTILINE):
        room = room if indent else name
        shown.add(f"{room}/{name}" if indent else name)
    folders = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")} - {"."}
    assert shown == folders


def test_architecture_shows_the_layers_that_are_checked() -> None:
    """The layers in ARCHITECTURE.md are those that import-linter enforces, in the same order."""
    contract = re.search(
        r"^layers = \[\n(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert contract
    layers = re.findall(r'"([^"]+)"', contract[1])
    rows = re.findall(r"^\| `([a-z_| \\]+)` \|", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE)
    shown = [row.replace("\\", "") for row in rows]
    present = [" | ".join(room for room in layer.split(" | ") if exists(room)) for layer in layers]
    assert shown == [layer for layer in present if layer]


def exists(room: str) -> bool:
    """Tell whether a room of the package is there: a contract may name one before it is built."""
    return (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").is_file()


@functools.cache
def class_ids_in_code() -> set[str]:
    """Return the failure classes that the code can name: those of the rules, and every string in it that has their form."""
    return {name for one in all_rules() for name in one.classes} | {
        node.value
        for path in SOURCE.rglob("*.py")
        if path.name != "shard.py"  # has words of the same form for dtypes
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CLASS_ID.fullmatch(node.value)
    }


def test_every_failure_class_is_explained() -> None:
    """Each failure class that the code can name has its entry in the reference; an entry without code is one that no rule can find."""
    text = (ROOT / "docs" / "reference" / "failure-classes.md").read_text(encoding="utf-8")
    entries = re.findall(r"^### ([A-Z]\d{1,2}): ", text, re.MULTILINE)
    assert len(entries) == len(set(entries))
    undecided = set(
        re.findall(
            r'^    "([A-Z]\d{1,2})": ',
            (ROOT / "docs" / "undecided.py").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    assert class_ids_in_code() - set(entries) == set()
    assert set(entries) - class_ids_in_code() - undecided == set()
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        for part in ("You see", "It is", "Do"):
            assert f"**{part}:**" in entry, f"{entry.splitlines()[0]} lacks {part!r}"


def test_picture_shows_the_report_of_the_readme() -> None:
    """The README's picture shows the same report as the text above it: it was drawn from the same script."""
    block = next(
        block
        for block in find_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
        if "--uneven" in block.body and block.kind == "console"
    )
    svg = (ROOT / "docs" / "pictures" / "hang.svg").read_text(encoding="utf-8")
    drawn = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", svg)).replace("\xa0", " "))
    for line in block.body[block.body.index("rankwise: the job failed") :].splitlines():
        parts = [re.sub(r"\s+", " ", part.strip()) for part in line.split("...")]
        assert all(part in drawn for part in parts), line


def test_every_picture_is_shown() -> None:
    """No file in docs/pictures is without a document that shows it."""
    shown = {
        Path(link).name
        for document in all_documents()
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    }
    assert {path.name for path in (ROOT / "docs" / "pictures").iterdir()} <= shown
