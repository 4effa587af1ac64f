setsid torchrun --standalone --nproc-per-node=4 train.py > train.log 2>&1 < /dev/null &
nohup python watch.py > watch.log 2>&1 &
