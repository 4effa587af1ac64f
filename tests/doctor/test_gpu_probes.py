"""The probes of GPUs, on hosts that are told by what NVIDIA's tools print there."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

import gpu_texts as texts
from fake_hosts import add_process, look, make_host
from rankwise.doctor.examine import collect_facts, compare_hosts
from rankwise.doctor.gpu.nvidia import (
    find_driver_cuda,
    list_gpu_pairs,
    query_nvidia,
    read_driver_version,
    read_links,
    read_matrix,
)
from rankwise.doctor.host import Host, JobShape, ProgramResult
from rankwise.doctor.probes import (
    gpu_links,
    gpu_throttle,
    gpus_busy,
    gpus_seen,
    torch_build,
)
from rankwise.doctor.torch_facts import TorchFacts, query_torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.doctor.probe import Probe

ALL = (gpus_seen.PROBE, gpus_busy.PROBE, gpu_links.PROBE, gpu_throttle.PROBE)
NICS = ["PIX NODE SYS SYS"] * 4 + ["SYS SYS PIX NODE"] * 4
H100 = {
    texts.LIST: texts.list_h100(), "nvidia-smi topo -m": texts.matrix(8, "NV18", nics=NICS), "nvidia-smi topo -p2p r": texts.access(8, "OK"),
    "nvidia-smi nvlink -s": texts.links(), texts.FABRIC: "".join(f"{i}, Completed\n" for i in range(8)), texts.HEALTH: "".join(f"{i}, 0, 0, 0\n" for i in range(8)),
    texts.REASONS: "".join(f"{i}, 41, 700.00, Not Active, Not Active, Not Active, Not Active\n" for i in range(8)), texts.APPS: "", "nvidia-smi": texts.HEAD_OLD,
}  # fmt: skip
RTX_4090 = {
    texts.LIST: texts.LIST_4090, "nvidia-smi topo -m": texts.matrix(2, "PHB"), "nvidia-smi topo -p2p r": texts.access(2, "GNS"),
    "nvidia-smi nvlink -s": "", texts.FABRIC: "0, [N/A]\n1, [N/A]\n", texts.HEALTH: "0, [N/A], [N/A], [N/A]\n1, [N/A], [N/A], [N/A]\n",
    texts.REASONS: texts.BAD_FIELD,
    texts.OLD_REASONS: "0, 55, 450.00, Not Active, Not Active, Not Active, Not Active\n1, 38, 450.00, Not Active, Not Active, Not Active, Not Active\n",
    texts.APPS: f"{'GPU-11111111-aaaa-bbbb-cccc-dddddddddddd'}, 900, 280\n", "nvidia-smi": texts.HEAD_NEW,
}  # fmt: skip


@pytest.mark.parametrize("probe", ALL, ids=lambda one: one.id)
def test_a_host_without_gpus_is_skipped_in_one_reading(tmp_path: Path, probe: Probe) -> None:
    """No driver is no fault: each probe says so once."""
    (told,) = look(probe, make_host(tmp_path))
    assert (told.verdict, told.what) == ("skipped", "no NVIDIA driver here")


@pytest.mark.parametrize("probe", ALL, ids=lambda one: one.id)
def test_amd_is_named(tmp_path: Path, probe: Probe) -> None:
    """A host with GPUs of AMD is not called one without GPUs."""
    (told,) = look(probe, make_host(tmp_path, files={"/dev/kfd": ""}))
    assert (told.verdict, told.what) == ("skipped", "AMD GPUs (ROCm)")


@pytest.mark.parametrize(("programs", "cuda"), [(H100, "12.4"), (RTX_4090, "13.3")], ids=["8xH100", "2x4090"])
def test_a_healthy_host_is_quiet(tmp_path: Path, programs: dict[str, str | ProgramResult], cuda: str) -> None:
    """Eight H100 in order, and two GeForce cards, which can't reach each other by nature, raise no alarm in any probe."""
    host = make_host(tmp_path, programs=programs, job=JobShape(num_ranks=2, backend="nccl"))
    assert [one.what for probe in ALL for one in look(probe, host) if one.verdict != "ok"] == []
    assert find_driver_cuda(host) == cuda


@pytest.mark.parametrize(
    ("answer", "files", "verdict", "says"),
    [
        (texts.MISMATCH, {}, "fail", "Driver/library version mismatch"),
        (texts.LATE, {}, "warn", "nvidia-smi did not answer within 30 s"),
        (texts.NO_DRIVER, {}, "skipped", "no NVIDIA driver here"),
        (texts.NO_DRIVER, {"/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de", "/sys/bus/pci/devices/0000:01:00.0/class": "0x030200"}, "fail", "couldn't communicate"),
        (ProgramResult(code=None, why="nvidia-smi can't be run: No such file"), {"/proc/driver/nvidia/version": texts.DRIVER_VERSION}, "skipped", "nvidia-smi reports nothing"),
    ],
    ids=["mismatch", "late", "no driver, no card", "no driver", "no nvidia-smi"],
)  # fmt: skip
def test_a_broken_driver(tmp_path: Path, answer: ProgramResult, files: dict[str, str], verdict: str, says: str) -> None:
    """A driver that does not serve its GPUs is a failure with its words; tools without a card on a CPU host are none."""
    host = make_host(tmp_path, programs={"nvidia-smi": answer}, files=files, job=JobShape(backend="nccl"))
    (told,) = look(gpus_seen.PROBE, host)
    assert told.verdict == verdict
    assert says in told.what
    assert [one.verdict for probe in ALL[1:] for one in look(probe, host)] == ["skipped"] * 3


def test_a_late_driver_hangs_only_by_a_second_sign(tmp_path: Path) -> None:
    """A driver that wakes slowly is to be kept awake; with a program stuck in the kernel, or a serious Xid, it hangs, and needs a reboot."""
    slow = make_host(
        tmp_path / "slow",
        programs={"nvidia-smi": texts.LATE, "dmesg": "NVRM: Xid (PCI:0000:18:00): 13, pid=1\n"},
    )
    (told,) = look(gpus_seen.PROBE, slow)
    assert (told.verdict, told.fix.splitlines()[0]) == (
        "warn",
        "sudo nvidia-smi -pm 1  # keeps the driver loaded",
    )
    assert "reboot" not in told.fix
    for name, state in (("nvidia-smi", "D"), ("nvidia-smi", "S"), ("python", "D")):
        root = tmp_path / name / state
        add_process(root, 77, argv="nvidia-smi", name=name, state=state)
        (told,) = look(gpus_seen.PROBE, make_host(root, programs={"nvidia-smi": texts.LATE}))
        assert told.verdict == ("fail" if (name, state) == ("nvidia-smi", "D") else "warn")
    lost = make_host(tmp_path / "lost", programs={"nvidia-smi": texts.LATE, "dmesg": texts.DMESG})
    (told,) = look(gpus_seen.PROBE, lost)
    assert (told.verdict, told.fix.splitlines()[-1]) == ("fail", "sudo reboot")
    assert "Xid 74" in told.what


def test_nvidia_smi_is_asked_once_for_all_probes(tmp_path: Path) -> None:
    """All probes of one host, asked at once, share one list of the GPUs: each question more makes a cold driver slower."""
    asked: list[str] = []
    entered, answer = Event(), Event()

    def run(argv: Sequence[str], _: float) -> ProgramResult:
        asked.append(" ".join(argv))
        entered.set()
        answer.wait(30)
        return texts.LATE

    host = Host(root=tmp_path, run=run, answers={query_torch: TorchFacts(python="p", version="2.13", cuda="13.0")})
    threads = [Thread(target=lambda: host.ask(query_nvidia)) for _ in range(4)]
    for one in threads:
        one.start()
    assert entered.wait(30)
    answer.set()
    for one in threads:
        one.join(30)
    for probe in (*ALL, torch_build.PROBE):
        look(probe, host)
    assert [one for one in asked if one.startswith("nvidia-smi")] == asked[:1]


def test_the_version_of_the_driver_is_read_where_the_kernel_says_it(tmp_path: Path) -> None:
    """Both the closed and the open kernel module tell their version in one file."""
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder@U16)"
    assert (
        read_driver_version(make_host(tmp_path / "a", files={"/proc/driver/nvidia/version": texts.DRIVER_VERSION}))
        == "550.54.15"
    )
    assert read_driver_version(make_host(tmp_path / "b", files={"/proc/driver/nvidia/version": opened})) == "570.124.06"


def test_a_lost_gpu_is_named(tmp_path: Path) -> None:
    """A GPU that does not answer is named although the others do."""
    host = make_host(tmp_path, programs={texts.LIST: texts.LOST_ONE})
    told = look(gpus_seen.PROBE, host)
    assert told[0].verdict == "fail"
    assert "GPU3: 0000:5D:00.0" in told[0].what
    assert len(host.ask(query_nvidia).gpus) == 3


@pytest.mark.parametrize(
    ("visible", "ranks", "verdicts"),
    [
        (None, 8, []), (None, 9, ["fail"]), ("0,1", 2, []), ("0,1", 4, ["fail"]), ("0,9,1", 1, ["warn"]), ("", 1, ["fail"]), ("NoDevFiles", 1, ["fail"]),
        (texts.uuid(0)[:12], 1, []), ("0,0", 2, ["warn", "fail"]),
    ],
)  # fmt: skip
def test_ranks_against_visible_gpus(tmp_path: Path, visible: str | None, ranks: int, verdicts: list[str]) -> None:
    """CUDA_VISIBLE_DEVICES is read as CUDA reads it: it ends at the first entry that names no GPU, and one that stands there twice hides all."""
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    host = make_host(tmp_path, programs=H100, env=env, job=JobShape(num_ranks=ranks, backend="nccl"))
    found = [one for one in look(gpus_seen.PROBE, host) if one.verdict != "ok"]
    assert [one.verdict for one in found] == verdicts
    assert {one.class_id for one in found} <= {"L7"}


def test_gloo_ranks_need_no_gpus(tmp_path: Path) -> None:
    """More ranks than GPUs are no fault where Gloo joins them."""
    host = make_host(tmp_path, programs=RTX_4090, job=JobShape(num_ranks=16, backend="gloo"))
    assert {one.verdict for one in look(gpus_seen.PROBE, host)} == {"ok"}


def test_several_ranks_on_split_gpus(tmp_path: Path) -> None:
    """NCCL refuses two ranks on the MIG devices of one GPU; one rank is fine."""
    programs = {texts.LIST: texts.LIST_MIG, "nvidia-smi -L": texts.NAMES_MIG}
    several = make_host(tmp_path / "a", programs=programs, job=JobShape(num_ranks=2))
    one = make_host(
        tmp_path / "b",
        programs=programs,
        job=JobShape(num_ranks=1),
        env={"CUDA_VISIBLE_DEVICES": "MIG-1c2bc4dd-eb8f-5e7e-bb2e-b6b7a7a0d2f4"},
    )
    assert [told.verdict for told in look(gpus_seen.PROBE, several)] == ["warn", "ok"]
    assert [told.verdict for told in look(gpus_seen.PROBE, one)] == ["ok"]


def test_an_ill_gpu(tmp_path: Path) -> None:
    """Memory errors and the driver's serious errors are told of the GPUs here; what a program did wrong, and other hosts' GPUs, are not."""
    programs = H100 | {
        texts.HEALTH: "0, 0, 0, 0\n1, 3, 0, 0\n2, 0, 1, 0\n3, 0, No, Yes\n", "dmesg": texts.DMESG
    }  # fmt: skip
    found = [one.what for one in look(gpus_seen.PROBE, make_host(tmp_path, programs=programs)) if one.verdict == "warn"]
    assert len(found) == 4
    assert "GPU 1 has counted 3 memory errors" in found[0]
    assert found[1].startswith("GPU 2 ")
    assert found[2].startswith("GPU 3 ")
    assert found[3].startswith("GPU 1 had Xid 74 2 times")


def test_an_older_driver_tells_of_memory_errors_alone(tmp_path: Path) -> None:
    """Where the driver does not know all fields, it is asked for those that it knows."""
    host = make_host(tmp_path, programs=H100 | {texts.HEALTH: texts.BAD_FIELD, texts.ECC: "0, 5\n"})
    assert [one.what for one in look(gpus_seen.PROBE, host) if one.verdict == "warn"] == [
        "GPU 0 has counted 5 memory errors that could not be corrected"
    ]


def test_hosts_with_other_gpus_are_named(tmp_path: Path) -> None:
    """The host with fewer GPUs is named; hosts that are alike are not."""
    hosts = [make_host(tmp_path / name, programs=H100, name=name) for name in "abc"]
    hosts.append(make_host(tmp_path / "d", programs=H100 | {texts.LIST: texts.list_h100(count=7)}, name="d"))
    facts = {host.name: collect_facts(look(gpus_seen.PROBE, host)) for host in hosts}
    (told,) = compare_hosts([gpus_seen.PROBE], facts)
    assert (told.verdict, told.hosts) == ("warn", ("d",))
    assert told.what == "the number of GPUs differs: 8: a, b, c; 7: d"
    del facts["d"]
    assert compare_hosts([gpus_seen.PROBE], facts) == []


def test_a_leftover_rank_on_a_gpu(tmp_path: Path) -> None:
    """A rank whose launcher is gone is named with user and age, and the fix kills it; its arguments, which may be secret, are not shown."""
    add_process(tmp_path, 1, argv="/sbin/init", parent=0, started_s=0, name="systemd")
    add_process(
        tmp_path,
        4711,
        argv="/opt/env/bin/python -u /home/u/train.py --token s3cret",
        env="RANK=0 TORCHELASTIC_RUN_ID=none",
    )
    programs = H100 | {texts.LIST: texts.list_h100({2: 40000}), texts.APPS: f"{texts.uuid(2)}, 4711, 39990\n"}
    (told,) = look(gpus_busy.PROBE, make_host(tmp_path, programs=programs))
    assert (told.verdict, told.class_id, told.fix) == ("warn", "R5", "kill 4711")
    assert "GPU 2: 40000 of 81559 MiB" in told.what
    assert "pid 4711 (python train.py) of root, started 2 h ago" in told.what
    assert "s3cret" not in str(told.to_json())


def test_somebody_elses_process_on_a_gpu(tmp_path: Path) -> None:
    """A process that was sent to the background, or a service, is told of and not to be killed; unseen ones are told by their memory."""
    add_process(tmp_path, 1, argv="/sbin/init", parent=0, started_s=0, name="systemd")
    add_process(tmp_path, 50, argv="/usr/bin/python3 -m vllm.entrypoints.api --key k")
    programs = H100 | {
        texts.LIST: texts.list_h100({0: 78000, 5: 30000}),
        texts.APPS: f"{texts.uuid(0)}, 50, 77000\n",
    }
    full, unseen = look(gpus_busy.PROBE, make_host(tmp_path, programs=programs))
    assert (full.verdict, unseen.verdict) == ("fail", "warn")
    assert "python3 -m vllm.entrypoints.api)" in full.what
    assert "kill" not in full.fix
    assert "can't be seen from here" in unseen.what


def test_matrices_and_links_are_read() -> None:
    """The head of a matrix is underlined by nvidia-smi; NICs have rows of their own; links are told by GPU."""
    matrix = read_matrix(texts.matrix(8, "NV18", nics=NICS))
    assert len(list_gpu_pairs(matrix)) == 28
    assert matrix["GPU0", "NIC0"] == "PIX"
    assert matrix["NIC3", "GPU7"] == "NODE"
    assert list_gpu_pairs(read_matrix(texts.access(2, "CNS"))) == {(0, 1): "CNS"}
    told = read_links(texts.links({3: (4, 5)}))
    assert [sum(told[index]) for index in range(8)] == [18, 18, 18, 16, 18, 18, 18, 18]


def test_gpus_that_lack_peer_access_are_told_without_alarm(tmp_path: Path) -> None:
    """What a chipset or a card can't do is no fault: NCCL knows, and takes another way."""
    programs = RTX_4090 | {"nvidia-smi topo -p2p r": texts.access(2, "CNS")}
    (told,) = look(gpu_links.PROBE, make_host(tmp_path, programs=programs))
    assert told.verdict == "ok"
    assert "CNS: the chipset does not allow it" in told.what


def make_switch(root: Path, group: str = "identity") -> dict[str, str | ProgramResult]:
    """Two A100 on one PCIe switch, as /sys shows it, on a machine of AMD."""
    devices = root / "sys" / "bus" / "pci" / "devices"
    devices.mkdir(parents=True)
    for bus in ("17", "18"):
        real = root / "sys" / "devices" / "pci0000:15" / "0000:15:01.0" / "0000:16:00.0" / f"0000:{bus}:00.0"
        (real / "iommu_group").mkdir(parents=True)
        (real / "iommu_group" / "type").write_text(group + "\n")
        (devices / f"0000:{bus}:00.0").symlink_to(real)
    return {
        texts.LIST: texts.LIST_A100_PCIE,
        "nvidia-smi topo -m": texts.matrix(2, "PIX"),
        "nvidia-smi topo -p2p r": texts.access(2, "OK"),
    }


def test_access_control_on_a_switch_above_the_gpus(tmp_path: Path) -> None:
    """ACS on the switch between two GPUs is told with the variable that helps at once and the command that cures; on another bridge it is not."""
    programs = make_switch(tmp_path) | {"lspci -vvv": texts.LSPCI}
    (told,) = look(gpu_links.PROBE, make_host(tmp_path, programs=programs))
    assert (told.verdict, told.class_id) == ("warn", "R12")
    assert "0000:16:00.0" in told.what
    assert "80:01.0" not in told.what
    assert told.fix.splitlines()[0].startswith("NCCL_P2P_DISABLE=1 ")
    assert "sudo setpci -s 0000:16:00.0 ECAP_ACS+0x6.w=0000" in told.fix.splitlines()


@pytest.mark.parametrize(
    ("env", "lspci"),
    [({"NCCL_P2P_DISABLE": "1"}, texts.LSPCI), ({}, texts.LSPCI.replace("ACSCtl:\tSrcValid+ TransBlk- ReqRedir+", "ACSCtl:\tSrcValid- TransBlk- ReqRedir-"))],
    ids=["switched off", "no ACS"],
)  # fmt: skip
def test_no_alarm_of_access_control(tmp_path: Path, env: dict[str, str], lspci: str) -> None:
    """Where NCCL does not take the direct way, or ACS is off, nothing is said."""
    host = make_host(tmp_path, programs=make_switch(tmp_path) | {"lspci -vvv": lspci}, env=env)
    (told,) = look(gpu_links.PROBE, host)
    assert told.verdict == "ok"
    assert told.what.endswith("; both GPUs reach each other directly")


@pytest.mark.parametrize(
    ("files", "programs", "why", "fix"),
    [
        ({"/proc/cpuinfo": "flags\t\t: fpu hypervisor sse\n"}, {"lspci -vvv": texts.LSPCI}, "a virtual machine does not show", ""),
        ({}, {"lspci -vvv": "16:00.0 PCI bridge: x\n\tCapabilities: <access denied>\n"}, "only root may read it", "sudo $(command -v rankwise) doctor --only gpu-links"),
        ({}, {}, "lspci can't be run", "sudo apt-get install pciutils"),
    ],
    ids=["virtual machine", "not root", "no lspci"],
)  # fmt: skip
def test_access_control_that_can_not_be_read_is_not_called_well(
    tmp_path: Path, files: dict[str, str], programs: dict[str, str | ProgramResult], why: str, fix: str
) -> None:
    """Switches that could not be looked at are told as that, with the command that can, beside what is known of the GPUs."""
    host = make_host(tmp_path, programs=make_switch(tmp_path) | programs, files=files)
    told, known = look(gpu_links.PROBE, host)
    assert (told.verdict, known.verdict, told.fix) == ("skipped", "ok", fix)
    assert why in told.why


def test_the_iommu_translates(tmp_path: Path) -> None:
    """A GPU in a translating domain of the IOMMU is told, with the kernel's option that cures it."""
    programs = make_switch(tmp_path, "DMA-FQ") | {"lspci -vvv": ""}
    (told,) = look(gpu_links.PROBE, make_host(tmp_path, programs=programs))
    assert told.class_id == "R12"
    assert "GPU 0, 1" in told.what
    assert "iommu=pt" in told.fix


def test_nvlink_that_is_closed(tmp_path: Path) -> None:
    """A pair with NVLink that can't use it is told."""
    programs = H100 | {"nvidia-smi topo -p2p r": texts.access(8, "OK", {(2, 5): "NS"})}
    found = [one for one in look(gpu_links.PROBE, make_host(tmp_path, programs=programs)) if one.verdict == "warn"]
    assert ["GPU 2 and GPU 5 say NS" in one.what for one in found] == [True]


def test_lost_links_and_a_fabric_that_is_not_set_up(tmp_path: Path) -> None:
    """A GPU with fewer links than its like is named with the links; a fabric in progress is a failure."""
    programs = H100 | {
        "nvidia-smi nvlink -s": texts.links({3: (3, 5)}),
        texts.FABRIC: "".join(f"{i}, In Progress\n" for i in range(8)),
    }
    fabric, lost, ways = look(gpu_links.PROBE, make_host(tmp_path, programs=programs))
    assert (fabric.verdict, lost.verdict, ways.verdict) == ("fail", "warn", "ok")
    assert "802" in fabric.why
    assert lost.what == "GPU 3 has 16 active NVLinks, others of its model here have 18; inactive: 3, 5"
    assert ways.what == "8 GPUs, 28 pairs: 28 by NV18; 8 GPUs with a network card near; all 28 pairs of GPUs reach each other directly"  # fmt: skip


def test_cards_that_are_joined_in_pairs_have_lost_nothing(tmp_path: Path) -> None:
    """Cards without a bridge beside cards with one are no loss; an old driver without the fabric's field is no fault."""
    programs = {
        texts.LIST: texts.list_h100(count=4), "nvidia-smi topo -m": texts.matrix(4, "SYS", others={(0, 1): "NV4"}), texts.FABRIC: texts.BAD_FIELD,
        "nvidia-smi nvlink -s": texts.links({2: range(4), 3: range(4)}, count=4, each=4),
    }  # fmt: skip
    unknown, told = look(gpu_links.PROBE, make_host(tmp_path, programs=programs))
    assert unknown.why == "`nvidia-smi topo -p2p r` has no matrix"
    assert told.what == "4 GPUs, 6 pairs: 1 by NV4, 5 by SYS"


def test_a_gpu_that_is_slowed_down(tmp_path: Path) -> None:
    """Heat is told of the GPU that has it, and a power limit below that of its like."""
    lines = [f"{i}, 41, 700.00, Not Active, Not Active, Not Active, Not Active" for i in range(8)]
    lines[4] = "4, 88, 700.00, Active, Not Active, Not Active, Active"
    lines[6] = "6, 40, 500.00, Not Active, Not Active, Not Active, Not Active"
    hot, weak = look(gpu_throttle.PROBE, make_host(tmp_path, programs=H100 | {texts.REASONS: "\n".join(lines) + "\n"}))
    assert hot.what == "GPU 4 is slowed down at this moment (it is too hot), 88 °C"
    assert weak.what == "GPU 6 may use 500 W, others of its model here 700 W"


def test_hosts_with_other_power_limits_are_named(tmp_path: Path) -> None:
    """A host whose GPUs all may use less is found by comparison only."""
    low = H100 | {texts.REASONS: str(H100[texts.REASONS]).replace("700.00", "500.00")}
    hosts = [make_host(tmp_path / name, programs=low if name == "b" else H100, name=name) for name in "abc"]
    facts = {host.name: collect_facts(look(gpu_throttle.PROBE, host)) for host in hosts}
    (told,) = compare_hosts([gpu_throttle.PROBE], facts)
    assert (told.verdict, told.hosts) == ("warn", ("b",))
