"""What the probes of variables tell: each mistake with the value that would do, and nothing of what is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import gpu_texts as texts
from fake_hosts import ETH0, LOOPBACK, make_interface
from network_hosts import ETH1, GPU, IB, ask, compare, facts_of, find_bad, find_one
from rankwise.doctor.host import JobShape

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("env", "verdict", "words", "fix"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "fail", "no interface eth9", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "^lo"}, "fail", "NCCL's syntax", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "=eth1"}, "fail", "NCCL's syntax", "export GLOO_SOCKET_IFNAME=eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth0, eth1"}, "fail", "spaces or quotes", "export GLOO_SOCKET_IFNAME=eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth0,,eth1"}, "fail", "empty name", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "bare0"}, "fail", "has no address", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "fail", "local to this host", "export GLOO_SOCKET_IFNAME=eth0"),
        ({"GLOO_SOCKET_IFNAME": "off0"}, "warn", "is down", "sudo ip link set dev off0 up"),
    ],
)
def test_variables_of_gloo(tmp_path: Path, env: dict[str, str], verdict: str, words: str, fix: str) -> None:
    """Each mistake in a variable of Gloo is told with the value that would do."""
    interfaces = [
        LOOPBACK,
        ETH0,
        ETH1,
        make_interface("bare0"),
        make_interface("off0", "10.8.0.1/24", is_up=False),
    ]
    told = find_one(ask("gloo-variables", tmp_path, env=env, interfaces=interfaces))
    assert told.verdict == verdict
    assert words in told.what
    assert told.fix.splitlines()[0] == fix


def test_variables_of_gloo_where_nccl_is_used(tmp_path: Path) -> None:
    """Ranks that use NCCL alone do not fail of Gloo's variables; loopback is right on one host."""
    nccl = JobShape(num_nodes=2, backend="nccl")
    assert find_one(ask("gloo-variables", tmp_path, env={"GLOO_SOCKET_IFNAME": "eth9"}, job=nccl)).verdict == "warn"
    assert not find_bad(ask("gloo-variables", tmp_path, env={"GLOO_SOCKET_IFNAME": "lo"}, job=JobShape()))


@pytest.mark.parametrize(
    ("env", "verdict", "words", "fix"),
    [
        ({"NCCL_SOCKET_IFNAME": "ens"}, "fail", "matches no interface", "export NCCL_SOCKET_IFNAME=eth0"),
        ({"NCCL_SOCKET_IFNAME": "'eth0'"}, "fail", "matches no interface", "export NCCL_SOCKET_IFNAME=eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "fail", "matches no interface", "export NCCL_SOCKET_IFNAME=eth0"),
        (
            {"NCCL_SOCKET_IFNAME": "eth", "NCCL_SOCKET_FAMILY": "AF_INET6"},
            "fail",
            "NCCL_SOCKET_FAMILY=AF_INET6 matches no interface",
            "unset NCCL_SOCKET_FAMILY",
        ),
        ({"NCCL_DEBUG": "DEBUG"}, "warn", "not one of VERSION", "unset NCCL_DEBUG"),
        ({"NCCL_DEBUG": '"INFO"'}, "warn", "quotes", "export NCCL_DEBUG=INFO"),
        ({"NCCL_DEBUG": '""'}, "warn", "quotes", "unset NCCL_DEBUG"),
        ({"NCCL_BUFFSIZE": '"16M"'}, "warn", "quotes", "unset NCCL_BUFFSIZE  # or a whole number"),
        ({"NCCL_BUFFSIZE": '"1024"'}, "warn", "quotes", "unset NCCL_BUFFSIZE  # or a whole number"),
        ({"NCCL_BUFFSIZE": "'8388608'"}, "warn", "quotes", "export NCCL_BUFFSIZE=8388608"),
        ({"NCCL_HOSTID": '"eth0;x"'}, "warn", "quotes", "export NCCL_HOSTID='eth0;x'"),
        ({"NCCL_DEBUG_SUBSYS": "INIT,NETWORK"}, "warn", "NETWORK is not one of", "unset NCCL_DEBUG_SUBSYS"),
        ({"NCCL_IB_DISABLE": "true"}, "warn", "reads it as 0", "unset NCCL_IB_DISABLE  # or a whole number"),
        ({"NCCL_BUFFSIZE": "4M"}, "warn", "reads it as 4", "unset NCCL_BUFFSIZE  # or a whole number"),
        ({"NCCL_BUFFSIZE": "1024"}, "warn", "buffer of 1024 bytes", "unset NCCL_BUFFSIZE  # or a whole number"),
        ({"NCCL_IB_TIMEOUT": "100"}, "warn", "0 to 31", "unset NCCL_IB_TIMEOUT  # or a whole number"),
        ({"NCCL_ALGO": "Rings"}, "warn", "Rings is not one of", "unset NCCL_ALGO"),
        ({"NCCL_PROTO": "LL,LL64"}, "warn", "LL64 is not one of", "unset NCCL_PROTO"),
        ({"NCCL_P2P_LEVEL": "FAR"}, "warn", "FAR is not one of", "unset NCCL_P2P_LEVEL"),
        ({"NCCL_SOCKET_FAMILY": "af_inet"}, "warn", "af_inet is not one of", "unset NCCL_SOCKET_FAMILY"),
        ({"NCCL_TOPO_FILE": "/no/such.xml"}, "warn", "no file", "unset NCCL_TOPO_FILE"),
        (
            {"NCCL_SOCKET_IFNAMES": "eth0"},
            "warn",
            "did you mean NCCL_SOCKET_IFNAME?",
            "unset NCCL_SOCKET_IFNAMES  # and set NCCL_SOCKET_IFNAME",
        ),
        (
            {"NCLL_DEBUG": "INFO"},
            "warn",
            "did you mean NCCL_DEBUG?",
            "unset NCLL_DEBUG  # and set NCCL_DEBUG",
        ),
        (
            {"NCCL_AVOID_RECORD_STREAMS": "1"},
            "warn",
            "old name",
            "unset NCCL_AVOID_RECORD_STREAMS  # now: TORCH_NCCL_AVOID_RECORD_STREAMS",
        ),
        (
            {"NCCL_IB_GDR_LEVEL": "PIX"},
            "warn",
            "old name",
            "unset NCCL_IB_GDR_LEVEL  # now: NCCL_NET_GDR_LEVEL",
        ),
        ({"NCCL_P2P_DISABLE": "1"}, "warn", "NCCL_P2P_DISABLE=1", "unset NCCL_P2P_DISABLE"),
        ({"NCCL_IB_DISABLE": "1"}, "warn", "NCCL_IB_DISABLE=1", "unset NCCL_IB_DISABLE"),
        ({"NCCL_IB_HCA": "mlx4"}, "warn", "matches none of mlx5_0", "export NCCL_IB_HCA==mlx5_0"),
    ],
)
def test_variables_of_nccl(tmp_path: Path, env: dict[str, str], verdict: str, words: str, fix: str) -> None:
    """Each mistake in a variable of NCCL is told with its consequence and the value that would do."""
    plain = [LOOPBACK, make_interface("eth0", "10.0.0.1/24")]
    told = find_one(ask("nccl-variables", tmp_path, env=env, files={**GPU, **IB}, interfaces=plain))
    assert told.verdict == verdict
    assert words in told.what
    assert told.fix == fix


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_ALGO": "allreduce:tree,ring;broadcast:ring"}, {"NCCL_PROTO": "^LL128"}, {"NCCL_P2P_LEVEL": "4"}, {"NCCL_NET_GDR_LEVEL": "sys"},
        {"NCCL_DEBUG_SUBSYS": "INIT,^NET"}, {"NCCL_IB_TC": "0x68"}, {"NCCL_BUFFSIZE": "8388608"}, {"NCCL_IB_HCA": "^=mlx5_3"},
        {"NCCL_SOCKET_IFNAME": "eth,ens"}, {"NCCL_NEW_THING_ENABLE": "1"}, {"NCCL_NET_PLUGIN": "none"}, {"NCCL_DEBUG": "warn"},
        {"NCCL_NVLS_ENABLE": "0"}, {"NCCL_ROOT_DIR": "/usr"},
    ],
    ids=str,
)  # fmt: skip
def test_right_variables_of_nccl(tmp_path: Path, env: dict[str, str]) -> None:
    """What NCCL's guide allows is no mistake, nor a variable that this table may not know yet."""
    assert not find_bad(ask("nccl-variables", tmp_path, env=env, files={**GPU, **IB}))


@pytest.mark.parametrize(
    "signs",
    [
        {"files": {"/dev/dxg": "", "/usr/lib/wsl/lib/libcuda.so.1": ""}},
        {"programs": {texts.LIST: texts.LIST_4090}},
        {"files": {"/dev/nvidiactl": "", "/proc/driver/nvidia/gpus/0000:01:00.0/information": ""}},
        {"files": {"/dev/kfd": ""}},
    ],
    ids=["WSL", "nvidia-smi alone", "a driver", "AMD"],
)
def test_where_nccl_will_be_used(tmp_path: Path, signs: dict[str, dict[str, str]]) -> None:
    """Any sign of a GPU makes a wrong interface of NCCL a failure; a job that asks for Gloo does not fail of it."""
    env = {"NCCL_SOCKET_IFNAME": "eht0"}
    job = JobShape(backend="gloo")
    assert find_one(ask("nccl-variables", tmp_path, env=env, **signs)).verdict == "fail"
    assert find_one(ask("nccl-variables", tmp_path, env=env, job=job, **signs)).verdict == "warn"


def test_a_container_without_gpus_on_a_host_with_some(tmp_path: Path) -> None:
    """What the kernel tells of the host's GPUs in /proc, a plain container sees, too; its ranks use Gloo."""
    files = {"/proc/driver/nvidia/gpus/0000:01:00.0/information": ""}
    told = find_one(ask("nccl-variables", tmp_path, env={"NCCL_SOCKET_IFNAME": "eht0"}, files=files))
    assert told.verdict == "warn"


@pytest.mark.parametrize(("name", "value"), [("BLOCKING_WAIT", "1"), ("ASYNC_ERROR_HANDLING", "0")])
def test_old_names_of_torch_do_what_the_new_ones_do(tmp_path: Path, name: str, value: str) -> None:
    """A switch counts by its old name where the new one is not set: what it does is told of both, and of the one that counts."""
    told = find_one(ask("torch-variables", tmp_path, env={f"NCCL_{name}": value}, files=GPU))
    assert (told.what, told.fix) == (f"NCCL_{name}={value}", f"unset NCCL_{name}")
    both = {f"NCCL_{name}": value, f"TORCH_NCCL_{name}": "3" if value == "0" else "0"}
    assert not find_bad(ask("torch-variables", tmp_path, env=both, files=GPU))


def test_nccl_without_gpus(tmp_path: Path) -> None:
    """Where NCCL is not used, a fast way that is off is of no concern, and a wrong interface breaks nothing yet."""
    assert not find_bad(ask("nccl-variables", tmp_path, env={"NCCL_P2P_DISABLE": "1"}))
    assert find_one(ask("nccl-variables", tmp_path, env={"NCCL_SOCKET_IFNAME": "ens"})).verdict == "warn"
    assert (
        find_one(ask("nccl-variables", tmp_path, env={"NCCL_NET": "IB"}, job=JobShape(backend="nccl"))).verdict
        == "fail"
    )


def test_nccl_files_and_secrets(tmp_path: Path) -> None:
    """A mistake in /etc/nccl.conf is told with its place and a command for that file; the pre-shared key is never shown."""
    files = {**GPU, "/etc/nccl.conf": "NCCL_IB_DISABLE=yes\n"}
    readings = ask("nccl-variables", tmp_path, env={"NCCL_PSK": "'geheim-geheim"}, files=files)
    told = find_one(readings)
    assert "(in /etc/nccl.conf)" in told.what
    assert told.fix == "# take NCCL_IB_DISABLE out of /etc/nccl.conf"
    assert "geheim" not in str([one.to_json() for one in readings])


def test_values_that_differ(tmp_path: Path) -> None:
    """A value that must agree and does not is told with the hosts; names of interfaces may differ."""
    facts = {
        name: facts_of(ask("nccl-variables", tmp_path, env=env, interfaces=[LOOPBACK, ETH0, make_interface("ens5", "10.1.0.1/24")]))
        for name, env in {
            "a": {"NCCL_ALGO": "ring", "NCCL_SOCKET_IFNAME": "eth0"}, "b": {"NCCL_ALGO": "ring", "NCCL_SOCKET_IFNAME": "ens5"}, "c": {}
        }.items()
    }  # fmt: skip
    told = find_one(compare("nccl-variables", facts))
    assert told.hosts == ("c",)
    assert told.what == "NCCL_ALGO differs: ring: a, b; not set: c"
    assert not compare("nccl-variables", {"a": facts["a"], "b": facts["b"]})


@pytest.mark.parametrize(
    ("env", "verdict", "words"),
    [
        ({"TORCH_DISTRIBUTED_DEBUG": "WARN"}, "fail", "not one of OFF"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "warn", "TORCH_DISTRIBUTED_DEBUG=detail"),
        ({"TORCH_CPP_LOG_LEVEL": "DEBUG"}, "warn", "not one of INFO"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warn", "CUDA_LAUNCH_BLOCKING=1"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "warn", "BLOCKING_WAIT"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warn", "ERROR_HANDLING=0"),
        ({"TORCH_NCCL_ASYNC_EROR_HANDLING": "1"}, "warn", "did you mean TORCH_NCCL_ASYNC_ERROR_HANDLING?"),
        ({"OMP_NUM_THREADS": "0"}, "warn", "not a number above 0"),
    ],
)
def test_variables_of_torch(tmp_path: Path, env: dict[str, str], verdict: str, words: str) -> None:
    """Each mistake in a variable of torch, and what is left over from debugging, is told."""
    told = find_one(ask("torch-variables", tmp_path, env=env, files=GPU))
    assert told.verdict == verdict
    assert words in told.what
    assert told.fix.startswith(("unset ", "export "))


def test_right_variables_of_torch(tmp_path: Path) -> None:
    """Values that torch reads, and names that it may learn, are no mistakes."""
    env = {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "info", "OMP_NUM_THREADS": "4,2", "CUDA_LAUNCH_BLOCKING": "0",
           "TORCH_NCCL_NEW_THING": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600", "USE_LIBUV": "0"}  # fmt: skip
    assert not find_bad(ask("torch-variables", tmp_path, env=env, files=GPU))
