"""No secret of the environment leaves the doctor: not in text or JSON, not above a run, not between hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fake_hosts import ETH0, LOOPBACK, make_host
from rankwise.cli.main import main
from rankwise.doctor import registry
from rankwise.doctor.at_launch import format_readings, look_before
from rankwise.doctor.examine import collect_facts, compare_hosts, examine
from rankwise.doctor.host import JobShape
from rankwise.doctor.probe import Probe, Reading
from rankwise.doctor.variables.masking import mask_fact, mask_text, mask_value
from support import run_rankwise, write_script

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_HIDDEN = "n0tF0rY0urEyes"
_URL = f"https://me:{_HIDDEN}@h/x"
_BARE = f"me:{_HIDDEN}@host0"
_TOKEN = f"hf_{_HIDDEN}{_HIDDEN}"
#: A secret in each family, by its name, by its form, with blanks, in front of a host, in JSON, under a name that is misspelt.
PLANTED: dict[str, dict[str, str]] = {
    "nccl": {"NCCL_AUTH_TOKEN": _HIDDEN, "NCCL_DEBUG_FILE": _URL, "NCCL_NET_PLUGIN": _TOKEN, "NCCL_IB_HCA": _BARE, "NCCL_ALGO": _TOKEN, "NCCL_SOCKET_IFNAME": _TOKEN},
    "nccl, with blanks": {"NCCL_SECRET_PHRASE": f"three {_HIDDEN} words", "NCLL_AUTH": f"two {_HIDDEN}", "NCCL_BUFSIZE": _TOKEN, "NCCL_COMM_ID": f"me:{_HIDDEN}@h:1"},
    "nccl, as number and file": {"NCCL_BUFFSIZE": _TOKEN, "NCCL_TOPO_FILE": f"/x/{_TOKEN}", "NCCL_ASYNC_ERROR_HANDLING": _TOKEN},
    "gloo": {"GLOO_SOCKET_IFNAME": _TOKEN, "GLOO_DEVICE_TRANSPORT": _URL, "TP_SOCKET_IFNAME": _BARE},
    "torch": {"TORCH_DISTRIBUTED_DEBUG": _TOKEN, "TORCH_CPP_LOG_LEVEL": _BARE, "TORCH_NCCL_SECRET": f"two {_HIDDEN}", "TORCH_DISTRIBUTED_DEBUGG": _TOKEN, "OMP_NUM_THREADS": _TOKEN},
    "master": {"MASTER_ADDR": _BARE, "MASTER_PORT": _TOKEN},
    "ranks": {"MASTER_ADDR": _URL, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    "tf_config": {"TF_CONFIG": json.dumps({"cluster": {"worker": [f"me:{_HIDDEN}@127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}, "token": _HIDDEN})},
    "bad tf_config": {"TF_CONFIG": f'{{"token": "{_HIDDEN}"'},
    "clusters": {"SM_HOSTS": f'["{_BARE}"]', "SM_CURRENT_HOST": _TOKEN, "PET_RDZV_CONF": f"password={_HIDDEN}", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_IPS": _BARE},
    "gpus": {"CUDA_VISIBLE_DEVICES": f"0,1,{_TOKEN}", "ACCELERATE_USE_FSDP": "1", "ACCELERATE_USE_DEEPSPEED": "1", "ACCELERATE_API_KEY": _HIDDEN, "UCX_AUTH": _HIDDEN, "FI_TOKEN": _HIDDEN},
    "control signs": {"NCCL_SECRET": f"\x1b[31m{_HIDDEN}\nrm -rf", "TORCH_NCCL_TOKEN": f"a\n{_HIDDEN}"},
}  # fmt: skip
_EVERY = pytest.mark.parametrize("env", PLANTED.values(), ids=PLANTED)


def plant(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    """Set variables for this process."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("form", ["text", "json"])
@_EVERY
def test_the_doctor_tells_none(
    env: dict[str, str], form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """Not on standard output or error: as text, as JSON with what hosts compare."""
    plant(monkeypatch, env)
    main(["doctor", "--only", "environment,master-address", "--format", form])
    told = capsys.readouterr()
    for text in (told.out, told.err):
        assert _HIDDEN not in text
        assert "\x1b" not in text


@_EVERY
def test_no_probe_of_variables_tells_one(env: dict[str, str], tmp_path: Path) -> None:
    """On a host with GPUs and several hosts to meet, where NCCL is used, the same: in no text, command or fact."""
    shape = JobShape(num_nodes=2, master_addr=env.get("MASTER_ADDR", ""))
    files = {"/dev/nvidiactl": "", "/proc/driver/nvidia/gpus/0/information": "", "/proc/driver/nvidia/gpus/1/information": "", "/sys/class/infiniband/mlx5_0/x": ""}  # fmt: skip
    for job in (shape, JobShape(num_ranks=4, num_nodes=2)):
        host = make_host(tmp_path, files=files, env=env, job=job, interfaces=[LOOPBACK, ETH0])
        chosen = [one for one in registry.all_probes() if one.topic == "environment" or one.id in {"master-address", "hostname", "cores", "interfaces"}]  # fmt: skip
        told = json.dumps([one.to_json() for one in examine(host, chosen)])
        assert _HIDDEN not in told


def test_what_stands_in_nccls_file_is_masked_too(tmp_path: Path) -> None:
    """With its blanks, and in what hosts compare."""
    env = {"NCCL_CONF_FILE": "/my.conf"}
    host = make_host(tmp_path, files={"/my.conf": f"NCCL_AUTH=zzz {_HIDDEN}\nNCCL_NET_PLUGIN={_TOKEN}\n"}, env=env)  # fmt: skip
    told = json.dumps([one.to_json() for one in examine(host, registry.find("nccl-variables"))])
    assert _HIDDEN not in told
    assert "NCCL_AUTH=*** (in /my.conf)" in told


def test_secrets_that_differ_between_hosts_are_told_by_their_checksums(tmp_path: Path) -> None:
    """Hosts see whether they have the same one, and nobody sees which."""
    probes = registry.find("nccl-variables")

    def compare(*values: str) -> list[Reading]:
        hosts = [make_host(tmp_path, env={"NCCL_AUTH": value}, name=f"host{n}") for n, value in enumerate(values)]  # fmt: skip
        return compare_hosts(probes, {host.name: collect_facts(examine(host, probes)) for host in hosts})

    assert compare(_HIDDEN, _HIDDEN) == []
    (one,) = compare(_HIDDEN, "other")
    assert one.what.startswith("NCCL_AUTH differs: *** (checksum ")
    assert _HIDDEN not in json.dumps(one.to_json())
    assert mask_fact("NCCL_ALGO", "Ring") == "Ring"
    assert mask_fact("NCCL_IB_PKEY", "0x7fff") == "0x7fff"


def test_what_is_said_above_a_run_has_none(tmp_path: Path) -> None:
    """What `rankwise run` tells before a start, with the command that mends it."""
    env = {"TORCH_DISTRIBUTED_DEBUG": _TOKEN, "GLOO_SOCKET_IFNAME": _BARE}
    told = format_readings(look_before(make_host(tmp_path, env=env, interfaces=[LOOPBACK, ETH0])))
    assert any(one.startswith("TORCH_DISTRIBUTED_DEBUG=***") for one in told)
    assert any("GLOO_SOCKET_IFNAME=***@host0" in one for one in told)
    assert _HIDDEN not in "\n".join(told)


def test_a_run_prints_none(tmp_path: Path) -> None:
    """The command itself, started for real with a wrong value that is a secret."""
    script = write_script(tmp_path, "print('rank is here')")
    done = run_rankwise(["--nproc-per-node", "2", str(script)], tmp_path, env={"TORCH_DISTRIBUTED_DEBUG": _TOKEN, "NCCL_AUTH": _HIDDEN})  # fmt: skip
    assert "TORCH_DISTRIBUTED_DEBUG=*** is not one of" in done.out + done.err
    assert _HIDDEN not in done.out + done.err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["run", "--rdzv-conf", "KEY=model,x", "t.py"], "--rdzv-conf 'KEY=model,x': expected KEY=VALUE,KEY=VALUE"),
        (["run", f"--nnodes={_URL}", "t.py"], "--nnodes 'https://***@h/x'"),
        (["run", f"--nnodes={_TOKEN}", "t.py"], "--nnodes '***'"),
        (["checkpoint", "inspect", "runs/KEY=model"], "runs/KEY=model"),
        (["checkpoint", "inspect", f"{_BARE}/KEY=model"], "***@host0/KEY=model"),
        (["rule", "key=model"], "key=model"),
    ],
)  # fmt: skip
def test_errors_hide_secrets_and_keep_other_words(
    arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is a secret by its form is in no error of any command; what only sounds so is the user's own word, and can be typed again."""
    assert main(arguments) != 0
    told = capsys.readouterr().err
    assert shown in told
    assert _HIDDEN not in told


def test_any_probes_words_are_masked(tmp_path: Path) -> None:
    """Whatever a probe says, what hosts say to each other's facts, and the message of a probe that breaks."""

    def break_down(_: object) -> Sequence[Reading]:
        raise ValueError(f"can't reach {_URL}")

    def say(_: object) -> Sequence[Reading]:
        return [Reading(verdict="warn", what=f"at {_URL}", why=f"token={_HIDDEN}", fix=f"getent hosts {_BARE}")]  # fmt: skip

    def compare(_: object) -> Sequence[Reading]:
        return [Reading(verdict="warn", what=_URL, why=_URL, fix=_URL)]

    probes = [
        Probe(id=name, title=name, topic="network", speed="instant", look=look_at, compare=compare)
        for name, look_at in (("broken", break_down), ("saying", say))
    ]
    host = make_host(tmp_path)
    broken, said = examine(host, probes)
    assert "can't reach https://***@h/x" in broken.why
    assert (said.what, said.why, said.fix) == ("at https://***@h/x", "token=***", "getent hosts ***@host0")
    (compared,) = compare_hosts(probes[1:], {"a": {"saying": {"x": 1}}, "b": {"saying": {"x": 2}}})
    assert {compared.what, compared.why, compared.fix} == {"https://***@h/x"}


def test_a_value_adds_no_line_to_a_command(tmp_path: Path) -> None:
    """A value with ends of lines and signs that steer a terminal stands in its line, written out."""
    env = {"NCCL_DEBUGG": "\x1b[31mINFO\nrm -rf /", "TORCH_CPP_LOG_LEVEL": "x\ny"}
    found = examine(make_host(tmp_path, env=env), registry.find("nccl-variables", "torch-variables"))
    for one in found:
        assert "\x1b" not in one.what + one.fix
        assert "\nrm" not in one.what + one.fix
        assert "\ny" not in one.what


@pytest.mark.parametrize(
    "text",
    [
        "srun --time 12:30 me@host; ssh -p 22 me@host0 rankwise doctor",
        "at 12:30:01, me@host0: Permission denied (publickey,password).",
        "sudo chown me:users /data/me@work; scp f me@host:/path/x@1",
        "rankwise doctor --hosts me@node0:22,me@node1:22",
        "echo '10.0.0.1 node0' | sudo tee -a /etc/hosts",
        "docker run nvcr.io/nvidia/pytorch:24.01@sha256:0a1b2c -v /a:/b@c",
        "10.0.0.1@tcp0:10.0.0.2@tcp0:/lustre is read-only, server:/export@snap too",
        "git clone git@github.com:org/repo@v1; [::1]:29500 fe80::1%eth0 0000:01:00.0",
        "/sys/fs/cgroup/docker-" + 8 * "0a1b2c3d" + ".scope/memory.max has 4 GiB",
        "/nix/store/0a1b2c3d4e5f6g7h8i9j0k1l2m3n4o5p-python3/bin/python, /opt/a:/opt/gcc@12/lib",
        "/data/hf_checkpoints/run on sk-seoul-gpu-node01, hf_transformers, pypi-mirror.example",
        "the probe itself failed: KeyError: 'x' at file.py:3; Host key verification failed.",
        "PWD=/home/you NCCL_IB_PKEY=0x7fff GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT=/etc/cert.pem",
        "export GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY=…\nexport HF_TOKEN=…",
        "TOKENIZERS_PARALLELISM=false python train.py tokenizer=/data/gpt2 --tokenizer /data/gpt2 --pre-tokenized yes",
        "/mnt/hf_cachedirectory1234/ck and /data/a/hf_cachedirectory1234 (~/x/npm_cachedirectory1234/y)",
        "train.py --use-auth --author me --api-key …, --token ***; a low-key event, ssh-keygen -R node0; a bearer of it",
        "srun --no-auth\ngetent hosts node0",
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6 tcp://10.0.0.1:29500 expandable_segments:True",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    """Commands, paths, addresses, host files, owners, times and ssh's me@host can be typed as they are."""
    assert mask_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"--master-addr me:{_HIDDEN}@host train.py", "--master-addr ***@host train.py"),
        (f"me:p@{_HIDDEN}@host", "***@host"),
        (f"me@example.org:{_HIDDEN}@host", "***@host"),
        (f"redis://:{_HIDDEN}@h", "redis://***@h"),
        (f"//me:{_HIDDEN}@h/x", "//***@h/x"),
        (f"({_BARE}, b:2)", "(***@host0, b:2)"),
    ],
)
def test_users_in_front_of_hosts_need_no_scheme(text: str, shown: str) -> None:
    """With a scheme or without, in a sentence or a command."""
    assert mask_text(text) == shown
    assert mask_text(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"pid 7 (python t.py --api-key {_HIDDEN})", "pid 7 (python t.py --api-key ***)"),
        (f"t.py -password '{_HIDDEN} too' --hf_token  {_HIDDEN},{_HIDDEN} x", "t.py -password *** --hf_token  *** x"),
        (f"t.py --use-auth --wandb-api-key {_HIDDEN}", "t.py --use-auth --wandb-api-key ***"),
        ("Bearer abcdefghijklmnop", "Bearer ***"),
        (f"curl -H 'authorization; bearer {_HIDDEN}.x/y='", "curl -H 'authorization; bearer ***'"),
        (f"TOKENIZER_KEY={_HIDDEN}", "TOKENIZER_KEY=***"),
        (f"/mnt/hf_cachedirectory1234/{_TOKEN}/x", "/mnt/hf_cachedirectory1234/***"),
        (f"/mnt/{_TOKEN}", "/mnt/***"),
        ("https://h/x/hf_cachedirectory1234", "https://h/x/***"),
    ],
)  # fmt: skip
def test_secrets_of_command_lines_and_paths(text: str, shown: str) -> None:
    """What follows a flag that names a secret, a bearer by itself, and a key in a path, though the path has a folder that begins like one."""
    assert mask_text(text) == shown
    assert mask_text(shown) == shown


def test_command_lines_as_lists_are_masked() -> None:
    """SageMaker tells a script's arguments as a list: what stands behind a flag that names a secret is one, and another flag is none."""
    told = json.loads(mask_value("SM_USER_ARGS", json.dumps(["--api-key", _HIDDEN, "--use-auth", "--epochs", 3, "--token", 12])))  # fmt: skip
    assert told == ["--api-key", "***", "--use-auth", "--epochs", 3, "--token", "***"]


def test_masking_is_light() -> None:
    """`rankwise run` examines its host at each start: nothing is imported for masking that is not there already."""
    code = "import sys, json, threading; import rankwise.doctor.probe, rankwise.doctor.examine; print([one for one in ('hashlib', 'psutil', 'socket', 'subprocess', 'rankwise.doctor.variables.places') if one in sys.modules])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
