"""What is frozen for all ranks is never taken apart at their exit, but for what its library counts there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.warm import freezing

# Classes as nanobind makes them: a method has an instance of its own class as default value, a property has one.
_SITE = """
import sys, types
__name__ = {owner!r}

class meta(type):
    def __del__(cls):
        print("class", cls.__name__, "is taken apart")

meta.__module__ = {module!r}
meta.__name__ = "nb_type_0"
other = type("nb_method", (), {{"__module__": {module!r}, "__slots__": ("default",)}})

class Builder(metaclass=meta):
    pass

class Derived(Builder):
    pass

def make(cls):
    method = other()
    method.default = cls()
    return method

Builder.create, Derived.name = make(Builder), property(make(Derived))
holder = types.ModuleType("holder")
holder.Builder, holder.Derived = Builder, Derived
sys.modules["holder"] = holder
class Plain:
    def __del__(self):
        print("plain is taken apart")
holder.plain = Plain()
holder.plain.itself = holder.plain
del Builder, Derived, make, holder, Plain

sys.path.insert(0, {folder!r})
import freezing
freezing.freeze(freezing.list_libraries())
"""
_SCRIPT = """
class Scripts:
    def __del__(self):
        print("the script's is taken apart")
one = Scripts()
one.itself = one
print("end")
"""


@pytest.mark.linux
@pytest.mark.parametrize(
    ("module", "owner"),
    [("nanobind", "triton._C.libtriton"), ("nanobind", "jaxlib._jax"), ("another", "one")],
)
def test_what_nanobind_counts_is_taken_apart(module: str, owner: str, tmp_path: Path) -> None:
    """Its classes go at exit although all else stays frozen, and the script's own objects go in any case.

    Of a library that nobody has tried, all goes.
    """
    folder = freezing.__file__.rpartition("/")[0]
    (tmp_path / "sitecustomize.py").write_text(_SITE.format(module=module, owner=owner, folder=folder))
    (tmp_path / "train.py").write_text(_SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = set(done.stdout.splitlines())
    counted = {"class Builder is taken apart", "class Derived is taken apart"} if module == "nanobind" else set()
    unknown = {"plain is taken apart"} if owner == "jaxlib._jax" else set()
    assert said == {"end", "the script's is taken apart", *counted, *unknown}


@pytest.mark.linux
@pytest.mark.parametrize(
    "has",
    ["nothing", "a library", "a preloaded library", "a plug-in of torch", "more of numpy", *freezing._INSTRUMENTS],
)
def test_c_code_that_was_loaded_before_is_not_taken_apart(has: str, tmp_path: Path) -> None:
    """At exit what C has buffered is written, but what came with torch does nothing more.

    Nor does what its packages load later, as numpy does. Unless there is a library of the script's own, of a preload or of a plug-in of torch's, or a tool that measures the process.
    """
    folder = freezing.__file__.rpartition("/")[0]
    register = "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.strdup.restype = ctypes.c_void_p\nlibc['__cxa_atexit'](libc.puts, ctypes.c_void_p(libc.strdup(b'at exit')), None)\n"
    folders = [tmp_path / name for name in (["numpy", "numpy/random"] if has == "more of numpy" else ["plugin"])]
    for one in folders:
        one.mkdir()
    own = folders[-1] / "own.so"
    shutil.copy(next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm.so" in line or "/libm-" in line), own)  # fmt: skip
    loads = dict.fromkeys(["a plug-in of torch", "a preloaded library", "a library"], "")
    if has in loads:
        loads[has] = f"ctypes.CDLL({str(own)!r})\n"
    plugin, preload, load = loads.values()
    if has == "more of numpy":
        plugin, load = (
            f"ctypes.CDLL({str(shutil.copy(own, folders[0] / 'with_torch.so'))!r})\n",
            f"ctypes.CDLL({str(own)!r})\n",
        )
    (tmp_path / "sitecustomize.py").write_text(
        f"{register}import sys\nsys.path.insert(0, {folder!r})\nimport freezing\n{plugin}known = freezing.list_libraries()\n{preload}freezing.freeze(known)\n"
    )
    (tmp_path / "train.py").write_text(f"import ctypes, sys, mmap\n{load}ctypes.CDLL(None).puts(b'buffered')\nsys.exit(3)")  # fmt: skip
    tools = {has: "libm.so.6"} if has in freezing._INSTRUMENTS else {}
    env = {**os.environ, **dict.fromkeys(freezing._INSTRUMENTS, ""), **tools, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=False)  # fmt: skip
    written = ["buffered"] if has in {"nothing", "more of numpy"} else ["at exit", "buffered"]
    assert (done.returncode, sorted(done.stdout.splitlines())) == (3, written), done.stderr


_TORCH = """
import sys, types
class Says:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print(self.name, "is taken apart")

for name in ("torch", "torch.nn", "torch.optim", "torch.replaced", "torch.table", "torch.row", "torch.distributed", "other"):
    module = sys.modules[name] = types.ModuleType(name)
    module.own, module.load, module.table, module.row = Says(name), None, {{1: None}}, [None]
del module

sys.path.insert(0, {folder!r})
import freezing
freezing.freeze(freezing.list_libraries())
"""
_CHANGES_TORCH = """
import atexit, sys, torch, torch.optim

def at_the_end():
    import torch.nn
    print("torch.nn is", torch.nn.own.name)

atexit.register(at_the_end)
Says = type(torch.own)
torch.distributed = sys.modules["torch.distributed"]
torch.nn = sys.modules["torch.nn"]
torch.optim = sys.modules["torch.optim"]
sys.modules["torch.replaced"].load = Says("what stands in a name's place")
sys.modules["torch.table"].table[1] = Says("what stands in a table")
sys.modules["torch.row"].row[0] = Says("what stands in a list")
torch.distributed.group, torch.optim.scripts, one = Says("the group"), Says("the script's in torch.optim"), Says("the script's")
sys.exit(3)
"""


@pytest.mark.linux
def test_modules_of_torch_are_left_whole_unless_the_script_has_put_something_there(tmp_path: Path) -> None:
    """At exit all that is the script's is let go of, process groups among it, and of torch only what the script has changed."""
    folder = freezing.__file__.rpartition("/")[0]
    (tmp_path / "sitecustomize.py").write_text(_TORCH.format(folder=folder))
    (tmp_path / "train.py").write_text(_CHANGES_TORCH)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    put = {
        "the group",
        "the script's in torch.optim",
        "the script's",
        "what stands in a name's place",
        "what stands in a table",
    }
    held_by = {"torch", "torch.optim", "torch.replaced", "torch.table", "torch.row", "torch.distributed", "other"}
    gone = {*put, "what stands in a list", *held_by}
    assert set(done.stdout.splitlines()) == {"torch.nn is torch.nn", *(f"{name} is taken apart" for name in gone)}


def test_what_torchs_packages_load_later_is_known_and_what_others_put_beside_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """numpy.random belongs to numpy's folder; nvidia.dali stands in a folder that NVIDIA's packages for torch share."""
    monkeypatch.setattr(sys, "path", ["/v/site", "/v/site-packages", ""])
    loaded = {
        "/v/site/numpy/core.so",
        "/v/site/nvidia/cublas/lib/cublas.so",
        "/usr/lib/libm.so.6",
        "/v/site-packages/own.so",
    }
    known = freezing._find_torchs(loaded)
    assert set(known) == {"/v/site/numpy/", "/v/site/nvidia/cublas/", "/usr/lib/libm.so.6"}
    assert "/v/site/numpy/random/mt19937.so".startswith(known)
    assert not "/v/site/nvidia/dali/dali.so".startswith(known)
