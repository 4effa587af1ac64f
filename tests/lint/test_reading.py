"""From files to pieces: languages, encodings, notebooks, Markdown pages, and the ways back to the file."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

from rankwise.lint.finding import Span
from rankwise.lint.inputs.discovery import find_files
from rankwise.lint.inputs.markdown import read_markdown
from rankwise.lint.inputs.notebook import read_notebook
from rankwise.lint.inputs.reading import decide_kind, read_file
from rankwise.lint.inputs.unparsed import find_unparsed


def _notebook(*cells: str, **metadata: object) -> str:
    listed = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": listed, "metadata": metadata, "nbformat": 4})


@pytest.mark.parametrize(
    ("path", "head", "kind"),
    [
        ("a.py", b"", "python"),
        ("a.IPYNB", b"", "notebook"),
        ("job.slurm", b"", "shell"),
        ("README.md", b"", "markdown"),
        ("train", b"#!/usr/bin/env python3\n", "python"),
        ("train", b"#!/bin/bash -l\n", "shell"),
        ("job", b"# a job\n#SBATCH --nodes=2\n", "shell"),
        ("data.bin", b"\x00\x01", None),
    ],
)
def test_kind_comes_from_name_or_first_line(path: str, head: bytes, kind: str | None) -> None:
    """A suffix decides, else the shebang or a scheduler's lines; nothing is guessed beyond that."""
    assert decide_kind(path, head) == kind


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfx = 1\n", "x = 1\n"),
        ("# coding: gbk\ns = '中'\n".encode("gbk"), "# coding: gbk\ns = '中'\n"),
        (b"# -*- coding: latin-1 -*-\ns = '\xe9'\n", "# -*- coding: latin-1 -*-\ns = 'é'\n"),
        (b"x = 1\r\ny = 2\r\n", "x = 1\r\ny = 2\r\n"),
    ],
)
def test_python_is_decoded_as_python_does(data: bytes, text: str) -> None:
    """Byte order marks and coding comments count; line ends stay, so that the file can be written back."""
    reading = read_file("a.py", data)
    assert [unit.code for unit in reading.units] == [text]
    assert text.encode(reading.encoding) == data


@pytest.mark.parametrize(
    ("data", "line", "word"),
    [
        (b"a = 1\nb = '\xff'\n", 2, "0xff"),
        (b"# coding: nonsense\n", 1, "coding"),
        (b"# coding: rot13\nk\n", 1, "rot13"),
    ],
)
def test_python_that_is_no_text_is_told_with_its_place(data: bytes, line: int, word: str) -> None:
    """Bytes that Python itself refuses are one finding on their line."""
    unparsed = read_file("a.py", data).unparsed
    assert unparsed is not None
    assert unparsed.line == line
    assert word in unparsed.why


def test_a_shell_script_in_another_alphabet_is_read() -> None:
    """Shells do not care about encodings, so neither do we."""
    (unit,) = read_file("a.sh", b"echo caf\xe9\ntorchrun x.py\n").units
    assert unit.lines[1] == "torchrun x.py"


@pytest.mark.parametrize(
    ("data", "word"),
    [(b"x\0y", "NUL"), ("x = 1".encode("utf-16"), "UTF-16"), (b"#" * 5_000_001, "5.0 MB")],
)
def test_what_is_no_source_gives_a_note(data: bytes, word: str) -> None:
    """Binary, UTF-16 and huge files are left alone, with the reason."""
    reading = read_file("a.py", data)
    assert reading.units == ()
    assert word in reading.note


def test_a_notebooks_cells_are_one_program() -> None:
    """A later cell sees the names of an earlier one, and each line knows its cell."""
    units, unparsed = read_notebook("a.ipynb", _notebook("import torch\nx = 1", "y = x\n"))
    assert unparsed is None
    (unit,) = units
    assert unit.lines == ["import torch", "x = 1", "y = x", "", ""]
    assert unit.place(Span(3, 1, 3, 6)) == (Span(1, 1, 1, 6), 2)


def test_magics_become_nothing_and_keep_lines() -> None:
    """IPython's lines turn into `pass` in place, also under an `if`, and assignments keep their names."""
    source = "%matplotlib inline\nif True:\n    !pip install \\\n      torch\nfiles = !ls\nprint?\nx = 5 \\\n% 3"
    units, _ = read_notebook("a.ipynb", _notebook(source))
    python = units[0]
    assert python.lines[:7] == ["pass", "if True:", "    pass", "", "files = None", "pass", "x = 5 \\"]
    ast.parse(python.code)


def test_shell_in_a_notebook_is_shell() -> None:
    """`!torchrun` and %%bash cells are pieces of shell text whose places are those in the cell."""
    units, _ = read_notebook(
        "a.ipynb", _notebook("x = 1", "!torchrun --nproc-per-node 2 a.py", "%%bash\nsrun python a.py")
    )
    shells = [unit for unit in units if unit.language == "shell"]
    assert [unit.code.strip() for unit in shells] == [
        "torchrun --nproc-per-node 2 a.py",
        "srun python a.py",
    ]
    assert shells[0].place(Span(1, 1, 1, 9)) == (Span(1, 2, 1, 10), 2)
    assert shells[1].place(Span(2, 1, 2, 5)) == (Span(2, 1, 2, 5), 3)


def test_a_file_that_a_cell_writes_is_checked_by_itself() -> None:
    """%%writefile train.py is a whole script, and no part of the notebook's program."""
    units, _ = read_notebook("a.ipynb", _notebook("a = 1", "%%writefile train.py\nimport torch\n", "%%html\n<p>"))
    assert [(unit.is_fragment, unit.code.strip()) for unit in units] == [
        (True, "a = 1"),
        (False, "import torch"),
    ]


def test_a_broken_cell_hides_no_other() -> None:
    """A cell that is no Python stands alone, so the others are checked."""
    units, _ = read_notebook("a.ipynb", _notebook("x = 1", "print 'a'", "y = 2"))
    assert [find_unparsed(unit.code) is None for unit in units] == [True, False]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"cells": 3}', "[" * 100_000, "1" * 5000])
def test_what_is_no_notebook_is_told(text: str) -> None:
    """JSON that is none, or no notebook, is one finding and no crash."""
    units, unparsed = read_notebook("a.ipynb", text)
    assert units == ()
    assert unparsed is not None
    assert "not a notebook" in unparsed.why


def test_a_notebook_of_another_language_is_left_alone() -> None:
    """R and Julia are not checked."""
    assert read_notebook("a.ipynb", _notebook("x <- 1", kernelspec={"language": "R"})) == ((), None)


_TUTORIAL = """\
# How to

```python
import torch.distributed as dist
```

- then

   ```py
   def setup(rank):
       dist.init_process_group("gloo", rank=rank)
   ```

> ~~~~ {.python .numberLines}
> if __name__ == "__main__":
>     setup(0)
> ~~~~

```text
import nothing
```
"""


def test_a_tutorials_fences_are_one_script() -> None:
    """Fences in lists and quotes go together, at the lines and columns of the page."""
    (unit,) = read_markdown("a.md", _TUTORIAL)
    assert unit.is_fragment
    assert [line for line in unit.lines if line] == [
        "import torch.distributed as dist",
        "def setup(rank):",
        '    dist.init_process_group("gloo", rank=rank)',
        'if __name__ == "__main__":',
        "    setup(0)",
    ]
    lines = _TUTORIAL.split("\n")
    for number, line in enumerate(unit.lines, start=1):
        span, cell = unit.place(Span(number, 1, number, len(line) + 1))
        assert cell is None
        if line:
            assert lines[span.line - 1][span.col - 1 : span.end_col - 1] == line


def test_two_programs_on_a_page_stay_apart() -> None:
    """A fence that starts anew begins a new piece; so does a second version of a function."""
    program = "```python\nimport torch\ntorch.distributed.init_process_group('gloo')\n```\n"
    assert len(read_markdown("a.md", program + "text\n\n" + program)) == 2
    first = "```python\nimport torch\ndef train():\n    pass\n```\n"
    again = "```python\ndef train():\n    torch.save(1, 'x')\n```\n"
    one, two = read_markdown("a.md", first + again)
    assert "import torch" in two.code  # whose imports the second version goes on to use
    assert "save" not in one.code


def test_fences_that_are_no_program_are_dropped() -> None:
    """Output, diffs, gaps and slips are no Python: whoever pastes them sees it at once."""
    assert read_markdown("a.md", "```python\n>>> x\n3\n```\n```python\ndef f(<args>):\n```\n")[0].code.strip() == "x"
    assert read_markdown("a.md", "```python\nTraceback (most recent call last):\n```\n") == ()


def test_console_fences_give_commands_without_prompts() -> None:
    """Prompts are cut with their width noted, output is left out, continued commands stay whole."""
    text = "```console\n$ torchrun \\\n>   a.py\nsome output\n```\n```bash\ntorchrun b.py\n```\n"
    one, two = read_markdown("a.md", text)
    assert one.lines[1:4] == ["torchrun \\", "  a.py", ""]
    assert one.place(Span(2, 1, 2, 9))[0] == Span(2, 3, 2, 11)
    assert two.code.strip() == "torchrun b.py"


def test_a_longer_fence_holds_a_shorter_one() -> None:
    """Only as many marks as opened a fence close it, and an open fence ends with the page."""
    (unit,) = read_markdown("a.md", "````python\ns = '''\n```\n'''\n````\n```python\nx = 1")
    assert unit.code.split("\n")[1:4] == ["s = '''", "```", "'''"]
    assert "x = 1" in unit.code


def test_a_folder_gives_its_own_sources(tmp_path: Path) -> None:
    """A search takes sources by suffix and leaves out what is not the user's; a file that is named is always taken."""
    for name in (
        "a.py",
        "b.txt",
        "job.sbatch",
        ".venv/x.py",
        "build/y.py",
        "pkg/z.py",
        "pkg/node_modules/q.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "env").mkdir()
    (tmp_path / "env/pyvenv.cfg").write_text("")
    (tmp_path / "env/lib.py").write_text("")
    (tmp_path / "pkg/loop").symlink_to(tmp_path)
    found, missing = find_files([str(tmp_path), str(tmp_path / "b.txt"), "nowhere"], lambda path: path.name == "a.py")
    assert [str(Path(path).relative_to(tmp_path)) for path in found] == ["job.sbatch", "pkg/z.py", "b.txt"]
    assert missing == ["nowhere"]
    assert find_files([str(tmp_path / "build")], lambda _: False)[0] == [str(tmp_path / "build/y.py")]


def test_what_git_ignores_is_left_out(tmp_path: Path) -> None:
    """In a git tree .gitignore counts, files that are not added yet are seen, and no program of the tree's is run."""
    try:
        subprocess.run(["git", "init", "-q", tmp_path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git here")
    monitor = tmp_path / "monitor.sh"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path}/was_run\n")
    monitor.chmod(0o755)
    subprocess.run(["git", "-C", tmp_path, "config", "core.fsmonitor", str(monitor)], check=True)
    (tmp_path / ".gitignore").write_text("made.py\n")
    (tmp_path / "made.py").write_text("")
    (tmp_path / "a.py").write_text("")
    found, _ = find_files([str(tmp_path)], lambda _: False)
    assert [Path(path).name for path in found] == ["a.py", "monitor.sh"]
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("code", "line", "word"),
    [
        ("import os\nprint 'a'\n", 2, "print"),
        ("print(\u201chi\u201d)\n", 1, "U+201C"),
        ("if x:\n        a = 1\n\tb = 2\n", 3, "tab"),
        ("x = = 1\n", 1, "syntax"),
        ("x" + "(" * 3000 + ")" * 3000, 1, ""),
        ("-" * 500_000 + "1", 1, ""),
    ],
    ids=lambda value: str(value)[:20],
)
def test_why_a_text_is_no_python(code: str, line: int, word: str) -> None:
    """The place is told, in the words of Python's parser; hostile nesting is no crash."""
    unparsed = find_unparsed(code)
    assert unparsed is not None
    assert unparsed.line == line
    assert word in unparsed.why
