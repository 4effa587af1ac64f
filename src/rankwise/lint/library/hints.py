"""What names tell where the text that would tell more is not at hand: `args.local_rank`, `is_main_process()`."""

from __future__ import annotations

import re

RANKS = {
    **dict.fromkeys(
        ("rank", "global_rank", "world_rank", "my_rank", "rank_id", "proc_rank", "process_rank", "dist_rank",
         "process_index", "ddp_rank", "rank_idx", "mp_rank_global", "node_global_rank", "ddp_global_rank"), "rank"),
    **dict.fromkeys(
        ("local_rank", "local_process_index", "localrank", "ddp_local_rank", "local_rank_id", "lrank"),
        "local_rank"),
    **dict.fromkeys(("world_size", "num_processes", "worldsize", "nprocs", "n_procs", "ddp_world_size", "num_replicas",
                     "n_ranks", "num_ranks"), "world_size"),
    **dict.fromkeys(("node_rank", "group_rank", "machine_rank"), "node_rank"),
    **dict.fromkeys(("local_world_size", "local_size"), "local_world_size"),
}  # fmt: skip
#: Environment variables by what they hold.
ENVIRON = {"RANK": "rank", "SLURM_PROCID": "rank", "OMPI_COMM_WORLD_RANK": "rank", "PMI_RANK": "rank", "PMIX_RANK": "rank",
           "MV2_COMM_WORLD_RANK": "rank", "LOCAL_RANK": "local_rank", "SLURM_LOCALID": "local_rank", "OMPI_COMM_WORLD_LOCAL_RANK": "local_rank",
           "MPI_LOCALRANKID": "local_rank", "MV2_COMM_WORLD_LOCAL_RANK": "local_rank", "WORLD_SIZE": "world_size", "SLURM_NTASKS": "world_size",
           "SLURM_NPROCS": "world_size", "OMPI_COMM_WORLD_SIZE": "world_size", "PMI_SIZE": "world_size", "LOCAL_WORLD_SIZE": "local_world_size",
           "GROUP_RANK": "node_rank", "NODE_RANK": "node_rank", "SLURM_NODEID": "node_rank"}  # fmt: skip
#: Set by torchrun; the others may be absent.
TORCHRUN = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
    }
)
_MAIN = re.compile(
    r"(is_|am_i_|on_)?(main|master|global_zero|rank_?(zero|0)|primary|chief|first|lead|root|local_main|global_main|world_master"
    r"|world_main)_?(process|proc|rank|worker|node|gpu|thread)?(_only|_first)?"
)
_IS_MAIN = re.compile(
    r"(is|am_i|on)_.*|.*(main|master|zero|chief|primary|rank_?0).*(process|proc|rank|worker)|is_?main|is_?master"
    r"|rank_?(zero|0)|master_process|main_process"
)
_ONLY = re.compile(
    r"(rank_?(zero|0)|main(_process)?|master(_process)?|local_main_process|global_zero)_only"
    r"|on_(local_)?main_process|only_(on_)?(rank_?(zero|0)|main|master)(_process)?|rank_?(zero|0)|run_on_main"
)
_MAIN_NAMES = frozenset(
    {
        "is_world_process_zero",
        "is_local_process_zero",
        "is_world_zero",
        "is_process_zero",
        "is_local_master",
        "is_global_main_process",
        "is_main_local_process",
        "ismain",
        "is_master_rank",
        "is_writer_rank",
    }
)
_SAME = re.compile(
    r"(all_?reduce|reduce|all_?gather|gather|sync(hroni[sz]e)?|broadcast|bcast|agree)(_.*|d)?|.*_(all_?reduce|reduced?|"
    r"gathered|synced|broadcast)|global_.*|any_rank.*|all_ranks.*"
)


def role_of(path: str) -> str | None:
    """``rank``, ``local_rank``, ``world_size``, ``node_rank`` by the last word of a name, or None."""
    last = path.rpartition(".")[2].removesuffix("()").lower()
    for front in ("get_", "_"):
        last = last.removeprefix(front)
    return RANKS.get(last)


def main_of(path: str) -> str | None:
    """``rank`` or ``local_rank`` if the name asks whether this is the first process of all, or of its node."""
    last = path.rpartition(".")[2].removesuffix("()").lower().lstrip("_")
    if last in _MAIN_NAMES:
        return "local_rank" if "local" in last else "rank"
    if last in {
        "is_first",
        "is_root",
        "main",
        "master",
        "is_lead",
        "is_primary",
        "first",
        "root",
        "primary",
    } or not (_MAIN.fullmatch(last) and _IS_MAIN.fullmatch(last)):
        return None
    return "local_rank" if "local" in last else "rank"


def only_of(path: str) -> str | None:
    """As `main_of`, for a decorator that runs its function on the first process only."""
    last = path.rpartition(".")[2].lower().lstrip("_")
    return ("local_rank" if "local" in last else "rank") if _ONLY.fullmatch(last) else None


def is_same_for_all(path: str) -> bool:
    """Whether a name says that its value was agreed by all ranks."""
    return _SAME.fullmatch(path.rpartition(".")[2].lower().lstrip("_")) is not None
