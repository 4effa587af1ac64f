CUDA_VISIBLE_DEVICES=2,3 torchrun --standalone --nproc-per-node=2 train.py
CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=4 cpu_job.py --backend gloo
