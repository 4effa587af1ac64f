#!/bin/bash
export OMP_NUM_THREADS=1
export CUDA_VISIBLE_DEVICES=0,1,2,3
MASTER_PORT=$((12000 + $random % 20000))
torchrun --proc_per_node=4 --master_port=$MASTER_PORT train.py
