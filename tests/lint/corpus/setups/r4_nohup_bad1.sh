#!/bin/bash
nohup torchrun --standalone --nproc-per-node=4 train.py > train.log 2>&1 &
