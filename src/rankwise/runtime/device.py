"""Which device and which backend a rank uses: by LOCAL_RANK, before anything else touches the device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rankwise.base.environ import get
from rankwise.base.errors import UsageError


def choose_device(wanted: str | torch.device | None, local_rank: int, rank: int) -> torch.device:
    """Return this rank's device, and make it the current one.

    Args:
        wanted: ``"cpu"``, ``"cuda"`` (the rank's own), ``"cuda:3"``; None: a GPU if this host shows one.
        local_rank: This rank among those of its host.
        rank: Its global rank, for errors.

    Returns:
        The device, with an index unless it is the CPU.

    Raises:
        UsageError: There is no such device.
    """
    device = find_kind(wanted, rank)
    if device.type == "cpu":
        return device
    num_devices = torch.accelerator.device_count()
    # One device each, as with --virtual-local-rank or Slurm's --gpus-per-task: every rank sees its own as number 0.
    # If they do share one after all, the handshake sees the same UUID twice.
    index = device.index if device.index is not None else 0 if num_devices == 1 else local_rank
    if index >= num_devices:
        visible = get("CUDA_VISIBLE_DEVICES")
        shown = f" (CUDA_VISIBLE_DEVICES={visible})" if visible else ""
        raise UsageError(
            f"local rank {local_rank} would need {device.type}:{index}, but this host has {num_devices} visible device(s){shown}",
            rank=rank,
            hint=f"start at most {num_devices} ranks on this host, or make more devices visible",
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def find_kind(wanted: str | torch.device | None, rank: int) -> torch.device:
    """Return the wanted device as it was written, or this host's accelerator, without touching it.

    Args:
        wanted: As for ``choose_device``.
        rank: This rank's global rank, for errors.

    Raises:
        UsageError: This torch does not know it, or finds none on this host.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted is None and accelerator is not None and accelerator.type == "mps":
        return torch.device("cpu")  # no backend carries tensors of Apple's GPUs
    try:
        device = torch.device(wanted) if wanted is not None else accelerator or torch.device("cpu")
    except RuntimeError as error:
        raise UsageError(
            f"device={wanted!r}: {str(error).splitlines()[0]}", rank=rank, hint="'cpu', 'cuda' or 'cuda:0'"
        ) from None
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise UsageError(
            f"device '{wanted}' was requested, but torch {torch.__version__} finds none on this host",
            rank=rank,
            hint="pass device='cpu', or install a torch that is built for it and check the driver",
        )
    return device


def choose_backend(wanted: str | None, device: torch.device, rank: int) -> str:
    """Return the backend, with one part for each kind of tensor that a rank may send.

    Args:
        wanted: As in ``torch.distributed.init_process_group``; None: by the device.
        device: The rank's device.
        rank: Its global rank, for errors.

    Returns:
        For example ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        UsageError: This torch has no such backend.
    """
    if wanted is None:
        if device.type == "cpu":
            return "gloo"
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    for part in wanted.lower().split(","):
        name = part.rpartition(":")[2]
        if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
            why = "is built without NCCL" if not dist.is_nccl_available() else "finds no GPU on this host"
            raise UsageError(
                f"backend {wanted!r}: torch {torch.__version__} {why}",
                rank=rank,
                hint="leave the backend out: it is chosen by the device",
            )
        if name == "gloo" and not dist.is_gloo_available():
            raise UsageError(f"backend {wanted!r}: torch {torch.__version__} is built without Gloo", rank=rank)
    return wanted.lower()


def find_device_id(device: torch.device) -> str | None:
    """Return what tells this physical device from all others of its host; None for the CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
