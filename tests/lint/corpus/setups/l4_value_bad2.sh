GPUS=""
python -m torch.distributed.run --nproc_per_node --work-dir out train.py
