import argparse

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from torch.utils.data import DataLoader, TensorDataset


def main(args):
    acc = Accelerator(gradient_accumulation_steps=args.accum)
    net = torch.nn.Linear(8, 8)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    dl = DataLoader(TensorDataset(torch.randn(1000, 8)), batch_size=4, shuffle=True)
    sched = get_scheduler("cosine", optimizer=opt, num_warmup_steps=50, num_training_steps=args.max_train_steps)
    net, opt, dl, sched = acc.prepare(net, opt, dl, sched)
    step = 0
    while step < args.max_train_steps:
        for (x,) in dl:
            with acc.accumulate(net):
                acc.backward(net(x).pow(2).mean())
                opt.step()
                sched.step()
                opt.zero_grad()
            if acc.sync_gradients:
                step += 1
            if step >= args.max_train_steps:
                break
    acc.end_training()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--max_train_steps", type=int, default=1000)
    ap.add_argument("--accum", type=int, default=1)
    main(ap.parse_args())
