#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1,2,3
torchrun --standalone --nproc-per-node=8 train.py
