#!/bin/bash
torchrun --nproc-per-node=8 train.py --lr 0.01 --nodes-per-graph 4
