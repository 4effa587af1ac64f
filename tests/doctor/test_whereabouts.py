"""Which hosts take part and where they meet: flags win, the environment is next, and what can't be a place is refused."""

from __future__ import annotations

import pytest

from rankwise.base.errors import UsageError
from rankwise.base.host_list import expand_hosts, find_fault
from rankwise.doctor.multi_host.plan import Plan, Requested, find_plan
from rankwise.doctor.network.names import is_own

SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def test_without_a_word_the_host_is_alone() -> None:
    """No flag and no variable: one host is looked at."""
    assert find_plan(Requested(), {}) is None
    assert find_plan(Requested(num_hosts=1), SLURM) is None


def test_flags_say_who_holds_the_rendezvous() -> None:
    """Node 0 does; with an endpoint and no number, the host whose address it is."""
    plan = find_plan(Requested(num_hosts=3, node_rank=0, master_addr="node0"), {})
    assert isinstance(plan, Plan)
    assert (plan.endpoint, plan.num_hosts, plan.node_rank, plan.is_coordinator) == ("node0:29500", 3, 0, True)
    other = find_plan(Requested(num_hosts=3, endpoint="[fd00::7]:4000"), {})
    assert isinstance(other, Plan)
    assert (other.endpoint_host, other.endpoint_port, other.is_coordinator) == ("fd00::7", 4000, None)


def test_an_endpoint_says_where_and_not_how_many() -> None:
    """Without a number of hosts this one is alone, as for torchrun; under srun the job's number is taken, and the endpoint's host holds the rendezvous."""
    assert find_plan(Requested(endpoint="node0:4000"), {}) is None
    plan = find_plan(Requested(endpoint="node0:4000"), SLURM)
    assert isinstance(plan, Plan)
    assert (plan.endpoint, plan.num_hosts, plan.node_rank, plan.is_coordinator) == ("node0:4000", 2, 1, None)
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "job-0"}
    plan = find_plan(Requested(endpoint="node0:4000"), pod)
    assert isinstance(plan, Plan)
    assert (plan.endpoint, plan.num_hosts, plan.is_coordinator) == ("node0:4000", 2, None)


def test_under_srun_no_flag_is_needed() -> None:
    """Hosts, place, port and names come from Slurm; only the first task of a host takes part."""
    plan = find_plan(Requested(), SLURM)
    assert isinstance(plan, Plan)
    assert (plan.num_hosts, plan.node_rank, plan.is_coordinator, plan.endpoint_host) == (2, 1, False, "gpu07")
    assert (plan.expected, plan.token) == (("gpu07", "gpu08"), "77")
    first = find_plan(Requested(), {**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert isinstance(first, Plan)
    assert first.endpoint_port == plan.endpoint_port
    assert find_plan(Requested(), {**SLURM, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}) == "bystander"


def test_a_pod_that_kubeflow_has_set_up_needs_no_flag() -> None:
    """PET_* variables say how many nodes there are, which one this is, and where they meet."""
    env = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-0",
        "PET_MASTER_PORT": "29400",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    plan = find_plan(Requested(), env)
    assert isinstance(plan, Plan)
    assert (plan.endpoint, plan.num_hosts, plan.node_rank, plan.is_coordinator) == (
        "job-0:29400",
        2,
        1,
        False,
    )


def test_a_batch_script_is_alone() -> None:
    """It runs on the first node of its job only: the others are reached by srun."""
    assert find_plan(Requested(), {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[0-3]"}) is None


@pytest.mark.parametrize(
    ("requested", "env", "message"),
    [
        (Requested(num_hosts=2, master_addr="localhost"), {}, "can't rendezvous at localhost"),
        (Requested(num_hosts=2, node_rank=1, master_addr="0.0.0.0"), {}, "can't rendezvous at 0.0.0.0"),
        (Requested(), {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "0.0.0.0"}, "can't rendezvous at 0.0.0.0"),
        (Requested(num_hosts=2, endpoint="node0:none"), {}, "'none' is not a port"),
        (Requested(), {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "nothing says where they rendezvous"),
    ],
)  # fmt: skip
def test_a_place_that_is_none_is_refused(requested: Requested, env: dict[str, str], message: str) -> None:
    """The error says what was said, before anybody waits."""
    with pytest.raises(UsageError, match=message):
        find_plan(requested, env)


@pytest.mark.parametrize(
    ("requested", "env"),
    [
        (Requested(num_hosts=2, node_rank=0, master_addr="0.0.0.0"), {}),
        (Requested(), {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "0.0.0.0", "MASTER_PORT": "29500"}),
        (Requested(), {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "0.0.0.0"}),
    ],
)  # fmt: skip
def test_the_first_host_may_listen_at_all_of_its_addresses(requested: Requested, env: dict[str, str]) -> None:
    """Some clusters tell node 0 so, and the others its name: the rendezvous is held there."""
    plan = find_plan(requested, env)
    assert isinstance(plan, Plan)
    assert (plan.endpoint_host, plan.is_coordinator) == ("0.0.0.0", True)


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("", ()),
        ("node0", ("node0",)),
        ("gpu[07-09,12],big1", ("gpu07", "gpu08", "gpu09", "gpu12", "big1")),
        ("r[1-2]n[0-1]", ("r1n0", "r1n1", "r2n0", "r2n1")),
        ("a[9-11]-ib", ("a9-ib", "a10-ib", "a11-ib")),
    ],
)
def test_slurms_short_form_is_expanded(short: str, hosts: tuple[str, ...]) -> None:
    """Ranges keep their leading zeros, several brackets multiply, and what follows a bracket stays."""
    assert expand_hosts(short) == hosts


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ("gpu[01-", "not closed"),
        ("gpu01],b", "not opened"),
        ("gpu[[1]]", "not closed"),
        ("gpu[1,]", "'' in 'gpu[1,]' is neither a number"),
        ("gpu[]", "'' in 'gpu[]'"),
        ("gpu[3-1]", "'3-1' in 'gpu[3-1]' is neither a number nor a range"),
        ("a,gpu[1-b]", "'1-b'"),
        ("a,-l", "'-l' is not a host name"),
        ("r[1-999]n[1-999]", "is more than 65536 hosts"),
    ],
)
def test_a_list_that_can_not_be_read_is_no_host(typed: str, fault: str) -> None:
    """A slip of the hand is named, and not looked up as a host's name."""
    assert fault in find_fault(typed)


@pytest.mark.parametrize(
    "typed", ["", "a", "a,,b", "gpu[07-09,12],big1", "r[1-2]n[0-1]", "n[a,b]", "me@n-1.x", "fd00::7", "[fd00::7],[fe80::1%eth0]", "me@[fd00::7]"]
)  # fmt: skip
def test_lists_that_can_be_read_have_no_fault(typed: str) -> None:
    """Slurm's form, names, users and addresses pass."""
    assert find_fault(typed) == ""


def test_this_host_is_known_by_its_addresses() -> None:
    """By any of loopback, and by what a name leads to; an address of another host, or a name without one, is not ours."""
    assert is_own("127.0.0.5")
    assert is_own("localhost")
    assert not is_own("192.0.2.1")
    assert not is_own("no-such-host.invalid")
