#!/bin/bash
export OMP_NUM_THREADS=1
export CUDA_VISIBLE_DEVICES=0,1,2,3
MASTER_PORT=$((12000 + RANDOM % 20000))
torchrun --nproc-per-node=4 --master_port="$MASTER_PORT" train.py --lr 0.1
