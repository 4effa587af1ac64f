"""Whether a host may have GPUs, by its files alone: asking a driver takes long, and may hang."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.doctor.host import Host

#: The drivers of NVIDIA (also in containers, in WSL, on Jetson) and AMD.
_SIGNS = ("/proc/driver/nvidia/gpus", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd")  # fmt: skip


def may_have_gpus(host: Host) -> bool | None:
    """Return whether a host may have GPUs that torch can use; None where files don't tell."""
    return any(map(host.has, _SIGNS)) if host.has("/proc") or host.has("/dev") else None
