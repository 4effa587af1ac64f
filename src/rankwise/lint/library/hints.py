"""What names tell where the text that would tell more is not at hand: `args.local_rank`, `is_main_process()`."""

from __future__ import annotations

import re
from functools import lru_cache

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
           "SLURM_GPUS_ON_NODE": "local_world_size", "SLURM_NTASKS_PER_NODE": "local_world_size",
           "GROUP_RANK": "node_rank", "NODE_RANK": "node_rank", "SLURM_NODEID": "node_rank"}  # fmt: skip
#: Set by torchrun; the others may be absent.
TORCHRUN = frozenset(
    """RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT ROLE_RANK ROLE_WORLD_SIZE
    TORCHELASTIC_RUN_ID""".split()  # noqa: SIM905
)
#: Words for the first of several, those of them that need no word for a process, and what else such a name has.
_MAIN = frozenset({"main", "master", "chief"})
_FIRST = _MAIN | {"zero", "primary", "first", "lead", "root", "writer"}
_PROCESS = frozenset({"process", "proc", "rank", "worker", "node", "gpu", "global", "world"})
#: What runs, and what a zero counts beside that.
_RUNS = frozenset({"process", "proc", "worker"})
_ZERO = _RUNS | {"rank", "global", "world"}
_BESIDE = frozenset({"is", "am", "i", "on", "run", "only", "local"})
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


@lru_cache(maxsize=20_000)
def main_of(path: str) -> str | None:
    """``rank`` or ``local_rank`` if the name asks whether this is the first process of all, or of its node."""
    *before, last = words = _words_of(path)
    if words[0] in {"is", "am", "on"}:
        # The root of a tree is no process, nor is the first node of a graph.
        first = _ZERO if "zero" in words else _RUNS | {"rank"}
        is_main = not _MAIN.isdisjoint(words) or not (_FIRST.isdisjoint(words) or first.isdisjoint(words))
    else:
        # `main_gpu` is a number, and `main_process_rank` is another's.
        is_main = last in _RUNS | {"zero"} and not (_MAIN | {"zero", "primary"}).isdisjoint(words)
        is_main = is_main and not _ZERO.isdisjoint(words) and {"node", "gpu"}.isdisjoint(words)
    return _whose(words) if is_main and "only" not in before else None


def only_of(path: str) -> str | None:
    """As `main_of`, for a decorator that runs its function on the first process only."""
    words = _words_of(path)
    is_only = not (_MAIN | {"zero"}).isdisjoint(words) and not {"only", "on"}.isdisjoint(words)
    return _whose(words) if is_only or words == ["rank", "zero"] else None


def _words_of(path: str) -> list[str]:
    """The words of a name; one empty word if any of them has nothing to do with the first process."""
    last = path.rpartition(".")[2].removesuffix("()").lower().lstrip("_")
    words = re.sub(r"rank_?(zero|0)", "rank_zero", last).split("_")
    return words if set(words) <= _FIRST | _PROCESS | _BESIDE else [""]


def _whose(words: list[str]) -> str:
    return "local_rank" if "local" in words else "rank"


def is_same_for_all(path: str) -> bool:
    """Whether a name says that its value was agreed by all ranks."""
    return _SAME.fullmatch(path.rpartition(".")[2].lower().lstrip("_")) is not None
