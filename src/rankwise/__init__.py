"""Run any PyTorch training program on many processes, GPUs and machines.

Public names are loaded on first use (PEP 562), so that the launcher's parent process stays plain Python.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"

__all__ = ["RankEnv", "RankwiseError", "__version__"]

_HOME = {"RankEnv": "rankwise.base.environ", "RankwiseError": "rankwise.base.errors"}


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rankwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
