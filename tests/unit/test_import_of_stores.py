"""A store and torch's rendezvous need torch's C++ and little of its Python: what they import, and when they import all of it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankwise.engine import STORE_PROCESS
from support import make_env

if TYPE_CHECKING:
    from pathlib import Path

_LOAD = f"""
import importlib.util, sys

spec = importlib.util.spec_from_file_location("store_process", {str(STORE_PROCESS)!r})
stores = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stores)
"""
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"


def run_python(code: str, path: Path | None = None) -> str:
    """Return what a Python prints that has ``path`` in front of what is installed."""
    env = make_env({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run([sys.executable, "-c", _LOAD + code], env=env, capture_output=True, text=True, check=True).stdout  # fmt: skip


def write_package(folder: Path, files: dict[str, str]) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.linux
def test_a_store_serves_and_a_rendezvous_opens_without_torchs_python() -> None:
    """Whoever needs stores only gets them without the import of tensors and modules, and they serve; so does torch's rendezvous over them."""
    code = f"""
stores.import_stores({_RENDEZVOUS!r})
from datetime import timedelta
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
TCPStore("127.0.0.1", server.port, None, timeout=timedelta(seconds=20)).set("key", "value")
print(server.get("key").decode())
parameters = RendezvousParameters("c10d", f"127.0.0.1:{{server.port}}", "job", 1, 1, is_host="false")
info = registry.get_rendezvous_handler(parameters).next_rendezvous()
print(info.rank, info.world_size)
print([name for name in ("torch.nn", "torch._tensor", "torch.cuda") if name in sys.modules])
"""
    assert run_python(code).splitlines() == ["value", "0 1", "[]"]


def test_where_torchs_library_is_not_to_be_had_alone_all_of_torch_is_imported(tmp_path: Path) -> None:
    """A build of torch whose C++ does not load before its Python has found the libraries is imported as ever."""
    write_package(tmp_path, {"torch/__init__.py": "", "torch/distributed/__init__.py": "TCPStore = 'of the whole'\n"})  # fmt: skip
    code = """
stores.import_stores()
from torch.distributed import TCPStore
print(TCPStore)
"""
    assert run_python(code, tmp_path).strip() == "of the whole"


@pytest.mark.linux
def test_what_needs_more_than_stores_has_all_of_torch() -> None:
    """A torch whose rendezvous needs more than its C++, as a later one may, is imported whole although its C++ is there already."""
    code = """
stores.import_stores("torch.distributed.fsdp")
import torch.distributed.fsdp
from torch.distributed import TCPStore
print(int(torch.ones(2).sum()), torch.distributed.fsdp.__name__)
"""
    assert run_python(code).strip() == "2 torch.distributed.fsdp"


def test_another_packages_rendezvous_finds_all_of_torch(tmp_path: Path) -> None:
    """A package that has registered a rendezvous with torchrun may use all of torch, so the helper imports all of it; a store does not load that package."""
    write_package(
        tmp_path,
        {
            "other-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n",
            "other-1.0.dist-info/entry_points.txt": "[torchrun.handlers]\nother = other:open\n",
        },
    )
    code = f"""
stores.import_stores({_RENDEZVOUS!r})
print("torch" in sys.modules)
stores.import_stores()
print("torch" in sys.modules)
"""
    assert run_python(code, tmp_path).split() == ["False", "True"]
