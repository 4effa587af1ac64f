"""Run any PyTorch training program on many processes, GPUs and machines.

Public names are loaded on first use (PEP 562), so that the launcher's parent process stays plain Python.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"

_HOME = {
    "RankEnv": "rankwise.base.environ",
    "CollectiveError": "rankwise.base.errors",
    "CollectiveTimeoutError": "rankwise.base.errors",
    "HandshakeError": "rankwise.base.errors",
    "LaunchError": "rankwise.base.errors",
    "ModelError": "rankwise.base.errors",
    "RankFailedError": "rankwise.base.errors",
    "RankwiseError": "rankwise.base.errors",
    "RendezvousError": "rankwise.base.errors",
    "UsageError": "rankwise.base.errors",
    "RankContext": "rankwise.runtime.context",
    "current": "rankwise.runtime.context",
    "init": "rankwise.runtime.joining",
    "launch": "rankwise.launcher.function",
}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604 - strings all


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rankwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
