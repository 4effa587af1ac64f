"""What is shown of the environment: known families only, secrets masked, slips of the pen named."""

from __future__ import annotations

import json

import pytest

from rankwise.cli.env import main
from rankwise.doctor.variables.masking import list_variables, mask_text, mask_value
from rankwise.doctor.variables.table import _read, find, guess, is_explained, report_misspellings
from rankwise.launcher.run_flags import build_parser

_HIDDEN = "n0tF0rY0urEyes"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("TORCH_HUB_TOKEN", _HIDDEN, "***"),
        ("ACCELERATE_API_KEY", _HIDDEN, "***"),
        ("NCCL_AUTH", _HIDDEN, "***"),
        ("TORCH_HOME", f"https://me:{_HIDDEN}@host/path", "https://***@host/path"),
        ("TORCH_HOME", f"https://me:p@{_HIDDEN}@host/path", "https://***@host/path"),
        ("MASTER_ADDR", f"me:{_HIDDEN}@host", "***@host"),
        ("PET_RDZV_ENDPOINT", f"me:p@{_HIDDEN}@host:29500", "***@host:29500"),
        ("TF_CONFIG", json.dumps({"cluster": {"worker": [f"me:{_HIDDEN}@b:2"]}}), '{"cluster": {"worker": ["***@b:2"]}}'),
        ("PET_LOG_DIR", "/data/hf_checkpoints/0a1b2c3d4e5f0a1b2c3d4e5f0a1b2c3d/x", "/data/hf_checkpoints/0a1b2c3d4e5f0a1b2c3d4e5f0a1b2c3d/x"),
        ("PET_RDZV_CONF", f"timeout=3,password={_HIDDEN}", "timeout=3,password=***"),
        ("PET_LOG_DIR", "s3://bucket/logs", "s3://bucket/logs"),
        ("TF_CONFIG", json.dumps({"cluster": {"worker": ["h:1"]}, "token": _HIDDEN, "rpc": {"creds": {"api_key": [_HIDDEN]}}}), '{"cluster": {"worker": ["h:1"]}, "token": "***", "rpc": {"creds": {"api_key": "***"}}}'),
        ("SM_RESOURCE_CONFIG", json.dumps({"hosts": ["algo-1"], "inner": json.dumps({"secret": _HIDDEN})}), '{"hosts": ["algo-1"], "inner": "{\\"secret\\": \\"***\\"}"}'),
        ("TF_CONFIG", f'{{"token": "{_HIDDEN}"', '{"token": ***'),
        ("PET_RDZV_ID", "hf_" + 20 * "aB3", "***"),
        ("PET_RDZV_ID", 20 * "aB3", "***"),
        ("PET_RDZV_ID", "AKIA" + 8 * "AB", "***"),
        ("TORCHELASTIC_RUN_ID", "97be6297-2760-416c-a6fe-eae3bd8eff64", "97be6297-2760-416c-a6fe-eae3bd8eff64"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("MASTER_ADDR", "train-node-0-0.train.ns.svc.cluster.local", "train-node-0-0.train.ns.svc.cluster.local"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,garbage_collection_threshold:0.8", "expandable_segments:True,garbage_collection_threshold:0.8"),
    ],
)  # fmt: skip
def test_secrets_are_masked(name: str, value: str, shown: str) -> None:
    """By name, in addresses, in JSON and in what is almost JSON, and by their form; ids, hosts and settings are not."""
    assert mask_value(name, value) == shown


def test_a_bearer_is_masked() -> None:
    """What stands behind Authorization is masked with its kind."""
    assert _HIDDEN not in mask_text(f"Authorization: Bearer {_HIDDEN}")


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "env",
    [
        {"MASTER_ADDR": f"me:{_HIDDEN}@host", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"},
        {"MASTER_ADDR": f"me:{_HIDDEN}@host", "RANK": "0", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"TF_CONFIG": json.dumps({"cluster": {"worker": [f"me:{_HIDDEN}@a:1", f"me:{_HIDDEN}@b:2"]}, "task": {"type": "worker", "index": 1}})},
        {"MASTER_ADDR": f"me:{_HIDDEN}@host"},
        {"NCCL_SECRET": f"two {_HIDDEN}", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": f"me:{_HIDDEN}@host\n10.0.0.2"},
    ],
)  # fmt: skip
def test_users_without_a_scheme_are_masked(
    env: dict[str, str], form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the list of variables, the table of values, the command that is suggested and the other sources."""
    monkeypatch.setattr("rankwise.cli.env.environ", lambda: env)
    main(["--format", form])
    told = capsys.readouterr().out
    assert _HIDDEN not in told
    assert "***@" in told


@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_secret_is_printed(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names outside the families are not shown at all, and no secret in any other place: value, finding, command, other source."""
    env = {
        "HOME_PAGE_PASSWORD": _HIDDEN, "HF_TOKEN": _HIDDEN, "AWS_SECRET_ACCESS_KEY": _HIDDEN, "DATABASE_URL": f"pg://u:{_HIDDEN}@h/d", "NCCL_SECRET": _HIDDEN,
        "MASTER_ADDR": f"tcp://u:{_HIDDEN}@host0", "RANK": "5", "WORLD_SIZE": "2", "MY_SETTING": _HIDDEN, "SM_HPS": json.dumps({"token": _HIDDEN}),
        "SM_TRAINING_ENV": json.dumps({"password": _HIDDEN}), "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": f"x://u:{_HIDDEN}@h\n10.0.0.2",
        "TF_CONFIG": json.dumps({"cluster": {"worker": [f"grpc://u:{_HIDDEN}@a:1", "b:2"]}, "task": {"type": "worker", "index": 1}, "auth": _HIDDEN}),
    }  # fmt: skip
    for removed in ({}, {"RANK": "", "WORLD_SIZE": ""}, {"RANK": "", "WORLD_SIZE": "", "TF_CONFIG": "", "MASTER_ADDR": ""}):  # fmt: skip
        monkeypatch.setattr("rankwise.cli.env.environ", lambda removed=removed: {**env, **removed})
        main(["--format", form])
        text = capsys.readouterr().out
        assert _HIDDEN not in text
        assert "MY_SETTING" not in text
        assert "HF_TOKEN" not in text


def test_families_are_shown_with_what_they_do() -> None:
    """A known variable is shown with its line, one of a family that is not known plainly, and a known name that sounds secret with its value."""
    told = {one.name: (one, shown) for one, shown in list_variables({"NCCL_IB_PKEY": "3", "NCCL_NEW_THING": "1", "OTHER": "2", "OMP_NUM_THREADS": "4"})}  # fmt: skip
    assert set(told) == {"NCCL_IB_PKEY", "NCCL_NEW_THING", "OMP_NUM_THREADS"}
    assert told["NCCL_IB_PKEY"][1] == "3"
    assert told["NCCL_NEW_THING"][0].does == ""
    assert "threads" in told["OMP_NUM_THREADS"][0].does


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SOCKET_IF_NAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOCKT_IFNAME", "NCCL_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAEM", "GLOO_SOCKET_IFNAME"),
        ("PET_NPROC_PER_NODES", "PET_NPROC_PER_NODE"),
        ("PET_N_PROC_PER_NODE", "PET_NPROC_PER_NODE"),
        ("TORCH_DISTRIBUTED_DEBUGG", "TORCH_DISTRIBUTED_DEBUG"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("MASTER_ADDRESS", "MASTER_ADDR"),
        ("NCCL_IB_TX", ""),
        ("NCCL_SOME_PLUGIN", ""),
        ("FI_PROVIDERS_PATH", ""),
        ("MY_RANK", ""),
    ],
)
def test_slips_of_the_pen(name: str, meant: str) -> None:
    """An underscore, a letter lost, added, wrong or swapped is taken for a slip; short names and others' names are not."""
    assert guess(name) == meant


def test_real_names_are_no_slips() -> None:
    """No known name is taken for another one, and a slip beside the right name is left alone."""
    real = [one.name for one in _read()[1].values() if one.kind != "slip for"]
    assert [name for name in real if guess(name)] == []
    assert list(report_misspellings({"MASTER_ADDRESS": "a", "MASTER_ADDR": "b"})) == []


def test_the_table_of_variables_is_read_as_it_is_written() -> None:
    """Each kind of line: a range, words, an old name, one that is meant, and names of which nothing more is known."""
    lines = {name: find(name) for name in ("NCCL_IB_TIMEOUT", "NCCL_P2P_LEVEL", "NCCL_BUFFSIZE", "NCCL_RINGS", "NCCL_BLOCKING_WAIT", "NCCL_WIN_STRIDE")}  # fmt: skip
    kinds = {name: (one.kind, one.words[:1], one.least, one.most) for name, one in lines.items() if one is not None}
    least, most = -(1 << 63), (1 << 63) - 1
    assert kinds == {
        "NCCL_IB_TIMEOUT": ("number", (), 0, 31), "NCCL_P2P_LEVEL": ("word or number", ("LOC",), least, most),
        "NCCL_BUFFSIZE": ("number", (), -2, most), "NCCL_RINGS": ("replaced by", ("NCCL_GRAPH_FILE",), least, most),
        "NCCL_BLOCKING_WAIT": ("old name of", ("TORCH_NCCL_BLOCKING_WAIT",), least, most), "NCCL_WIN_STRIDE": ("", (), least, most),
    }  # fmt: skip
    assert find("NCCL_NO_SUCH_THING") is None
    assert {one.kind for one in _read()[1].values()} == {
        "", "number", "file", "word", "word or number", "exact", "list", "terms", "old name of", "replaced by", "slip for",
    }  # fmt: skip


def test_every_flag_of_the_launcher_is_known() -> None:
    """The PET_* variable of every flag is explained: one that is not would be taken for somebody's own."""
    flags = {
        option[2:].replace("-", "_").upper()
        for action in build_parser({})._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    torchruns = {"NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_CONF", "STANDALONE",
                 "MAX_RESTARTS", "LOCAL_ADDR", "VIRTUAL_LOCAL_RANK", "SIGNALS_TO_HANDLE", "SHUTDOWN_TIMEOUT", "NUMA_BINDING", "TEE", "REDIRECTS", "LOG_DIR"}  # fmt: skip
    assert torchruns <= flags
    assert all(is_explained(f"PET_{name}") for name in torchruns)
