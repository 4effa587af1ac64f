torchrun --nnodes=2 --node_rank=$NODE_RANK --master_addr=$HEAD \
    --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --nproc-per-node=8 train.py
