"""Failure classes that a check of the code can't find, each with its name and the reason; the table omits classes that have a rule."""

from __future__ import annotations

UNDECIDED: dict[str, tuple[str, str]] = {
    "I3": ("the host of the store has no address", "Names are resolved on the job's hosts, which the code does not show."),
    "I20": ("an unsuitable time-out", "How long the slowest step takes is known to who wrote it; the report of a hang names the time-out."),
    "I28": ("the rendezvous is closed", "The code does not show when the other nodes have ended."),
    "L6": ("`--nproc-per-node gpu` without CUDA", "The GPUs of the host are known only there; `rankwise run` refuses it."),
    "L16": ("a left-over configuration", "Files of other programs in the user's home are not part of the code."),
    "L15": ("one process for many GPUs", "`DataParallel` is slow, but correct."),
    "C23": ("a tensor that is not contiguous", "The layout depends on the shapes at run time, and torch's own error names it."),
    "D1": ("parameters without a gradient", "Only a run shows which parameters a step used; DDP's own error tells of them."),
    "D4": ("a parameter is ready twice", "Checkpointed parts show only in a run; DDP's own error names the parameter."),
    "D11": ("nothing to train", "DDP refuses such a model at once, on all ranks."),
    "I6": ("Gloo does not know the network interface", "Interfaces are known only on the host; `rankwise doctor` names them."),
    "D5": ("`find_unused_parameters` needlessly on", "Only a run shows that every parameter was used in every step."),
    "D19": ("uneven evaluation with gradients on", "The number of batches on each rank depends on the data."),
    "D24": ("means of unequal numbers of samples", "The number of samples or tokens on each rank depends on the data."),
    "D30": ("gradients in another memory layout", "The layout of a gradient depends on the shapes at run time."),
    "X18": ("what a batch size means", "The code does not show whether a number is meant for one rank or for all."),
    "R2": ("an error without its traceback", "A script without `@record` is correct; only torchrun's summary lacks the traceback."),
    "R15": ("an abort at exit, after the work is done", "It occurs at random, at some exits only."),
    "R8": ("an elastic restart loses its place", "The code does not show what is saved elsewhere."),
    "C21": ("object collectives on the first GPU", "The device that carries an object depends on the backend of the run; RW202 reports a device that was never set."),
    "M8": ("a learning rate that is scaled for another world", "The code does not show whether a rate is meant for one rank or for all."),
    "X17": ("more threads than cores", "The number of cores is known only on the host; `rankwise run` sets OMP_NUM_THREADS accordingly."),
    "X9": ("fewer samples than ranks", "How many samples there are is known only where the data is."),
    "X14": ("one rank works alone for too long", "How long the work takes depends on the data; the report of a run names the rank that worked."),
}  # fmt: skip
