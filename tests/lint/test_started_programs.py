"""What a file starts is found along its imports: its own words, and the names of libraries, decide nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankwise.lint.running.one_file import Checker

if TYPE_CHECKING:
    from pathlib import Path

_ENGINE = """
import torch.distributed as dist
class Engine:
    def __init__(self, folder):
        self.folder = folder
        self.__join()
    def __join(self):
        dist.init_process_group("gloo")
    def run(self):
        self.__each()
    def __each(self):
        import os
        os.makedirs(self.folder)
"""
_MAIN = """
from engine import Engine
def main():
    Engine("out").run()
if __name__ == "__main__":
    main()
"""
_FILES = {"engine.py": _ENGINE, "main.py": _MAIN}


def _rules(folder: Path, files: dict[str, str], checked: str) -> list[str]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    result = Checker(roots=(folder,)).check(str(folder / checked))
    assert not result.failures
    return [one.rule for one in result.kept.findings]


@pytest.mark.parametrize(
    "files",
    [
        _FILES,
        {"engine.py": _ENGINE, "main.py": "from engine import Engine\nEngine('out').run()\n"},
        {"engine.py": _ENGINE, "part/__init__.py": "from . import one\n", "part/one.py": "import engine\ndef go():\n    engine.Engine('out').run()\n",
         "main.py": "from part import (\n    one as it,\n)\nit.go()\n"},
        {"engine.py": _ENGINE + "class Other(Engine):\n    def __each(self):\n        pass\n", "main.py": _MAIN.replace("Engine", "Other")},
    ],
    ids=["behind the guard", "at the margin", "by way of a package", "private methods are each class's own"],
)  # fmt: skip
def test_a_file_without_a_word_of_ranks_starts_them(tmp_path: Path, files: dict[str, str]) -> None:
    """A program whose own text says nothing of ranks is run as one if what it imports joins a group."""
    assert _rules(tmp_path, files, "main.py") == ["RW516"]


@pytest.mark.parametrize(
    "files",
    [
        {**_FILES, "engine.py": _ENGINE.replace('dist.init_process_group("gloo")', "pass")},
        {**_FILES, "main.py": _MAIN.partition("if __name__")[0]},
        {**_FILES, "main.py": _MAIN.replace("from engine", "from other.engine")},
    ],
    ids=["nothing joins", "nothing is started", "another module"],
)
def test_a_file_that_starts_no_ranks(tmp_path: Path, files: dict[str, str]) -> None:
    """What joins no group, or is only defined, is no program of several ranks."""
    assert _rules(tmp_path, files, "main.py") == []


def test_what_the_imports_say_is_part_of_what_is_kept(tmp_path: Path) -> None:
    """A kept result depends on the modules that were searched for what they start."""
    _rules(tmp_path, {**_FILES, "main.py": "import engine\nprint(1)\n"}, "main.py")
    result = Checker(roots=(tmp_path,)).check(str(tmp_path / "main.py"))
    assert str(tmp_path / "engine.py") in result.sources


_LOADERS = """
import torch.distributed as dist
from torchvision.datasets import MNIST
def load():
    return MNIST("data", download=True)
"""
_USES = """
import torch.distributed as dist
from datasets import load
dist.init_process_group("gloo")
load()
"""


def test_a_module_beside_the_script_comes_before_a_library(tmp_path: Path) -> None:
    """A script's own `datasets.py` or `datasets/` is what it imports, whatever library has that name."""
    assert _rules(tmp_path / "a", {"datasets.py": _LOADERS, "main.py": _USES}, "main.py") == ["RW515"]
    assert _rules(tmp_path / "b", {"datasets/__init__.py": _LOADERS, "main.py": _USES}, "main.py") == ["RW515"]


def test_a_library_in_its_own_source_stays_a_library(tmp_path: Path) -> None:
    """Beside a project's setup, a package of a library's name is that library, which tables know."""
    files = {"datasets/__init__.py": _LOADERS, "setup.py": "", "main.py": _USES}
    assert _rules(tmp_path, files, "main.py") == []


_JOIN = "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
_TRAIN = """
def train(steps, is_first):
    for step in range(steps):
        if is_first and step > 5:
            break
        dist.barrier()
"""
_PATHS = {
    "a folder without __init__ is a package": ("RW515", {"parts/loaders.py": _LOADERS, "main.py": _JOIN + "from parts import loaders\nloaders.load()\n"}),
    "an import of an import begins beside the program": (
        "RW515",
        {"job/a/one.py": "from b.loaders import load\n", "job/b/loaders.py": _LOADERS, "job/main.py": _JOIN + "from a.one import load\nload()\n"},
    ),
    "a package takes all names of its modules": (
        "RW515",
        {"parts/__init__.py": "from .loaders import *\n", "parts/loaders.py": _LOADERS, "main.py": _JOIN + "from parts import load\nload()\n"},
    ),
    "a class by a name that is not known": (
        "RW515",
        {"parts.py": "from torchvision.datasets import MNIST\nclass Digits:\n    def __init__(self):\n        self.data = MNIST('data', download=True)\n",
         "main.py": _JOIN + "import os, parts\ngetattr(parts, os.environ['DATA'])()\n"},
    ),
    "what is handed over divides ranks in another file": (
        "RW108",
        {"loop.py": "import torch.distributed as dist\n" + _TRAIN, "main.py": _JOIN + "from loop import train\ntrain(9, dist.get_rank() == 0)\n"},
    ),
    "a file is read in another module": (
        "RW603",
        {"use.py": "import torch\ndef load():\n    return torch.load('last.pt', map_location='cpu')\n",
         "main.py": _JOIN + "from use import load\nif dist.get_rank() == 0:\n    torch.save({}, 'last.pt')\nload()\n"},
    ),
    "a mean is summed in another module": (
        "RW613",
        {"comm.py": "import torch.distributed as dist\ndef add(x):\n    dist.all_reduce(x)\n    return x\n",
         "main.py": _JOIN + "from comm import add\nloss = torch.nn.functional.mse_loss(torch.rand(4), torch.ones(4))\nloss = add(loss)\nprint(loss)\n"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _PATHS)
def test_what_is_imported_is_followed(tmp_path: Path, name: str) -> None:
    """A mistake that lies in another file, or is made with what another one was given, is found where the program leads to it."""
    rule_id, files = _PATHS[name]
    assert rule_id in _rules(tmp_path, files, next(one for one in files if one.endswith("main.py")))


def test_what_another_file_shows_by_itself_is_found_there_alone(tmp_path: Path) -> None:
    """Where ranks part in a module by its own words, its own check tells it, and none of a program that imports it."""
    loop = _TRAIN.replace("steps, is_first", "steps").replace("is_first", "dist.get_rank() == 0")
    own = f"import torch.distributed as dist\n{loop}"
    files = {"loop.py": own, "main.py": _JOIN + "from loop import train\ntrain(9)\n"}
    assert "RW108" not in _rules(tmp_path, files, "main.py")
    assert "RW108" in _rules(tmp_path, files, "loop.py")


def test_a_sum_that_the_caller_divides_is_a_mean(tmp_path: Path) -> None:
    """What a function gives of all ranks' sums may be divided where it was called."""
    _, files = _PATHS["a mean is summed in another module"]
    divided = {**files, "main.py": files["main.py"].replace("print(loss)", "print(loss / 8)")}
    assert "RW613" not in _rules(tmp_path, divided, "main.py")
