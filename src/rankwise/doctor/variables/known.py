"""The variables that matter for a job, by family, with one line on what each does."""

from __future__ import annotations

from typing import Final

#: Family: its prefixes. A variable is shown only if it belongs to one, or is known by its whole name.
FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "torchrun and rankwise run": ("PET_", "TORCHELASTIC_"),
    "rankwise": ("RANKWISE_",),
    "torch": ("TORCH_", "PYTORCH_"),
    "NCCL": ("NCCL_",),
    "Gloo": ("GLOO_",),
    "threads": ("OMP_", "MKL_", "OPENBLAS_", "KMP_"),
    "GPUs": ("CUDA_", "NVIDIA_VISIBLE_", "HIP_", "ROCR_"),
    "accelerate and DeepSpeed": ("ACCELERATE_", "FSDP_", "DEEPSPEED_", "DS_"),
    "network libraries": ("UCX_", "FI_"),
}

#: What tells who a process is; shown where it says something.
IDENTITY: Final[dict[str, str]] = {
    "RANK": "this process's number among all",
    "WORLD_SIZE": "how many processes the job has",
    "LOCAL_RANK": "its number among those of this host",
    "LOCAL_WORLD_SIZE": "how many processes this host has",
    "GROUP_RANK": "the number of this node",
    "GROUP_WORLD_SIZE": "how many nodes the job has",
    "ROLE_RANK": "its number among the ranks of its role",
    "ROLE_WORLD_SIZE": "how many ranks its role has",
    "ROLE_NAME": "the role of the ranks",
    "NODE_RANK": "the number of this node, for Lightning and scripts; torchrun reads PET_NODE_RANK",
    "MASTER_ADDR": "the host of the rendezvous",
    "MASTER_PORT": "the port there",
}

_PET = {
    "NNODES": "nodes of the job, N or MIN:MAX",
    "NPROC_PER_NODE": "ranks on this node: a number, gpu, cpu, xpu or auto",
    "NODE_RANK": "number of this node",
    "MASTER_ADDR": "address of node 0",
    "MASTER_PORT": "port on node 0",
    "LOCAL_ADDR": "address of this node",
    "RDZV_BACKEND": "rendezvous backend: static or c10d",
    "RDZV_ENDPOINT": "rendezvous endpoint, host:port",
    "RDZV_ID": "name of the job, the same on all nodes",
    "RDZV_CONF": "further rendezvous settings",
    "STANDALONE": "1: this node alone, on a free port",
    "MAX_RESTARTS": "how often all ranks are started again",
    "MONITOR_INTERVAL": "seconds between polls of the ranks",
    "START_METHOD": "how functions are started",
    "ROLE": "role of the ranks",
    "MODULE": "1: the script is a module",
    "NO_PYTHON": "1: the script is a program",
    "RUN_PATH": "1: the script runs by runpy",
    "LOG_DIR": "folder for the ranks' output",
    "REDIRECTS": "streams that go to files",
    "TEE": "streams that go to files and the console",
    "LOCAL_RANKS_FILTER": "ranks whose output is shown",
    "DUPLICATE_STDOUT_FILTERS": "lines of stdout that are kept apart",
    "DUPLICATE_STDERR_FILTERS": "lines of stderr that are kept apart",
    "LOGS_SPECS": "class that sets up the logs",
    "EVENT_LOG_HANDLER": "where torchrun's events go",
    "NUMA_BINDING": "binds ranks to the CPUs near their GPU",
    "SIGNALS_TO_HANDLE": "signals that are passed on to the ranks",
    "VIRTUAL_LOCAL_RANK": "1: each rank sees its own GPU as number 0",
    "SHUTDOWN_TIMEOUT": "seconds the ranks have after a signal",
}

_TORCHELASTIC = {
    "RUN_ID": "set in ranks: name of the job",
    "RESTART_COUNT": "set in ranks: how often they were started again",
    "MAX_RESTARTS": "set in ranks: how often they may be",
    "USE_AGENT_STORE": "set in ranks: whether the launcher serves the store",
    "ERROR_FILE": "set in ranks: where a failure is written",
    "SIGNALS_TO_HANDLE": "set in ranks: signals that are passed on",
    "ENABLE_FILE_TIMER": "1: watches ranks by a file of timers",
    "TIMER_FILE": "the file of timers",
    "HEALTH_CHECK_PORT": "port of the launcher's health check",
    "LOG_LINE_PREFIX_TEMPLATE": "prefix of a rank's lines",
    "DEFAULT_EVENT_LOG_HANDLER": "where torchrun's events go",
}

_RANKWISE = {
    "ARRIVAL_TIMEOUT": "seconds that init() waits for the last rank",
    "CACHE_DIR": "folder for what is kept between jobs",
    "CHECK": "0: the script is not checked before it runs",
    "COLD": "1: every rank is a fresh interpreter",
    "DEADLINE": "when the job's time ends, in seconds since the epoch",
    "DIGESTS": "0: replicas are not compared while they train",
    "DOCTOR": "0: the launcher does not ask the doctor",
    "EVIDENCE": "folder for what is recorded of a hang",
    "HANDSHAKE": "lenient: ranks of other versions or code are a warning",
    "MEMORY": "folder of the job in the host's memory",
    "ON_HANG": "what the launcher does at a hang",
    "PRELOAD": "modules that are imported before the ranks are forked",
    "WATCH": "0: collectives are not recorded; dispatcher: those of C++ as well",
    "CALL": "set by the launcher for its ranks",
    "EMPTY_PYTHONPATH": "set by the launcher for its ranks",
    "LIFELINE": "set by the launcher for its ranks",
    "LOADING": "set by the launcher for its ranks",
    "RANK": "set by the launcher for its ranks",
    "WARM": "set by the launcher for its ranks",
}

_TORCH = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO or DETAIL: checks and logs collectives, and slows them",
    "TORCH_CPP_LOG_LEVEL": "how much torch's C++ side logs",
    "TORCH_SHOW_CPP_STACKTRACES": "1: errors show C++ stacks",
    "TORCH_GLOO_LAZY_INIT": "1: Gloo connects ranks when they first talk",
    "TORCH_FR_BUFFER_SIZE": "entries of the flight recorder",
    "TORCH_FR_DUMP_TEMP_FILE": "where its dumps go",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what ends a rank whose collective fails or takes too long",
    "TORCH_NCCL_BLOCKING_WAIT": "1: a wait raises when the time is over",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "entries of the flight recorder; 0: it is off",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "where its dumps go",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1: a timeout writes a dump",
    "TORCH_NCCL_DESYNC_DEBUG": "1: a timeout shows which rank was elsewhere",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "seconds until a stuck watchdog ends the rank",
    "TORCH_NCCL_ENABLE_MONITORING": "0: a stuck watchdog is left alone",
    "TORCH_NCCL_ENABLE_TIMING": "1: collectives are timed",
    "TORCH_NCCL_HIGH_PRIORITY": "1: collectives run on a stream of high priority",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1: less memory is held by collectives",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1: communicators are made without waiting",
    "TORCH_HOME": "folder for downloaded models",
    "TORCH_EXTENSIONS_DIR": "folder for compiled extensions",
    "TORCH_CUDA_ARCH_LIST": "GPUs that extensions are compiled for",
    "TORCH_LOGS": "what the compiler logs",
    "TORCH_COMPILE_DISABLE": "1: torch.compile does nothing",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1: torch.load takes tensors only",
    "PYTORCH_CUDA_ALLOC_CONF": "how GPU memory is split and kept",
    "PYTORCH_ALLOC_CONF": "how GPU memory is split and kept",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1: GPU memory is not kept for reuse",
}

_GLOO = {
    "GLOO_SOCKET_IFNAME": "interface that Gloo uses, by its exact name",
    "GLOO_DEVICE_TRANSPORT": "TCP, TCP_TLS or UV",
    "GLOO_LOG_LEVEL": "how much Gloo logs",
    "GLOO_DISABLE_CONNECTION_RETRIES": "1: a connection that fails is not tried again",
    "GLOO_ENABLE_STORE_V2_API": "1: fewer calls of the store",
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "how connections are numbered",
}

_THREADS_AND_GPUS = {
    "OMP_NUM_THREADS": "CPU threads of each rank; launchers set 1 if it is not set",
    "OMP_PROC_BIND": "whether threads stay on their cores",
    "OMP_PLACES": "which cores threads may take",
    "OMP_SCHEDULE": "how loops are divided among threads",
    "OMP_DYNAMIC": "whether the number of threads may vary",
    "OMP_WAIT_POLICY": "whether waiting threads spin",
    "OMP_STACKSIZE": "stack of each thread",
    "MKL_NUM_THREADS": "CPU threads of MKL",
    "MKL_DYNAMIC": "whether MKL may take fewer threads",
    "OPENBLAS_NUM_THREADS": "CPU threads of OpenBLAS",
    "KMP_AFFINITY": "which cores Intel's threads take",
    "KMP_BLOCKTIME": "how long Intel's threads spin",
    "CUDA_VISIBLE_DEVICES": "GPUs that processes see, in this order",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID: GPUs are numbered as nvidia-smi does",
    "CUDA_LAUNCH_BLOCKING": "1: each kernel is waited for; slow",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues; 1 orders kernels as they were issued",
    "CUDA_MODULE_LOADING": "LAZY: kernels are loaded when first used",
    "CUDA_HOME": "where the CUDA toolkit is",
    "CUDA_PATH": "where the CUDA toolkit is",
    "CUDA_CACHE_PATH": "folder for compiled kernels",
    "CUDA_CACHE_DISABLE": "1: compiled kernels are not kept",
    "CUDA_MPS_PIPE_DIRECTORY": "where the server is that shares a GPU",
    "NVIDIA_VISIBLE_DEVICES": "GPUs that the container sees",
    "HIP_VISIBLE_DEVICES": "GPUs that processes see (ROCm)",
    "ROCR_VISIBLE_DEVICES": "GPUs that processes see (ROCm)",
}

_ACCELERATE = {
    "ACCELERATE_USE_CPU": "true: no GPU is used",
    "ACCELERATE_USE_FSDP": "true: accelerate shards the model with FSDP",
    "ACCELERATE_USE_DEEPSPEED": "true: accelerate uses DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "true: accelerate uses Megatron-LM",
    "ACCELERATE_MIXED_PRECISION": "no, fp16, bf16 or fp8",
    "ACCELERATE_DYNAMO_BACKEND": "compiler that accelerate uses",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "steps whose gradients are added up",
    "ACCELERATE_DEBUG_MODE": "1: shapes are checked before collectives",
    "ACCELERATE_TORCH_DEVICE": "device that accelerate takes",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "what DeepSpeed shards",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "DeepSpeed's configuration",
    "FSDP_SHARDING_STRATEGY": "what FSDP shards",
    "FSDP_VERSION": "1 or 2",
    "FSDP_AUTO_WRAP_POLICY": "which modules FSDP wraps",
    "FSDP_OFFLOAD_PARAMS": "true: parameters wait in CPU memory",
    "FSDP_STATE_DICT_TYPE": "how checkpoints are written",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true: only rank 0 loads the weights",
    "FSDP_SYNC_MODULE_STATES": "true: rank 0's weights are sent to all",
}

_NETWORK = {
    "UCX_TLS": "transports that UCX may use",
    "UCX_NET_DEVICES": "devices that UCX may use",
    "FI_PROVIDER": "network of libfabric: efa, tcp, verbs",
    "FI_EFA_USE_DEVICE_RDMA": "1: RDMA on EFA",
    "FI_EFA_FORK_SAFE": "1: workers may be forked beside EFA",
}

_NCCL = {
    "NCCL_SOCKET_IFNAME": "interfaces that NCCL uses, by the beginning of their names; =name exactly, ^name all others",
    "NCCL_SOCKET_FAMILY": "AF_INET or AF_INET6",
    "NCCL_DEBUG": "how much NCCL logs: WARN, INFO, TRACE",
    "NCCL_DEBUG_SUBSYS": "what it logs of: INIT, NET, GRAPH",
    "NCCL_DEBUG_FILE": "where it logs to",
    "NCCL_IB_HCA": "InfiniBand or RoCE cards that NCCL uses",
    "NCCL_IB_DISABLE": "1: no InfiniBand or RoCE, sockets instead; slow",
    "NCCL_IB_GID_INDEX": "address of the card on RoCE",
    "NCCL_IB_TIMEOUT": "how long a card waits for an answer",
    "NCCL_IB_RETRY_CNT": "how often it tries again",
    "NCCL_IB_TC": "traffic class",
    "NCCL_IB_SL": "service level",
    "NCCL_IB_PKEY": "partition of the InfiniBand network",
    "NCCL_NET": "name of the network plugin to use",
    "NCCL_NET_PLUGIN": "library of the network plugin",
    "NCCL_NET_GDR_LEVEL": "how far card and GPU may be apart to talk directly",
    "NCCL_P2P_DISABLE": "1: GPUs of a host do not talk directly; slow",
    "NCCL_P2P_LEVEL": "how far GPUs may be apart to talk directly",
    "NCCL_SHM_DISABLE": "1: /dev/shm is not used; slow",
    "NCCL_CUMEM_ENABLE": "1: memory that other processes can map",
    "NCCL_CUMEM_HOST_ENABLE": "1: the same for CPU memory, instead of /dev/shm",
    "NCCL_ALGO": "algorithms that NCCL may choose",
    "NCCL_PROTO": "protocols that NCCL may choose",
    "NCCL_BUFFSIZE": "bytes of each buffer",
    "NCCL_NTHREADS": "GPU threads of each block",
    "NCCL_MIN_NCHANNELS": "fewest channels",
    "NCCL_MAX_NCHANNELS": "most channels",
    "NCCL_CROSS_NIC": "whether a ring may change cards between hosts",
    "NCCL_TOPO_FILE": "file with the host's topology",
    "NCCL_TOPO_DUMP_FILE": "where the topology is written",
    "NCCL_COMM_ID": "host:port where ranks connect without a store",
    "NCCL_CONF_FILE": "file with such settings",
    "NCCL_HOSTID": "what identifies a host",
    "NCCL_NVLS_ENABLE": "1: sums in the NVLink switch",
    "NCCL_COLLNET_ENABLE": "1: sums in the network switch",
    "NCCL_IGNORE_CPU_AFFINITY": "1: the process's CPUs do not bind NCCL's threads",
    "NCCL_LAUNCH_MODE": "how kernels of several GPUs are started",
    "NCCL_BLOCKING_WAIT": "old name of TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_VERSION": "version in the image; NCCL does not read it",
}

#: What each known variable does.
KNOWN: Final[dict[str, str]] = {
    **IDENTITY, **{f"PET_{name}": line for name, line in _PET.items()}, **{f"TORCHELASTIC_{name}": line for name, line in _TORCHELASTIC.items()},
    **{f"RANKWISE_{name}": line for name, line in _RANKWISE.items()}, **_TORCH, **_NCCL, **_GLOO, **_THREADS_AND_GPUS, **_ACCELERATE, **_NETWORK,
}  # fmt: skip

#: What launchers and clusters tell; shown as it was read, without a family of its own.
TOLD_BY_LAUNCHERS: Final[tuple[str, ...]] = (
    "TF_CONFIG", "SM_HOSTS", "SM_CURRENT_HOST", "SM_RESOURCE_CONFIG", "SM_NUM_GPUS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE",
    "SKYPILOT_TASK_ID", "JOB_COMPLETION_INDEX", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES",
    "PALS_APID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID",
)  # fmt: skip


def find_family(name: str) -> str:
    """Return the family of a variable; empty if it belongs to none, and is not to be shown."""
    if name in IDENTITY:
        return "who this process is"
    if name in TOLD_BY_LAUNCHERS:
        return "set by launchers"
    return next((family for family, prefixes in FAMILIES.items() if name.startswith(prefixes)), "")
