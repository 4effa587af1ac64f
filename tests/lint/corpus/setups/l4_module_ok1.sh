python -m torch.distributed.run --nproc-per-node 4 -m project.train --work-dir out
