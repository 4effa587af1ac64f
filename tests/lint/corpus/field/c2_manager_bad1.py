from contextlib import contextmanager
import torch.distributed as dist
from transformers import AutoTokenizer


@contextmanager
def rank_zero_first():
    rank = dist.get_rank()
    if rank != 0:
        dist.barrier()
    yield
    if rank != 0:
        dist.barrier()


dist.init_process_group("gloo")
with rank_zero_first():
    tok = AutoTokenizer.from_pretrained("bert-base-uncased")
dist.destroy_process_group()
