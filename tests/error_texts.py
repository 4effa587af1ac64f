"""Error texts as torch, Gloo, NCCL, Python and rankwise have printed them: the tests of their meanings, and docs/reference/errors.md, are made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.verdict.error_meanings import Blame

#: Text, whose fault it tells of, failure class. Blame None: not known, so the rank's own.
REAL: list[tuple[str, Blame | None, str | None]] = [
    # Rendezvous and initialisation.
    ("torch.distributed.DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//cpu//0/1", "timeout", None),
    ("DistStoreError: Timed out after 5 seconds waiting for clients. 2/3 clients joined.", "timeout", None),
    ("torch.distributed.DistNetworkError: The client socket has timed out after 4000ms while trying to connect to (node-that-does-not-exist, 29500).", "own", "I2"),
    ("DistNetworkError: The server socket has failed to listen on any local network address. port: 29555, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", "own", "I9"),
    ("RuntimeError: Address already in use", "own", "I9"),
    ("ValueError: Error initializing torch.distributed using file:// rendezvous: path missing", "own", "I13"),
    ("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set", "own", "I14"),
    ("KeyError: 'LOCAL_RANK'", "own", "I14"),
    ("RuntimeError: `rank` must be an integer. None", "own", "L12"),
    ("ValueError: Default process group has not been initialized, please make sure to call init_process_group.", "own", "I15"),
    ("RuntimeError: Default process group has not been initialized, please make sure to call init_process_group.", "own", "I15"),
    ("ValueError: trying to initialize the default process group twice!", "own", "I16"),
    ("RuntimeError: Distributed package doesn't have NCCL built in", "own", "I17"),
    ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "own", "I17"),
    ("RuntimeError: use_libuv was requested but PyTorch was build without libuv support", "own", "I18"),
    ("TypeError: Expected timeout argument to be of type datetime.timedelta, got 10", "own", "I19"),
    ("RuntimeError: [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:285] ss1.ss_family == ss2.ss_family. 10 vs 2", "own", "I22"),
    ("RuntimeError: [enforce fail at [device.cc:84] ifa != nullptr. Unable to find address for: eth9", "own", "I6"),
    ("RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ^lo", "own", "I6"),
    # Launch command.
    ("train.py: error: unrecognized arguments: --local-rank=0", "own", "L1"),
    ("RuntimeError: CUDA error: invalid device ordinal", "own", "R14"),
    ("_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: attribute lookup <lambda> on __main__ failed", "own", "L13"),
    ("RuntimeError: \n        An attempt has been made to start a new process before the\n        current process has finished its bootstrapping phase.", "own", "L13"),
    # Collectives.
    ("  what():  [enforce fail at [pair.cc:456] op.preamble.length <= op.nbytes. 52 vs 4. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?", "mismatch", "C5"),
    ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu)), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[8], TensorDtypes=Float).", "mismatch", "C5"),
    ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[2], TensorDtypes=Float), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=BROADCAST, TensorShape=[2]).", "mismatch", "C8"),
    ("ValueError: Global rank 0 is not part of group <torch.distributed.distributed_c10d.ProcessGroup object at 0x7f>", "own", "C11"),
    ("RuntimeError: [enforce fail at alltoallv.cc:138] inLengthPerRank[myRank] == outLengthPerRank[myRank]. 4 vs 8. ", "mismatch", "C5"),
    ("RuntimeError: No backend type associated with device type cpu", "own", "C17"),
    ("RuntimeError: Tensors must be CUDA and dense", "own", "C17"),
    ("TypeError: Invalid function argument. Expected parameter `tensor` of type torch.Tensor\n             but got <class 'float'> instead.", "own", "C18"),
    ("ValueError: Argument ``gather_list`` must NOT be specified on non-destination ranks.", "own", "C19"),
    ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", None, None),
    # Wrappers.
    ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.", "own", "D1"),
    ("RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function.", "own", "D4"),
    ("RuntimeError: Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then got used in the second iteration. this is not compatible with static_graph set to True.", "own", "D6"),
    ("RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.", "own", "D11"),
    ("RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent 4 params.", "own", "D12"),
    ("RuntimeError: params[0] in this process with sizes [3, 2] appears not to match sizes of the same param in process 0.", "own", "D12"),
    ("ValueError: SyncBatchNorm layers only work with GPU modules", "own", "D20"),
    ("ValueError: DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device GPU modules or CPU modules, but got device_ids [0]", "own", "D27"),
    ("ValueError: sampler option is mutually exclusive with shuffle", "own", "X2"),
    ("RuntimeError: Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: \"weight\", \"bias\". \n\tUnexpected key(s) in state_dict: \"module.weight\", \"module.bias\". ", "own", "K4"),
    ("RuntimeError: Error(s) in loading state_dict for DistributedDataParallel:\n\tMissing key(s) in state_dict: \"module.weight\", \"module.bias\". ", None, None),
    ("RuntimeError: Error(s) in loading state_dict for DistributedDataParallel:\n\tMissing key(s) in state_dict: \"module.weight\". \n\tUnexpected key(s) in state_dict: \"weight\". ", None, None),
    ("RuntimeError: FSDP needs a non-CPU accelerator device, but no accelerator device is detected.", "own", None),
    ("RuntimeError: Cannot access accelerator device when none is available.", "own", None),
    ("AssertionError: Torch not compiled with CUDA enabled", "own", None),
    ("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver", "own", None),
    ("RuntimeError: No CUDA GPUs are available", "own", None),
    ("ValueError: Must specify global_rank or group_rank", "own", None),
    ("RuntimeError: Error(s) in loading state_dict for Linear:\n\tsize mismatch for weight: copying a param with shape torch.Size([3])", None, None),
    ("FileNotFoundError: [Errno 2] No such file or directory: '_pain_ck.pt'", None, None),
    # The machine.
    ("RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.", "own", "X16"),
    ("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. ", "own", "R3"),
    ("torch.AcceleratorError: CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.", "own", None),
    ("RuntimeError: [enforce fail at pair.cc:801] state_ >= CONNECTED. 1 vs 4. Pair is not connected ([127.0.0.1]:60813$1 <--> [none])", "own", None),
    ("ModuleNotFoundError: No module named 'tqdm'", "own", None),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "own", None),
    ("torch.distributed.DistBackendError: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000", "own", "R13"),
    # Ranks that only lost another.
    ("RuntimeError: [pair.cc:537] Read error [127.0.0.1]:32967: Connection reset by peer.", "peer", None),
    ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234", "peer", None),
    ("RuntimeError: Connection reset by peer", "peer", None),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nsocketStartConnect: Connect to 10.0.0.1<45069> failed : Software caused connection abort", "peer", None),
    ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "peer", None),
    ("torch.distributed.DistNetworkError: Broken pipe", "peer", None),
    ("RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.", "peer", None),
    ("RuntimeError: DDP expects same model across all ranks, but Rank 0 has 686 params, while rank 1 has inconsistent 0 params.", "peer", None),
    ("RuntimeError: DDP expects same model across all ranks, but Rank 0 has 686 params, while rank 1 has inconsistent 1506656875 params.", "peer", None),
    ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:144] Gloo connectFullMesh failed with [..pair.cc] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:1234", "peer", None),
    ("torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.", "peer", None),
    # Ranks that waited in vain.
    ("RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 2000 ms", "timeout", "R10"),
    ("RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms", "timeout", "R10"),
    ("RuntimeError: [unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete", "timeout", None),
    ("RuntimeError: [unbound_buffer.cc:90] Timed out waiting 1800000ms for send operation to complete", "timeout", None),
    ("RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout", "timeout", None),
    ("RuntimeError: Timeout waiting for key: default_pg/0/0 after 1800000 ms", "timeout", None),
    ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.", "timeout", None),
]  # fmt: skip
