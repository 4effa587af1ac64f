torchrun --nnodes=2 --node_rank=$NODE_RANK --master_addr=$HEAD --master_port=29400 \
    --nproc-per-node=8 train.py
