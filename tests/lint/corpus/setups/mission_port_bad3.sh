#!/usr/bin/env bash
set -e
MASTER_PORT=$((12000 + RANDOM % 20000))
OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 \
    --master_port=MASTER_PORT\
    train.py --epochs 10
