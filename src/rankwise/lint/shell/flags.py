"""What each launcher's command line takes: flags, their spellings, and which of them have a value.

The table for torchrun is compared with torch's own parser by a test; the check itself never imports torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property

_TORCHRUN_VALUES = (
    "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval start_method "
    "event_log_handler role log_dir redirects tee log_line_prefix_template print_completion local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters "
    "node_rank master_addr master_port local_addr logs_specs numa_binding signals_to_handle shutdown_timeout"
)
_TORCHRUN_SWITCHES = "standalone module no_python run_path virtual_local_rank help"
_RANKWISE_VALUES = "report hang_timeout on_hang preload role_counts join_every"
_RANKWISE_SWITCHES = "watch no_watch strict cold resident no_resident check no_check"
_ACCELERATE_VALUES = (
    "aws_access_key_id aws_secret_access_key config_file env gpu_ids log_dir machine_rank main_process_ip "
    "main_process_port main_training_function max_restarts mixed_precision monitor_interval mpirun_hostfile "
    "num_cpu_threads_per_process num_machines num_processes rdzv_backend rdzv_conf role tee vm dynamo_backend "
    "dynamo_mode fp8_format zero_stage gradient_accumulation_steps gradient_clipping deepspeed_config_file "
    "deepspeed_hostfile deepspeed_multinode_launcher deepspeed_exclusion_filter deepspeed_inclusion_filter "
    "offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path "
    "zero3_init_flag zero3_save_16bit_model fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy "
    "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type "
    "fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading fsdp_sync_module_states "
    "fsdp_activation_checkpointing fsdp_version fsdp_reshard_after_forward megatron_lm_tp_degree megatron_lm_pp_degree"
)
_ACCELERATE_SWITCHES = (
    "cpu debug downcast_bf16 dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation "
    "enable_cpu_affinity fp8_use_autocast_during_eval help module multi_gpu no_python no_tpu_cluster quiet same_network "
    "tpu tpu_cluster tpu_use_sudo use_deepspeed use_fsdp use_megatron_lm use_parallelism_config ipex use_xpu"
)
_DEEPSPEED_VALUES = (
    "hostfile include exclude num_nodes num_gpus num_accelerators min_elastic_nodes max_elastic_nodes master_port "
    "master_addr node_rank launcher launcher_args autotuning elastic_training bind_core_list ssh_port venv_script"
)
_DEEPSPEED_SWITCHES = (
    "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid enable_each_rank_log bind_cores_to_rank "
    "user_script_args help"
)
#: What other launchers, and people, call it.
_MEANT = {
    **dict.fromkeys(
        (  # noqa: SIM905
            "nprocs nproc n_proc n np num_processes num_procs num_proc ngpus ngpu gpus num_gpus n_gpus ranks gpus_per_node "
            "ntasks_per_node proc_per_node procs_per_node nprocs_per_node nproc_per_nodes num_proc_per_node processes_per_node "
            "devices num_workers_per_node num_processes_per_node"
        ).split(),
        "nproc_per_node",
    ),
    **dict.fromkeys(["nodes", "num_nodes", "num_node", "num_machines", "n_nodes", "nnode"], "nnodes"),
    **dict.fromkeys(["machine_rank", "noderank", "rank", "nr"], "node_rank"),
    **dict.fromkeys(["main_process_port", "port", "masterport"], "master_port"),
    **dict.fromkeys(["main_process_ip", "master_ip", "master", "master_address", "masteraddr"], "master_addr"),
    **dict.fromkeys(["rdzv_end_point", "rdvz_endpoint", "rdzv_addr", "rdzv"], "rdzv_endpoint"),
    **dict.fromkeys(["rdvz_backend"], "rdzv_backend"),
    **dict.fromkeys(["rdvz_id", "job_id"], "rdzv_id"),
    **dict.fromkeys(["logdir"], "log_dir"),
    **dict.fromkeys(["stand_alone", "single_node"], "standalone"),
}
_TRANSLATED = {
    "accelerate": {
        "nproc_per_node": "num_processes",
        "nnodes": "num_machines",
        "node_rank": "machine_rank",
        "master_port": "main_process_port",
        "master_addr": "main_process_ip",
    },
    "deepspeed": {"nproc_per_node": "num_gpus", "nnodes": "num_nodes"},
}
#: Settings of plug-ins: names so much alike that one of them is no misspelling of another.
_FAMILIES = ("fsdp", "megatron", "deepspeed", "fp8", "dynamo", "parallelism", "tpu", "zero", "offload", "aws")
#: Flags that only a launcher has; others (--role, --log-dir, --module …) are common in scripts.
LAUNCHER_ONLY = frozenset(
    [
        "nproc_per_node",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "rdzv_conf",
        "standalone",
        "max_restarts",
        "monitor_interval",
        "local_ranks_filter",
    ]
)
_LATE = {
    "accelerate": frozenset(
        ["num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "multi_gpu"]
    ),
    "deepspeed": frozenset(["num_gpus", "num_nodes", "hostfile", "include", "exclude"]),
    "python": frozenset(["nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "standalone"]),
}


def late_flags(launcher: str) -> frozenset[str]:
    """Flags that are the launcher's own, so that they are lost behind the script."""
    return _LATE.get(launcher, LAUNCHER_ONLY)


@dataclass(frozen=True)
class FlagTable:
    """The flags of one launcher.

    Attributes:
        values: Names of flags that take a value, with underscores.
        switches: Names of those that take none.
        short: One-letter flags and the names that they stand for.
        whole: Names that may not be abbreviated.
        is_complete: Whether a flag outside the table is sure to be refused.
    """

    values: frozenset[str]
    switches: frozenset[str]
    short: tuple[tuple[str, str], ...] = ()
    whole: frozenset[str] = frozenset()
    is_complete: bool = True

    @cached_property
    def spellings(self) -> dict[str, str]:
        """Every spelling with the name it stands for: ``--node-rank`` and ``--node_rank``, not ``--node-rank_x``."""
        long = {f"--{name.replace('_', sign)}": name for name in (*self.values, *self.switches) for sign in "_-"}
        return {**long, **dict(self.short)}

    def find(self, flag: str) -> tuple[str | None, tuple[str, ...]]:
        """The name of a flag as argparse finds it, and what it could be where that is more than one."""
        if name := self.spellings.get(flag):
            return name, ()
        if not flag.startswith("--") or len(flag) < 3:
            return None, ()
        near = [
            spelled for spelled, name in self.spellings.items() if spelled.startswith(flag) and name not in self.whole
        ]
        return (self.spellings[near[0]], ()) if len(near) == 1 else (None, tuple(sorted(near)))


def _table(values: str, switches: str, **kwargs: object) -> FlagTable:
    return FlagTable(frozenset(values.split()), frozenset(switches.split()), **kwargs)  # type: ignore[arg-type]


_SHORT = (("-m", "module"), ("-r", "redirects"), ("-t", "tee"), ("-h", "help"))
_OWN = frozenset(f"{_RANKWISE_VALUES} {_RANKWISE_SWITCHES}".split())
TABLES: dict[str, FlagTable] = {
    "torchrun": _table(_TORCHRUN_VALUES, _TORCHRUN_SWITCHES, short=_SHORT),
    "launch": _table(_TORCHRUN_VALUES, f"{_TORCHRUN_SWITCHES} use_env", short=_SHORT),
    "rankwise": _table(
        f"{_TORCHRUN_VALUES} {_RANKWISE_VALUES}", f"{_TORCHRUN_SWITCHES} {_RANKWISE_SWITCHES}", short=_SHORT, whole=_OWN
    ),
    "accelerate": _table(
        _ACCELERATE_VALUES,
        _ACCELERATE_SWITCHES,
        short=(("-m", "module"), ("-q", "quiet"), ("-h", "help"), ("-t", "tee")),
        is_complete=False,
    ),
    "deepspeed": _table(
        _DEEPSPEED_VALUES,
        _DEEPSPEED_SWITCHES,
        short=(("-H", "hostfile"), ("-i", "include"), ("-e", "exclude"), ("-h", "help")),
        is_complete=False,
    ),
}


def meant_flag(launcher: str, flag: str, *, likeness: float | None = None) -> str | None:
    """What a flag that the launcher does not have was probably meant to be, spelled as the user spells.

    Args:
        launcher: Whose flag.
        flag: As it was typed.
        likeness: From 0 to 1, how like a name must be; None: so like that it may be written in its place.
    """
    table = TABLES[launcher]
    bare = flag.lstrip("-").replace("-", "_")
    lower = bare.lower()
    name = _MEANT.get(lower, lower)
    name = _TRANSLATED.get(launcher, {}).get(name, name)
    if name not in table.values and name not in table.switches:
        if not table.is_complete and lower.startswith(_FAMILIES):
            return None
        known = sorted(table.values | table.switches)
        near = difflib.get_close_matches(lower, known, n=1, cutoff=likeness or (0.75 if table.is_complete else 0.84))
        if not near:
            return None
        name = near[0]
    return f"--{name.replace('_', '-' if '-' in flag.lstrip('-') or '_' not in flag else '_')}"
