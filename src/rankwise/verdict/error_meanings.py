"""What error texts mean: whose fault they tell of, the failure class, and what to do.

One line a text, first match wins. The texts are torch's, Gloo's, NCCL's and Python's own.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rankwise.base.similar_paths import find_near

#: ``own``: the rank that says it is to blame. ``peer``: it only lost another rank. ``timeout``: it waited in
#: vain for others. ``mismatch``: the ranks' collectives do not correspond.
Blame = Literal["own", "peer", "timeout", "mismatch"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a text stands for."""

    pattern: re.Pattern[str]
    blame: Blame
    class_id: str | None
    #: None where the text itself tells it.
    fix: str | None


def _meaning(blame: Blame, class_id: str | None, pattern: str, fix: str | None) -> Meaning:
    return Meaning(re.compile(pattern, re.DOTALL), blame, class_id, fix)


def _own(blame: Blame, class_id: str | None, pattern: str) -> Meaning:
    """Return the meaning of an error of ours: the text itself says what to do."""
    return Meaning(re.compile(rf"rankwise\.\w+Error: [^\n]{{0,600}}?(?:{pattern})"), blame, class_id, None)


_HINT = re.compile(r"\Arankwise\..*?\n  -> (?P<hint>[^\n]+)", re.DOTALL)

#: The error itself, not one that it was raised in answer to.
_FILE = re.compile(
    r"FileNotFoundError: \[Errno 2\] [^:\n]+: '(?P<path>[^'\n]+)'|ModuleNotFoundError: No module named '(?P<module>\w+)'|FileExistsError: \[Errno 17\]"
)

MEANINGS: tuple[Meaning, ...] = (
    # Our own, which bring their remedy with them.
    _own("timeout", "I1", r"after [\d.]+ s ranks? (?P<missing>[\d, -]+) of \d+ ha(?:s|ve) not arrived"),
    _own("timeout", None, r"after [\d.]+ s not entered by ranks? (?P<missing>\d[\d, -]*)"),
    _own("timeout", None, r"main_first: rank (?P<missing>\d+) had not finished"),
    _own("timeout", None, r"the store at .{0,200}?(did not answer|and then nothing)|not all connect(ed)? "),
    _own("peer", None, r"main_first: rank \d+ failed in the block|a peer left while this rank waited for it|left before all had joined"
         r"|the store at .{0,200}? failed: "),
    _own("own", "I12", r"the ranks disagree about the world size|is \d+ in the call and \d+ in "),
    _own("own", "I10", r"processes claim rank \d+"),
    _own("own", "I11", r"the ranks of a world of \d+ are 0 to"),
    _own("own", "R13", r"use the same GPU"),
    _own("own", "R11", r"the ranks have different versions of"),
    _own("own", "X19", r"is not the same file on all ranks"),
    _own("own", "I5", r"resolve their own names to loopback addresses"),
    _own("own", "I13", r"holds the traces of another run"),
    _own("own", "I3", r"of the store has no address here"),
    _own("own", "I2", r"was not found at \S+"),
    _own("own", "I9", r"can't serve the store at .{0,200}?is taken by"),
    _own("own", "I6", r"GLOO_SOCKET_IFNAME=.{0,100}?has no interface"),
    _own("own", "I16", r"this process has already joined a job"),
    # The ranks do not do the same thing.
    _meaning("mismatch", "C8", r"Detected mismatch between collectives.{0,200}?OpType=(\w+)\b.{0,600}?OpType=(?!\1\b)\w+",
             "make the same calls in the same order on all ranks: look at the branches before this line"),
    _meaning("mismatch", "C5", r"Detected mismatch between collectives",
             "give the tensor the same shape on all ranks, or gather the lengths first and pad"),
    _meaning("mismatch", "C5", r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size",
             "all ranks must pass the same shapes in the same order: compare the tensors at this line on every rank"),
    _meaning("mismatch", "C5", r"inLengthPerRank\[myRank\] == outLengthPerRank\[myRank\]",
             "a rank must send itself as much as it expects from itself: compare its own entry in input_split_sizes and output_split_sizes"),
    _meaning("own", "D12", r"DDP expects same model across all ranks.{0,200}?inconsistent [1-9]\d{0,6} params|appears not to match (sizes|strides) of the same param",
             "build the same model on all ranks: same configuration, same order of layers, nothing that depends on the rank"),
    # A rank that only lost another. Python's own ConnectionResetError and BrokenPipeError are not among them: those
    # come from servers and pipes of the script's own.
    _meaning("peer", None, r"successfully reached monitoredBarrier, but received errors while waiting", ""),
    _meaning("peer", None, r"pair\.cc:\d+\].{0,200}?(by peer|Read error|Write error|Broken pipe)|Application timeout caused pair closure"
             r"|connectFullMesh failed", ""),
    _meaning("peer", None, r"Dist(Network|Store|Backend)?Error: .{0,300}?(Broken pipe|[Cc]onnection (was )?(closed|reset)"
             r"|[Ff]ailed to recv|(recv|send)Bytes|[Ss]ocket closed)", ""),
    _meaning("peer", None, r"RuntimeError: (Connection (closed|reset) by peer|Broken pipe|Socket closed|(recv|send)Bytes)", ""),
    _meaning("peer", None, r"socketPollConnect|socketStartConnect|ncclSystemError.{0,300}?(refused|reset|closed)", ""),
    _meaning("peer", None, r"remote process exited|ncclRemoteError", ""),
    # A count of 0, or one that can't be: the peer's value never came.
    _meaning("peer", None, r"DDP expects same model across all ranks.{0,200}?inconsistent (0|\d{8,}) params", ""),
    # A rank that waited in vain.
    _meaning("timeout", "R10", r"Ranks? (?P<missing>\d+(?:, ?\d+)*) failed to pass monitoredBarrier",
             "look at what the named ranks do instead of reaching this barrier"),
    _meaning("timeout", None, r"wait timeout after \d+ms, keys: \S*/(?P<missing>\d+)(?=\s|$)",
             "the named rank never reached init_process_group: look at where it is, and at what changes RANK, WORLD_SIZE or MASTER_PORT"),
    _meaning("timeout", None, r"Timed out waiting \d+ms for (recv|send)|Timed out after \d+ seconds waiting for clients"
             r"|Watchdog caught collective operation timeout|Socket Timeout|Timeout waiting for key|RendezvousTimeout",
             "look at what the ranks that did not fail were doing; a longer timeout= helps only a rank that is slow"),
    # Rendezvous and initialisation.
    _meaning("own", "I2", r"client socket has (timed out|failed).{0,200}?while trying to connect to|The client socket has failed to connect",
             "nothing listens at that address: don't set MASTER_ADDR or MASTER_PORT in the script, the launcher has set them"),
    _meaning("own", "I9", r"EADDRINUSE|[Aa]ddress already in use",
             "remove the fixed port from the script: the launcher picked a free one and set MASTER_PORT; only rank 0 listens there: pass no rank=, or int(os.environ['RANK'])"),
    _meaning("own", "I13", r"file:// rendezvous: path missing",
             "an absolute path is needed (file:///…), new for each run; under a launcher init_method is best left out"),
    _meaning("own", "I14", r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set|KeyError: '(LOCAL_RANK|RANK|WORLD_SIZE)'",
             "the launcher sets these variables: don't remove them, and start the script with `rankwise run`"),
    _meaning("own", "L12", r"`(rank|world_size)` must be an integer\. None",
             "pass no rank= and no world_size= to init_process_group: an option that nobody gives is None, and the launcher has set RANK and WORLD_SIZE"),
    _meaning("own", "I15", r"[Dd]efault process group has not been initialized",
             "call torch.distributed.init_process_group() before this line, on all ranks"),
    _meaning("own", "I16", r"trying to initialize the default process group twice",
             "guard with `if not torch.distributed.is_initialized():`, or leave it to the framework"),
    _meaning("own", "I17", r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs|no GPUs found",
             "use backend='gloo' on CPU, or leave the backend out and let torch choose"),
    _meaning("own", "I18", r"use_libuv was requested but PyTorch was build without libuv", "set USE_LIBUV=0"),
    _meaning("own", "I19", r"Expected timeout argument to be of type datetime\.timedelta",
             "pass a datetime.timedelta, as in timeout=timedelta(minutes=5)"),
    _meaning("own", "I6", r"Unable to find address for: ",
             "set GLOO_SOCKET_IFNAME to one name that `ip link` shows; Gloo knows no '^' exclusions"),
    _meaning("own", "I22", r"ss1\.ss_family == ss2\.ss_family",
             "Gloo listens on IPv6 on some hosts and on IPv4 on others: set GLOO_SOCKET_IFNAME to the interface that connects them, on each host"),
    # Launch command.
    _meaning("own", "L1", r"unrecognized arguments: --local[-_]rank",
             "read LOCAL_RANK from the environment instead of parsing --local_rank"),
    _meaning("own", "R13", r"Duplicate GPU detected|ncclInvalidUsage",
             "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before any use of CUDA"),
    _meaning("own", "R14", r"invalid device ordinal",
             "take the device from LOCAL_RANK, not from RANK, and start no more ranks than there are GPUs"),
    # Collectives.
    _meaning("own", "C11", r"Global rank \d+ is not part of group", "src and dst are global ranks, and must be in the group"),
    _meaning("own", None, r"Pair is not connected \([^)]{0,80}\[none\]\)",
             "a rank has no connection to itself: correct the dst= or src= of this line, global ranks both"),
    _meaning("own", "C17", r"No backend type associated with device type|Tensors must be CUDA and dense",
             "move the tensor to the GPU, or initialize with backend='cpu:gloo,cuda:nccl'"),
    _meaning("own", "C18", r"Expected parameter `?tensor`? (of|to be of) type torch\.Tensor", "wrap the number: torch.tensor(value)"),
    _meaning("own", None, r"Must specify global_rank or group_rank", "name the rank that gives, or that gets the result: src= or dst="),
    _meaning("own", "C19", r"(gather_list|scatter_list)\S* must (NOT )?be specified on",
             "pass the list on the root rank only, and None on all others"),
    # DDP and the wrappers.
    _meaning("own", "D1", r"Expected to have finished reduction in the prior iteration",
             "use every trainable parameter and every output in the loss, or wrap with find_unused_parameters=True"),
    _meaning("own", "D4", r"mark a variable ready only once",
             "use checkpoint(…, use_reentrant=False), and don't share a parameter between two forward passes of one step"),
    _meaning("own", "D6", r"graph has changed in this iteration", "wrap without static_graph=True"),
    _meaning("own", "D11", r"module doesn't have any parameter that requires a gradient",
             "leave this module unwrapped: it has nothing to train"),
    _meaning("own", None, r"FSDP needs a non-CPU accelerator",
             "start it where torch sees a GPU (`rankwise doctor` shows what it sees); on the CPU fully_shard and rankwise.apply_fsdp shard, too"),
    _meaning("own", None, r"Cannot access accelerator device when none|not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available",
             "start it where torch sees a GPU (`rankwise doctor` shows what it sees), or use device and backend of the CPU"),
    _meaning("own", "D20", r"SyncBatchNorm layers only work with GPU modules",
             "convert to SyncBatchNorm only when the model is on a GPU"),
    _meaning("own", "D27", r"device_ids and output_device arguments only work with",
             "leave device_ids out for a model on the CPU"),
    _meaning("own", "X2", r"sampler option is mutually exclusive with shuffle",
             "remove shuffle=True from the loader: DistributedSampler(shuffle=True) shuffles"),
    _meaning("own", "K4", r"Error\(s\) in loading state_dict.{0,19000}?Unexpected key\(s\) in state_dict: \"module\.",
             "save model.module.state_dict(), or strip the prefix 'module.' from the keys"),
    _meaning("own", "L13", r"Can't pickle .{0,200}?lambda|finished its bootstrapping phase",
             "pass mp.spawn a function at the module's top level, and guard the start with `if __name__ == '__main__':`"),
    # The machine.
    _meaning("own", "X16", r"killed by signal: Bus error|unable to (open|write to|allocate) (shared memory|file </torch_)",
             "enlarge /dev/shm (docker run --shm-size=8g), or use fewer loader workers"),
    _meaning("own", "R3", r"DataLoader worker \(pid.{0,40}?is killed by signal: (?!Bus)",
             "a loader worker died, and the line above is only where its rank noticed: if it was killed, usually for lack of memory, use fewer workers or smaller batches"),
    _meaning("own", None, r"\[Errno (28|122)\] ",
             "for a file, its disk or a quota is full: look at that folder with `df -h` and `df -i`, delete old checkpoints, or write elsewhere; "
             "for a lock or a queue of multiprocessing it is /dev/shm"),
    _meaning("own", None, r"PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos|basic_ios::clear: iostream error",
             "the file was not written to its end, most often because its disk or a quota is full: look at that folder with `df -h` and `df -i`; delete old checkpoints, or write elsewhere"),
    _meaning("own", None, r"device-side assert triggered|cudaErrorAssert",
             "the cause is an earlier line than this one, usually an index, label or token out of range: CUDA_LAUNCH_BLOCKING=1 names it, and so does a run on the CPU"),
    _meaning("own", None, r"\bModuleNotFoundError: No module named",
             "install it in the Python of the ranks (`rankwise doctor --only interpreter` names it), or choose another Python by PYTHON_EXEC; "
             "a module of your own must be beside the script or on PYTHONPATH; a part of torch that is missing was moved or removed in this version"),
    _meaning("own", None, r"CUDA out of memory|OutOfMemoryError", "use a smaller batch, gradient accumulation, or activation checkpointing"),
    _meaning("own", None, r"(?<!\w)(_Array)?MemoryError(?=:|\s*\Z|\n)|DefaultCPUAllocator: (can't allocate|not enough) memory|\[Errno 12\] Cannot allocate",
             "the host's memory is what lacks: all ranks of it share that with their loader workers, so start fewer of either, or let each load less at once; where the size it asks for is absurd, look at how it is computed"),
)  # fmt: skip


def find_meaning(text: str) -> Meaning | None:
    """Return what an error text means, as far as it is known."""
    return next((meaning for meaning in MEANINGS if meaning.pattern.search(text)), None)


def find_missing(text: str) -> tuple[int, ...]:
    """Return the ranks that a timeout names as absent."""
    meaning = find_meaning(text)
    if meaning is None or meaning.blame != "timeout":
        return ()
    found = meaning.pattern.search(text)
    named = found.groupdict().get("missing") if found else None
    runs = re.findall(r"(\d+)(?:-(\d+))?", named or "")
    return tuple(rank for first, last in runs for rank in range(int(first), int(last or first) + 1))


def find_fix(text: str, meaning: Meaning | None) -> str:
    """Return what to do about an error: what ours says after an arrow, else what is known of its text."""
    own = _HINT.match(text)
    if own:
        return own["hint"]
    return (meaning.fix or "") if meaning else ""


def find_file_fix(line: str, where: str, *, is_on_all: bool) -> str:
    """Return what to do about a file or a module that is not there, or there already; empty if that is not the error.

    Args:
        line: The error's own line.
        where: The line of the script that raised it, as FILE:LINE.
        is_on_all: Whether all ranks failed with it: then the file may be there by another name.
    """
    found = _FILE.match(line)
    if found is None:
        return ""
    if found.lastgroup is None:
        return "another rank, or an earlier run, has made it: pass exist_ok=True, or let only rank 0 make it, with a barrier after that for all"
    script, module = Path(where.rpartition(":")[0]), found["module"]
    if is_on_all:
        path = script.with_name(f"{module}.py") if module else Path(found["path"])
        with suppress(OSError):
            near = find_near(path)
            if near not in {None, path, script}:
                return f"{near} is there: if it is what was meant, correct the name"
    if module:
        return ""  # what is known of the text says it
    if is_on_all:
        return "correct the path; a relative one starts in the folder of the launch; a command has to be installed, on PATH"
    return "it was not there yet, or not any more, or is not on this host: let one rank write or remove it where all can read it, with a barrier for all ranks between that and their reading"
