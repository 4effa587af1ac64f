"""What carries the tensors of a device, and a group of some ranks on Gloo in a job that is bound to a GPU; tried on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankwise
from rankwise.runtime.connecting import find_carrier, unbound
from rankwise.testing import run_ranks


@pytest.mark.parametrize(
    ("backend", "cpu", "cuda"),
    [
        ("gloo", "gloo", "gloo"),
        ("nccl", "nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cuda:nccl", "gloo", "nccl"),
    ],
)
def test_each_part_of_a_backend_carries_its_device(backend: str, cpu: str, cuda: str) -> None:
    """As torch reads the word: a name alone carries all, ``device:name`` one; nothing but Gloo is taken for what is not named."""
    assert (find_carrier(backend, "cpu"), find_carrier(backend, "cuda")) == (cpu, cuda)


def make_group() -> Any:
    with rankwise.init(device="cpu"):
        world = dist.group.WORLD
        world.bound_device_id = torch.device("cuda", 0)  # as NCCL's jobs are
        with unbound():
            group = dist.new_group([0], backend="gloo")
        was_bound = world.bound_device_id is not None
        world.bound_device_id = None
        return was_bound, group is not dist.GroupMember.NON_GROUP_MEMBER


def test_ranks_outside_a_gloo_group_get_through() -> None:
    """Else torch has them split a communicator, which the members do not; the job is bound again afterwards."""
    assert run_ranks(make_group, 2) == [(True, True), (True, False)]
