"""What a script needs before its first line is read from its text: the modules to preload, or the reason for a cold start."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from rankwise.warm.plan import Plan, plan_start

if TYPE_CHECKING:
    from pathlib import Path

DYNAMO = ("torch", "torch._dynamo")
NOTHING_HEAVY = "the script imports nothing heavy"


def plan(folder: Path, files: dict[str, str] | str, program: str = "train.py", *, is_module: bool = False) -> Plan:
    """Write files and plan the start of one of them."""
    for name, text in ({"train.py": files} if isinstance(files, str) else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return plan_start(program, is_module=is_module, cwd=folder)


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import torch", ("torch",)),
        ("import torch.nn as nn", ("torch", "torch.nn")),
        ("from torch import nn", ("torch",)),
        ("import my_framework", ("torch",)),
        ("def main():\n    import torch", ("torch",)),
        ("if True:\n    import torch", ("torch",)),
        ("try:\n    import torch\nexcept ImportError:\n    pass", ("torch",)),
        ("import torch, re\nre.compile('a')", ("torch",)),
        ("import torch\nimport regex\nregex.compile('a')", ("torch",)),
        ("import torch\ncompile('1', 'f', 'exec')", ("torch",)),
        ("import torch\n# DistributedDataParallel\n'fully_shard'", ("torch",)),
        ("import torch\ntorch.compile(f)", DYNAMO),
        ("import torch\nmodel.compile()", DYNAMO),
        ("from torch import compile\ncompile(f)", DYNAMO),
        ("import torch\ntorch.nn.parallel.DistributedDataParallel(model)", DYNAMO),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", DYNAMO),
        ("from torch.nn.parallel import DistributedDataParallel as Parallel", DYNAMO),
        ("from torch.distributed.fsdp import fully_shard", DYNAMO),
        ("from torch.distributed.fsdp import FullyShardedDataParallel as F", DYNAMO),
        ("import torch\ntorch.optim.SGD(p)", DYNAMO),
        ("import torch.optim as o", DYNAMO),
        ("from torch.optim import AdamW", DYNAMO),
        ("import lightning", DYNAMO),
        ("from transformers import Trainer", DYNAMO),
        ("import accelerate", DYNAMO),
        ("import importlib\nimportlib.import_module('torch')", ("torch",)),
        ("__import__('torch')", ("torch",)),
        ("import runpy\nrunpy.run_path('other.py')", ("torch",)),
        ("exec(open('other.py').read())", ("torch",)),
        ("import torch.cuda", ("torch",)),
        ("import torch.utils.tensorboard", ("torch",)),
        ("def main():\n    import torch.utils.data", ("torch",)),
    ],
)
def test_what_is_preloaded(text: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    """Torch for whatever is not plain Python, the compiler for what imports it anyway, and submodules named at the top."""
    found = plan(tmp_path, text)
    assert found.cold == ""
    assert set(modules) <= set(found.modules)
    assert found.modules[0] == "torch"
    assert ("torch._dynamo" in found.modules) == ("torch._dynamo" in modules)
    never = ("torch.cuda", "torch.utils.tensorboard")
    assert not [name for name in found.modules if name.startswith(never)]


def test_a_submodule_is_preloaded_only_where_it_is_imported_at_once(tmp_path: Path) -> None:
    """torch.utils.data named at the top is worth a preload, inside a function it may never run."""
    at_once = plan(tmp_path, "import torch.utils.data\nfrom torch.utils import checkpoint")
    later = plan(tmp_path, "import torch\ndef f():\n    import torch.utils.data")
    assert at_once.modules == ("torch", "torch.utils", "torch.utils.data")
    assert later.modules == ("torch",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "print('hello')",
        "import os, sys, json",
        "import numpy, yaml",
        "import jax.numpy",
        "from __future__ import annotations",
        "'import torch'",
        "# import torch",
        "import torch_free",
    ],
)
def test_a_script_without_anything_heavy_starts_cold_and_expects_it(text: str, tmp_path: Path) -> None:
    """Standard library, and modules beside the script that need no more: no server, and nothing to say."""
    found = plan(tmp_path, {"train.py": text, "torch_free.py": "import math"})
    assert (found.cold, found.is_expected, found.modules) == (NOTHING_HEAVY, True, ())


# ------------------------------------------------------------------ what lies beside the script


@pytest.mark.parametrize(
    ("files", "program", "modules"),
    [
        ({"train.py": "import lib", "lib.py": "import torch"}, "train.py", ("torch",)),
        ({"train.py": "import a", "a.py": "import b", "b.py": "import torch.optim"}, "train.py", DYNAMO),
        ({"train.py": "import a", "a.py": "import train\nimport torch"}, "train.py", ("torch",)),
        ({"train.py": "import lib", "lib/__init__.py": "from . import deep", "lib/deep.py": "import torch"}, "train.py", ("torch",)),
        ({"train.py": "import lib.deep", "lib/__init__.py": "import torch", "lib/deep.py": ""}, "train.py", ("torch",)),
        ({"train.py": "from lib import deep", "lib/__init__.py": "", "lib/deep.py": "import torch"}, "train.py", ("torch",)),
        ({"train.py": "import space.deep", "space/deep.py": "import torch"}, "train.py", ("torch",)),
        ({"code/train.py": "import lib", "code/lib.py": "import torch"}, "code/train.py", ("torch",)),
        ({"code/train.py": "import lib", "lib.py": "import torch", "code/lib.py": ""}, "code/train.py", ()),
        ({"train.py": "def f():\n    import lib", "lib.py": "import torch"}, "train.py", ("torch",)),
        ({"train.py": "import lib", "lib.py": "from torch.nn.parallel import DistributedDataParallel"}, "train.py", DYNAMO),
    ],
)  # fmt: skip
def test_the_modules_beside_the_script_count(
    files: dict[str, str], program: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """What the script imports from its own folder is read too, to the end, packages and circles included."""
    found = plan(tmp_path, files, program)
    assert found.modules[: len(modules)] == modules
    assert bool(found.modules) == bool(modules)


@pytest.mark.parametrize(
    ("files", "module", "modules"),
    [
        ({"pkg/__init__.py": "", "pkg/train.py": "from . import lib", "pkg/lib.py": "import torch"}, "pkg.train", ("torch",)),
        ({"pkg/__init__.py": "", "pkg/train.py": "from .lib import f", "pkg/lib.py": "import torch"}, "pkg.train", ("torch",)),
        ({"pkg/sub/train.py": "from ..lib import f", "pkg/lib.py": "import torch"}, "pkg.sub.train", ("torch",)),
        ({"pkg/sub/train.py": "from .. import lib", "pkg/lib.py": "import torch"}, "pkg.sub.train", ("torch",)),
        ({"pkg/train.py": "import pkg.lib", "pkg/lib.py": "import torch"}, "pkg.train", ("torch",)),
        ({"pkg/train.py": "import lib", "pkg/lib.py": "import torch"}, "pkg.train", ("torch",)),
        ({"pkg/__main__.py": "import torch", "pkg/__init__.py": ""}, "pkg", ("torch",)),
        ({"train.py": "import torch"}, "train", ("torch",)),
        ({"pkg/__init__.py": "", "pkg/train.py": "import json"}, "pkg.train", ()),
        ({"pkg/__init__.py": "import torch", "pkg/train.py": "import json"}, "pkg.train", ("torch",)),
    ],
)  # fmt: skip
def test_modules_are_found_from_the_current_folder(
    files: dict[str, str], module: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """``-m`` looks in the current folder, follows relative imports, and runs the packages on the way."""
    found = plan(tmp_path, files, module, is_module=True)
    assert found.modules == modules
    assert found.first_path == tmp_path


def test_an_installed_module_may_be_anything(tmp_path: Path) -> None:
    """``-m`` of a module that is not below the current folder is somebody's trainer: torch and the compiler."""
    assert plan_start("axolotl.cli.train", is_module=True, cwd=tmp_path).modules == DYNAMO


def test_the_first_path_is_the_folder_behind_a_link(tmp_path: Path) -> None:
    """A script by a link has the real file's folder in front of its sys.path, and imports from there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").write_text("import lib")
    (tmp_path / "real" / "lib.py").write_text("import torch")
    (tmp_path / "link.py").symlink_to("real/train.py")
    found = plan_start("link.py", is_module=False, cwd=tmp_path)
    assert (found.modules, found.first_path) == (("torch",), tmp_path / "real")


# ------------------------------------------------------------------ variables


@pytest.mark.parametrize(
    "text",
    [
        'os.environ["OMP_NUM_THREADS"] = "2"',
        'os.environ[b"OMP_NUM_THREADS".decode()] = "2"; os.environ["OMP_NUM_THREADS"] = "2"',
        'os.environb[b"OMP_NUM_THREADS"] = b"2"',
        'os.environ.setdefault("OMP_NUM_THREADS", "2")',
        'os.environ.update(OMP_NUM_THREADS="2")',
        'os.environ.update({"HOME": "/", "OMP_NUM_THREADS": "2"})',
        'os.environ.pop("OMP_NUM_THREADS", None)',
        'del os.environ["OMP_NUM_THREADS"]',
        'os.environ.__setitem__("OMP_NUM_THREADS", "2")',
        'os.putenv("OMP_NUM_THREADS", "2")',
        'os.unsetenv("OMP_NUM_THREADS")',
        'from os import environ\nenviron["OMP_NUM_THREADS"] = "2"',
        'from os import putenv\nputenv("OMP_NUM_THREADS", "2")',
        'if os.cpu_count() > 1:\n    os.environ["OMP_NUM_THREADS"] = "2"',
        'def f():\n    os.environ["OMP_NUM_THREADS"] = "2"\nf()',
        'os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "2"',
        'os.environ["OMP_NUM_THREADS"] += "2"',
        'os.environ["OMP_NUM_THREADS"]: str = "2"',
        'os.environ |= {"OMP_NUM_THREADS": "2"}',
    ],
)
def test_a_latched_variable_set_before_torch_is_a_reason(text: str, tmp_path: Path) -> None:
    """In each way to write it down, a variable that torch reads at its import makes a cold start, with the line."""
    found = plan(tmp_path, f"import os\n{text}\nimport torch\n")
    assert "OMP_NUM_THREADS before it imports torch" in found.cold
    assert found.cold.startswith("train.py:")
    assert not found.is_expected


@pytest.mark.parametrize(
    "name",
    ["OMP_PROC_BIND", "MKL_NUM_THREADS", "MKL_DYNAMIC", "OPENBLAS_NUM_THREADS", "TORCH_LOGS", "TORCH_TRACE", "TORCHDYNAMO_DISABLE",
     "TORCH_COMPILE_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
     "KMP_AFFINITY", "NUMEXPR_MAX_THREADS", "GOTO_NUM_THREADS", "ONEDNN_VERBOSE", "LD_LIBRARY_PATH", "TORCHINDUCTOR_CACHE_DIR"],
)  # fmt: skip
def test_names_that_are_latched(name: str, tmp_path: Path) -> None:
    """Threads, logs, compiler and allocator settings are read when torch is imported."""
    assert f"sets {name} " in plan(tmp_path, f'import os\nos.environ["{name}"] = "1"\nimport torch').cold


@pytest.mark.parametrize(
    "name",
    ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TOKENIZERS_PARALLELISM", "HF_HOME", "WANDB_MODE", "MASTER_PORT", "RANK",
     "TORCH_NCCL_BLOCKING_WAIT", "TORCH_HOME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUBLAS_WORKSPACE_CONFIG"],
)  # fmt: skip
def test_names_that_are_read_later(name: str, tmp_path: Path) -> None:
    """What is read when it is needed may be set by a warm script."""
    assert plan(tmp_path, f'import os\nos.environ["{name}"] = "1"\nimport torch').modules == ("torch",)


@pytest.mark.parametrize(
    "text",
    [
        'import os, torch\nos.environ["OMP_NUM_THREADS"] = "2"',
        'import os\nfrom torch import nn\nos.environ["OMP_NUM_THREADS"] = "2"',
        'import os, torch.nn\ndef f():\n    os.environ["OMP_NUM_THREADS"] = "2"',
        'import os, torch\nprint(os.environ["OMP_NUM_THREADS"], os.environ.get("MKL_NUM_THREADS"))',
        'import os\nprint(os.environ["OMP_NUM_THREADS"], os.environ.get("MKL_NUM_THREADS"))\nimport torch',
        'import os\nsettings = {}\nsettings["OMP_NUM_THREADS"] = 2\nsettings.update(MKL_NUM_THREADS=2)\nimport torch',
        'import os\nos.environ.copy()["OMP_NUM_THREADS"] = "2"\nimport torch',
        'import os, subprocess\nsubprocess.run(["true"], env={**os.environ, "OMP_NUM_THREADS": "2"})\nimport torch',
    ],
)
def test_reading_or_setting_later_is_no_reason(text: str, tmp_path: Path) -> None:
    """What is set after torch, only read, or set in another dictionary, changes nothing."""
    assert plan(tmp_path, text).modules[0] == "torch"


def test_a_module_that_sets_variables_for_the_script_is_a_reason(tmp_path: Path) -> None:
    """Also a module beside the script may set what torch reads; the line names that file."""
    found = plan(tmp_path, {"train.py": "import settings\nimport torch", "settings.py": "import os\n\nos.environ['OMP_NUM_THREADS'] = '2'"})  # fmt: skip
    assert found.cold == "settings.py:3 sets OMP_NUM_THREADS before it imports torch"


# ------------------------------------------------------------------ other reasons


@pytest.mark.parametrize("name", ["debugpy", "pydevd", "pydevd_pycharm", "ddtrace"])
def test_a_debugger_is_a_reason(name: str, tmp_path: Path) -> None:
    """What follows processes by itself starts cold, in the text of the script, of its modules, or by -m."""
    assert plan(tmp_path, f"import torch\nif 0:\n    import {name}").cold == f"the script uses {name}"
    beside = plan(tmp_path, {"train.py": "import lib, torch", "lib.py": f"from {name} import x"})
    assert beside.cold == f"the script uses {name}"
    by_name = plan_start(name, is_module=True, cwd=tmp_path)
    assert by_name.cold == f"{name} is a debugger"


@pytest.mark.parametrize(
    "text", ["import torch\nthis is no Python", "import torch\n\0", "import torch\nprint '2'", "(" * 5000]
)
def test_what_cant_be_read_is_left_to_python(text: str, tmp_path: Path) -> None:
    """A script that Python can't parse starts cold without a line of ours: Python's own error says it better."""
    found = plan(tmp_path, text)
    assert found.cold.startswith("train.py can't be read: ")
    assert found.is_expected


def test_what_is_not_there_or_no_script_is_left_to_python(tmp_path: Path) -> None:
    """A missing script, a folder with __main__.py and an archive start cold, and that is expected."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "app.zip").write_bytes(b"PK\x03\x04\x00\xff")
    for name in ("missing.py", "folder", "app.zip"):
        found = plan_start(name, is_module=False, cwd=tmp_path)
        assert found.cold, name
        assert found.is_expected


def test_a_broken_module_beside_the_script_does_not_matter_to_its_start(tmp_path: Path) -> None:
    """A helper that can't be parsed may never be imported: nothing of ours raises."""
    found = plan(tmp_path, {"train.py": "import torch\ntry:\n    import lib\nexcept SyntaxError:\n    pass", "lib.py": "a b"})  # fmt: skip
    assert found.cold or found.modules


def test_encodings_are_pythons(tmp_path: Path) -> None:
    """A script in latin-1, or with a byte order mark, is read as Python reads it."""
    (tmp_path / "train.py").write_bytes(b"# coding: latin-1\nx = '\xe4'\nimport torch\n")
    assert plan_start("train.py", is_module=False, cwd=tmp_path).modules == ("torch",)
    (tmp_path / "train.py").write_bytes(b"\xef\xbb\xbfimport torch\n")
    assert plan_start("train.py", is_module=False, cwd=tmp_path).modules == ("torch",)
