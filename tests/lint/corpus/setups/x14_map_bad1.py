import torch
import torch.distributed as dist
from datasets import load_dataset
from transformers import AutoTokenizer

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank % torch.cuda.device_count())
tok = AutoTokenizer.from_pretrained("gpt2")
if rank == 0:
    ds = load_dataset("wikipedia", "20220301.en", split="train")
    ds = ds.map(lambda b: tok(b["text"]), batched=True, num_proc=8)
    ds.save_to_disk("/data/wiki_tok")
dist.barrier()
from datasets import load_from_disk

ds = load_from_disk("/data/wiki_tok")
dist.destroy_process_group()
