import torch.distributed as dist
from transformers import TrainerCallback


class LengthStats(TrainerCallback):
    def __init__(self):
        self.lengths = []

    def on_epoch_end(self, args, state, control, **kwargs):
        everyone = [self.lengths]
        if args.world_size > 1:
            everyone = [None] * args.world_size
            dist.all_gather_object(everyone, self.lengths)
        if state.is_world_process_zero:
            merged = sorted(n for part in everyone for n in part)
            print("median length", merged[len(merged) // 2] if merged else 0)
        self.lengths.clear()
