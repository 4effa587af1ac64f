torchrun --standalone --nnodes=1 --nproc-per-node=8 train.py
