"""Failure classes that a check of the text can't find, each with its name and the reason; classes that have a rule are left out of the table."""

from __future__ import annotations

UNDECIDED: dict[str, tuple[str, str]] = {
    "I3": ("the host of the store has no address", "Names are looked up on the hosts of the job, which the text does not know."),
    "I28": ("the rendezvous is closed", "When the other nodes have ended is not in the text."),
    "L6": ("`--nproc-per-node gpu` without CUDA", "Which GPUs there are is known on the host; `rankwise run` refuses it."),
    "L16": ("a left-over configuration", "Files of other programs in the user's home are not a part of the text."),
    "D5": ("`find_unused_parameters` needlessly on", "That every parameter was used in every step is known after the steps."),
    "D19": ("uneven evaluation with gradients on", "How many batches each rank has is known with the data."),
    "D24": ("means of unequal numbers of samples", "How many samples or tokens each rank holds is known with the data."),
    "D30": ("gradients in another memory layout", "Which layout a gradient has is known with the shapes of the run."),
    "X18": ("what a batch size means", "A number in the text does not say whether it is meant for one rank or for all."),
    "R2": ("an error without its traceback", "A script without `@record` is right; it is torchrun's summary that lacks the traceback."),
    "R15": ("an abort at exit, after the work is done", "It strikes some exits by chance."),
    "R8": ("an elastic restart loses its place", "What is saved elsewhere is not in the text."),
    "C21": ("object collectives on the first GPU", "Which device an object travels over is known with the backend of the run; RW202 tells of a device that was never set."),
    "M8": ("a learning rate that is scaled for another world", "Whether a rate is meant for one rank or for all is not in the text."),
    "X17": ("more threads than cores", "How many cores a host has is known on the host; `rankwise run` sets OMP_NUM_THREADS by them."),
}  # fmt: skip
