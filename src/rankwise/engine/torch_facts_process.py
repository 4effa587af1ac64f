"""Tell, as one line of JSON, what torch says of itself and of the devices that a rank would see here."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

del sys.path[0]  # our own folder: its names must not shadow anybody's

# The answer leaves through a private descriptor: whatever a library prints goes to standard error.
_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def ask() -> dict[str, Any]:
    """Return all that torch tells."""
    body: dict[str, Any] = {"python_version": platform.python_version(), "wheels": _list_wheels()}
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything, and that is the answer
        return {**body, "why": f"{type(error).__name__}: {error}"[:500]}
    body |= {
        "version": torch.__version__,
        "folder": str(Path(torch.__file__).parent),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "backends": _list_backends(),
        "archs": torch.cuda.get_arch_list() if torch.version.cuda else [],
    }
    return {**body, **_ask_devices(torch), "nccl_file": _find_loaded_nccl()}


def _list_wheels() -> list[str]:
    from importlib import metadata

    found = []
    for one in metadata.distributions():
        try:
            name = str(one.metadata["Name"] or "").lower().replace("_", "-")
            if name == "torch" or name.startswith(("nvidia-nccl", "torch-nightly")):
                found.append(f"{name} {one.version} in {one.locate_file('')}")
        except Exception:  # noqa: BLE001 - a broken folder of a removed package tells nothing
            continue
    return list(dict.fromkeys(found))


def _find_loaded_nccl() -> str:
    try:
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    paths = [line.split(maxsplit=5)[5] for line in text.splitlines() if "/libnccl.so" in line]
    return str(Path(paths[0]).resolve()) if paths else ""


def _list_backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return [name for name in names if getattr(dist, f"is_{name}_available", lambda: False)()]


def _ask_devices(torch: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"nccl": "", "devices": []}
    if not torch.version.cuda and not getattr(torch.version, "hip", None):
        return body
    try:
        version = torch.cuda.nccl.version()
        body["nccl"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    except Exception:  # noqa: BLE001 - built without it
        body["nccl"] = ""
    try:
        count = torch.cuda.device_count()
        if count:
            torch.cuda.init()
        found = map(torch.cuda.get_device_properties, range(count))
        body["devices"] = [{"name": one.name, "capability": f"{one.major}.{one.minor}"} for one in found]
    except Exception as error:  # noqa: BLE001 - what is wrong with the driver is what we ask for
        body["cuda_error"] = f"{type(error).__name__}: {error}"[:500]
    return body


if __name__ == "__main__":
    _answers.write(json.dumps(ask()) + "\n")
    _answers.flush()
