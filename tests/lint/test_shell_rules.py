"""Launch commands as people write them: the wrong ones are found, and the legal ones that look alike are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankwise.lint import registry
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.shell.study import study_shell, unit_of_command

if TYPE_CHECKING:
    from rankwise.lint.finding import Finding

pytest.importorskip("tree_sitter_bash")

RULES = [rule for rule in registry.all_rules() if rule.looks_at == "shell"]
T = "torchrun --nproc_per_node=2"
TWO = "torchrun --nnodes=2 --nproc_per_node=8"


def check(unit: CodeUnit) -> list[Finding]:
    shell = study_shell(unit)
    return [finding for rule in RULES for finding in rule.check(shell)]


def found_in(code: str, *, path: str = "job.sh", is_fragment: bool = False) -> set[str]:
    unit = CodeUnit(path=path, language="shell", code=code, is_fragment=is_fragment)
    return {f"{one.rule}:{one.severity[0]}" for one in check(unit)}


BAD = {
    # misspelt flags, and flags of others
    "proc": ("torchrun --proc_per_node=4 train.py", "RW701:e"),
    "proc-two-words": ("torchrun --proc_per_node 4 train.py --epochs 3", "RW701:e"),
    "nproc": ("torchrun --nproc 4 train.py", "RW701:e"),
    "nproc-node": ("torchrun --nproc_node=4 train.py", "RW701:e"),
    "mixed-spelling": ("torchrun --nproc-per_node=4 train.py", "RW701:e"),
    "one-dash": ("torchrun -nproc_per_node=4 train.py", "RW701:e"),
    "n": ("torchrun -n 4 train.py", "RW701:e"),
    "np": ("torchrun -np 4 train.py", "RW701:e"),
    "num-processes": ("torchrun --num_processes 4 train.py", "RW701:e"),
    "num-gpus": ("torchrun --num_gpus=4 train.py", "RW701:e"),
    "gpus": ("torchrun --gpus 4 train.py", "RW701:e"),
    "module-run": ("python -m torch.distributed.run --nprocs 4 train.py", "RW701:e"),
    "python3.10": ("python3.10 -u -m torch.distributed.run --nprocs=4 train.py", "RW701:e"),
    "unknown-python": ("$PYTHON -m torch.distributed.run --nprocs=4 train.py", "RW701:e"),
    "which": ("python $(which torchrun) --proc_per_node=4 train.py", "RW701:e"),
    "path": ("/opt/conda/bin/torchrun --proc_per_node=4 train.py", "RW701:e"),
    "rankwise": ("rankwise run --proc_per_node=4 train.py", "RW701:e"),
    "rankwise-module": ("python -m rankwise.run --proc_per_node=4 train.py", "RW701:e"),
    "accelerate": ("accelerate launch --nproc_per_node=4 train.py", "RW701:e"),
    "accelerate-gpus": ("accelerate launch --num_gpus 4 train.py", "RW701:e"),
    "accelerate-slip": ("accelerate launch --num_proceses 4 train.py", "RW701:e"),
    "deepspeed": ("deepspeed --nproc_per_node 4 train.py --deepspeed ds.json", "RW701:e"),
    "in-variable": ('ARGS="--proc_per_node 4 --nnodes 1"\ntorchrun $ARGS train.py', "RW701:e"),
    "in-array": ('ARGS=(--proc_per_node 4\n  --nnodes 1)\ntorchrun "${ARGS[@]}" train.py', "RW701:e"),
    "in-function": ('go() {\n  torchrun --proc_per_node=4 train.py "$@"\n}\ngo --lr 1', "RW701:e"),
    "in-if": ("if [ -n \"$X\" ]; then\n  torchrun --proc_per_node=4 train.py\nfi", "RW701:e"),
    "in-substitution": ("OUT=$(torchrun --proc_per_node=4 train.py)", "RW701:e"),
    "under-srun": ("srun --nodes=1 --ntasks=1 torchrun --proc_per_node=4 train.py", "RW701:e"),
    "under-bash-c": ("bash -c 'torchrun --proc_per_node=4 train.py'", "RW701:e"),
    "under-srun-bash-c": ('srun -N 1 -n 1 bash -lc "cd x && torchrun --proc_per_node=4 train.py"', "RW701:e"),
    "under-ssh": ('ssh host "cd x; torchrun --proc_per_node=4 train.py"', "RW701:e"),
    "heredoc": ("ssh host bash <<'EOF'\ntorchrun --proc_per_node=4 train.py\nEOF", "RW701:e"),
    "heredoc-file": ("cat > run.sh <<EOF\ntorchrun --proc_per_node=4 train.py\nEOF", "RW701:e"),
    "wrap": ('sbatch --nodes=1 --wrap "torchrun --proc_per_node=4 train.py"', "RW701:e"),
    "docker": ("docker run --gpus all image torchrun --proc_per_node=4 train.py", "RW701:e"),
    "conda": ("conda run -n env torchrun --proc_per_node=4 train.py", "RW701:e"),
    "chain": ("cd x && torchrun --proc_per_node=4 train.py | tee log", "RW701:e"),
    # flags behind the script
    "late": ("torchrun train.py --nproc_per_node=2", "RW702:e"),
    "late-dash": ("torchrun train.py --nproc-per-node 2", "RW702:e"),
    "late-nnodes": (f"{T} train.py --lr 3 --nnodes=2", "RW702:e"),
    "late-standalone": (f"{T} train.py --standalone", "RW702:e"),
    "late-module": ("torchrun -m pkg.train --nproc_per_node=2", "RW702:e"),
    "late-accelerate": ("accelerate launch train.py --num_processes 4", "RW702:e"),
    "late-deepspeed": ("deepspeed train.py --num_gpus=4", "RW702:e"),
    "late-variable": ("torchrun $SCRIPT --nproc_per_node=2", "RW702:e"),
    "python-nproc": ("python train.py --nproc_per_node=2", "RW702:w"),
    # values
    # launcher and script
    # pasted
    "glued-two": (f"{T} train.py {T} train.py", "RW706:e"),
    "glued-python": (f"{T} train.py --x 1 \\\npython eval.py", "RW706:e"),
    "blank-behind": ("torchrun --nproc_per_node=2 \\ \n  train.py", "RW706:e"),
    "no-backslash": ("torchrun --nproc_per_node=2 \\\n  train.py --lr 3\n  --epochs 4", "RW706:e"),
    "comment-inside": ("torchrun --nproc_per_node=2 \\\n  train.py \\\n  # --lr 3 \\\n  --epochs 4", "RW706:e"),
    "glued-backslash": ("torchrun --nproc_per_node=2 --master_port=29617\\\n--nnodes=1 train.py", "RW706:e"),
    "standalone": ("torchrun --standalone --nnodes=2 --nproc_per_node=2 train.py", "RW707:e"),
    "standalone-known": ("NODES=2\ntorchrun --standalone --nnodes $NODES --nproc_per_node=2 train.py", "RW707:e"),
    "ignored": (f"{TWO} --node_rank=0 --rdzv_backend=c10d --rdzv_endpoint=h:29617 train.py", "RW708:w"),
    "ignored-standalone": (f"{T} --standalone --master_port=29617 train.py", "RW708:w"),
    # nodes
    "no-node-rank": (f"{TWO} --master_addr=10.0.0.1 train.py", "RW709:e"),
    "node-rank-high": (f"{TWO} --node_rank=2 --master_addr=10.0.0.1 train.py", "RW709:e"),
    "no-backend": (f"{TWO} --rdzv_id=1 --rdzv_endpoint=h:29617 train.py", "RW709:e"),
    "node-rank-twice": (
        f"{TWO} --node_rank=0 --master_addr=10.0.0.1 train.py &\n{TWO} --node_rank=0 --master_addr=10.0.0.1 train.py",
        "RW709:e",
    ),
    "node-rank-loop": (
        f"for h in a b; do ssh $h '{TWO} --node_rank=0 --master_addr=a train.py' & done; wait",
        "RW709:e",
    ),
    "nodes-absent": (
        "for i in 0 1 2; do\n"
        '  ssh n$i "torchrun --nnodes=4 --node_rank=$i --nproc_per_node=8 --master_addr=n0 train.py" &\ndone\nwait',
        "RW709:e",
    ),
    "no-address": (f"{TWO} --node_rank=$R train.py", "RW710:e"),
    "no-endpoint": (f"{TWO} --rdzv_backend=c10d train.py", "RW710:e"),
    "localhost": (f"{TWO} --node_rank=$R --master_addr=localhost train.py", "RW710:e"),
    "loopback": (f"{TWO} --node_rank=1 --master_addr 127.0.0.1 train.py", "RW710:e"),
    "loopback-c10d": (f"{TWO} --rdzv_backend=c10d --rdzv_endpoint=localhost:29617 train.py", "RW710:e"),
    "loopback-variable": (
        f"MASTER_ADDR=localhost\n{TWO} --node_rank=$R --master_addr=$MASTER_ADDR train.py",
        "RW710:e",
    ),
    "loopback-accelerate": (
        "accelerate launch --num_machines 2 --machine_rank $R --main_process_ip 127.0.0.1 train.py",
        "RW710:e",
    ),
    "loopback-slurm": (
        "#SBATCH -N 2\n#SBATCH --ntasks-per-node 4\nexport MASTER_ADDR=localhost\nsrun python train.py",
        "RW710:e",
    ),
    # ports
    "no-dollar": (f"{T} --master_port=MASTER_PORT train.py", "RW711:e"),
    "no-dollar-assigned": (f"PORT=29617\n{T} --master_port=PORT train.py", "RW711:e"),
    "no-dollar-nproc": ("NUM_GPUS=4\ntorchrun --nproc_per_node NUM_GPUS train.py", "RW711:e"),
    "no-dollar-endpoint": (
        f"export MASTER_ADDR=h MASTER_PORT=29617\n{TWO} --rdzv_backend=c10d --rdzv_endpoint=MASTER_ADDR:MASTER_PORT a.py",
        "RW711:e",
    ),
    "random": (f"{T} --master_port=$random train.py", "RW712:e"),
    "Random": (f"{T} --master_port=$((12000 + $Random % 20000)) train.py", "RW712:e"),
    "random-bare": (f"{T} --master_port=$((12000 + random % 20000)) train.py", "RW712:e"),
    "random-braces": (f"PORT=${{random}}\n{T} --master_port=$PORT train.py", "RW712:e"),
    "random-old": (f"P=$[12000 + $random % 20000]\n{T} --master_port=$P train.py", "RW712:e"),
    "random-expr": (f"P=`expr 12000 + $random % 20000`\n{T} --master_port=$P train.py", "RW712:e"),
    "random-statement": ("((PORT = 12000 + $random % 2000))", "RW712:e"),
    "random-export": ("export MASTER_PORT=$(( $random % 1000 + 12000 ))", "RW712:e"),
    "dice": (f"{TWO} --node_rank=$R --master_addr=h --master_port=$RANDOM train.py", "RW713:e"),
    "dice-variable": (
        f"PORT=$((10000 + RANDOM % 5000))\n{TWO} --node_rank=$R --master_addr=h --master_port=$PORT train.py",
        "RW713:e",
    ),
    "dice-shuf": (
        f"PORT=$(shuf -i 10000-60000 -n 1)\n{TWO} --rdzv_backend=c10d --rdzv_endpoint=h:$PORT train.py",
        "RW713:e",
    ),
    "port-usual": (f"{T} --master_port=29500 train.py", "RW714:w"),
    "port-usual-endpoint": (
        f"{T} --rdzv_backend=c10d --rdzv_endpoint=localhost:29400 train.py",
        "RW714:w",
    ),
    "port-usual-launch": (f"{T} --master_port 12355 train.py", "RW714:w"),
    "port-usual-env": ("export MASTER_ADDR=localhost MASTER_PORT=12355\npython train.py", "RW714:w"),
    # Slurm
    "tasks": ("#SBATCH --ntasks-per-node=8\nsrun torchrun --nproc_per_node=8 train.py", "RW715:e"),
    "tasks-n": ("#SBATCH -n 8\nsrun torchrun --nproc_per_node=8 train.py", "RW715:e"),
    "tasks-srun": ("srun --ntasks-per-node=4 torchrun --nproc_per_node=4 train.py", "RW715:e"),
    "tasks-worlds": ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc_per_node=4 train.py", "RW715:e"),
    "first-only": (f"#SBATCH --nodes=2\n{TWO} --rdzv_backend=c10d --rdzv_endpoint=$H:29617 train.py", "RW716:e"),
    "first-only-idle": (f"#SBATCH --nodes=2\n{T} train.py", "RW716:w"),
    "too-few-started": (
        "#SBATCH --nodes=2\n#SBATCH --ntasks=2\n"
        "srun torchrun --nnodes=4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$H:29617 train.py",
        "RW716:e",
    ),
    "background-end": (f"#SBATCH --nodes=1\n{T} train.py &\necho started", "RW729:e"),
    # variables
    "nohup": (f"nohup {T} train.py > log 2>&1 &", "RW719:w"),
    "nohup-launch": ("nohup python -m torch.distributed.run --nproc_per_node=2 train.py &", "RW719:w"),
    "nohup-env": (f"CUDA_VISIBLE_DEVICES=0,1 nohup {T} train.py &", "RW719:w"),
    "devices-many": ("CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=3 train.py", "RW720:w"),
    "devices-one-rank": ("export CUDA_VISIBLE_DEVICES=0,1,2,3\ntorchrun train.py", "RW720:w"),
    "devices-twice": ("CUDA_VISIBLE_DEVICES=0,0 torchrun --nproc_per_node=2 train.py", "RW720:e"),
    "devices-twice-export": ("GPUS=0,1,1\nexport CUDA_VISIBLE_DEVICES=$GPUS\npython train.py", "RW720:e"),
    # ranks by hand
    "too-few": (
        "export MASTER_ADDR=localhost MASTER_PORT=29617\nfor i in $(seq 0 2); do RANK=$i WORLD_SIZE=4 python t.py & done; wait",
        "RW726:e",
    ),
    "too-few-counted": (
        "export MASTER_ADDR=127.0.0.1\nfor ((i=0; i<2; i++)); do RANK=$i WORLD_SIZE=4 python t.py & done; wait",
        "RW726:e",
    ),
    "too-few-alone": ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29617 python t.py", "RW726:w"),
    "in-turn": ("export WORLD_SIZE=2 MASTER_ADDR=localhost\nRANK=0 python t.py\nRANK=1 python t.py", "RW726:e"),
    "in-turn-loop": ("export WORLD_SIZE=2\nfor r in {0..1}; do RANK=$r python t.py; done", "RW726:e"),
    "same-rank": ("export WORLD_SIZE=2\nRANK=0 python t.py &\nRANK=0 python t.py &\nwait", "RW726:e"),
    "same-rank-loop": ("for i in 0 1; do RANK=0 LOCAL_RANK=$i WORLD_SIZE=2 python t.py & done; wait", "RW726:e"),
    "rank-high": ("export WORLD_SIZE=2\nRANK=1 python t.py &\nRANK=2 python t.py &\nwait", "RW726:e"),
    # local rank
    "local-rank": (f"{T} train.py --local_rank=0", "RW727:e"),
    "local-rank-two-words": (f"{T} train.py --local-rank 0", "RW727:e"),
    "local-rank-before": (f"{T} --local_rank=0 train.py", "RW727:e"),
    "local-rank-variable": (f"{T} train.py --local_rank $LOCAL_RANK", "RW727:e"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "expected"), BAD.values(), ids=BAD.keys())
def test_wrong_commands_are_found(code: str, expected: str) -> None:
    """Each mistake gives its own finding, and no other."""
    assert found_in(code) == {expected}


LEGAL = {
    "plain": f"{T} train.py",
    "dashes": "torchrun --nproc-per-node 2 train.py --lr 3",
    "abbreviated": "torchrun --nnode=1 --nproc_per 2 --stand train.py",
    "short": "torchrun -m -r 3 -t 3 --nproc_per_node=2 pkg.train",
    "r3": "torchrun -r3 --nproc_per_node=2 train.py",
    "gpu": "torchrun --standalone --nproc_per_node=gpu train.py",
    "variables": "torchrun --nproc_per_node=$GPUS --nnodes=$NNODES --node_rank=$R --master_addr=$A --master_port=$P t.py",
    "defaults": "GPUS=${1:-8}\nPORT=${PORT:-29500}\ntorchrun --nproc_per_node=$GPUS --master_port=$PORT t.py ${@:2}",
    "open-args": 'torchrun $DISTRIBUTED_ARGS pretrain.py "$@"',
    "open-array": 'torchrun "${ARGS[@]}" pretrain.py --nproc 3',
    "script-variable": f"{T} $SCRIPT --lr 3 --nodes 4",
    "unknown-then-args": "torchrun $CMD --lr 3 --warmup 4",
    "arithmetic": "N=2\nG=4\nCUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 torchrun --nproc_per_node=$((N * G)) t.py",
    "megatron": (
        'GPUS=8\nDISTRIBUTED_ARGS="\n    --nproc_per_node $GPUS \\\n    --nnodes $NNODES \\\n    --node_rank $RANK \\\n'
        '    --master_addr $ADDR \\\n    --master_port 6000\n"\ntorchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\\n  --lr 3'
    ),
    "own-options": f"{T} train.py --role x --log_dir y --module z",
    "ended": "torchrun --nproc_per_node=2 -- train.py --nnodes=2",
    "both": "torchrun --nnodes=1 --nproc_per_node=2 train.py --nnodes 1",
    "no-python": f"{T} --no-python python train.py",
    "no-python-program": f"{T} --no_python ./run.sh",
    "python": "python train.py --gpus 4 --lr 0.1",
    "python-c": "python -c 'import torch; print(torch.__version__)'",
    "python-m": "python -m pip install torch",
    "echo": 'echo "torchrun --proc_per_node=4 train.py"',
    "comment": "# torchrun --proc_per_node=4 train.py\ntrue",
    "grep": "ps aux | grep torchrun | awk '{print $2}' | xargs kill -9\npkill -f torchrun --older 4",
    "pip": "pip install torchrun --proc_per_node",
    "dash-inside": f"{T} train.py --name a\u2013b --title 'x \u2013 y'",
    "accelerate": "accelerate launch --config_file fsdp.yaml --num_processes=8 train.py --lr 3",
    "accelerate-fsdp": "accelerate launch --use_fsdp --fsdp_sharding_strategy 1 --fp8_backend te train.py",
    "accelerate-config": "accelerate config --num_processes 3",
    "accelerate-machines": "accelerate launch --num_machines 2 --machine_rank $R --main_process_ip $IP --main_process_port 29500 t.py",
    "deepspeed": "deepspeed --num_gpus 4 --master_port 29617 train.py --deepspeed ds.json",
    "deepspeed-new": "deepspeed --some_new_flag=3 train.py",
    "rankwise": "rankwise run --nproc-per-node 4 --report r.json --no-watch --hang-timeout 30 train.py --re 4",
    "c10d": "torchrun --nnodes=1:4 --nproc_per_node=8 --rdzv_id=$ID --rdzv_backend=c10d --rdzv_endpoint=$H:29400 t.py",
    "static-node": f"{TWO} --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 train.py",
    "pet": f"export PET_NODE_RANK=$R PET_MASTER_ADDR=h\n{TWO} train.py",
    "rehearsal": (
        f"{TWO} --node_rank=0 --master_addr=localhost --master_port=29500 t.py &\n"
        f"{TWO} --node_rank=1 --master_addr=localhost --master_port=29500 t.py\nwait"
    ),
    "rehearsal-loop": (
        "for i in 0 1; do torchrun --nnodes=2 --nproc_per_node=1 --node_rank=$i --master_addr=127.0.0.1 t.py & done; wait"
    ),
    "arms": (
        f"if [ $1 = 0 ]; then {TWO} --node_rank=0 --master_addr=h t.py; else {TWO} --node_rank=0 --master_addr=h t.py; fi"
    ),
    "one-after-the-other": (
        f"{TWO} --node_rank=0 --master_addr=h a.py\n{TWO} --node_rank=0 --master_addr=h b.py"
    ),
    "ssh-nodes": (
        "for i in 0 1; do\n"
        '  ssh n$i "torchrun --nnodes=2 --node_rank=$i --nproc_per_node=8 --master_addr=n0 --master_port=29500 t.py" &\ndone\nwait'
    ),
    "ssh-counted": (
        "R=0\nfor h in a b; do\n"
        "  ssh $h torchrun --nnodes=2 --node_rank=$R --nproc_per_node=8 --master_addr=a t.py &\n  ((R++))\ndone\nwait"
    ),
    "ssh-let": (
        "R=0\nfor h in a b; do\n"
        "  ssh $h torchrun --nnodes=2 --node_rank=$R --nproc_per_node=8 --master_addr=a t.py &\n  let R+=1\ndone\nwait"
    ),
    "ssh-assigned": (
        "R=0\nfor h in a b; do\n"
        "  ssh $h torchrun --nnodes=2 --node_rank=$R --nproc_per_node=8 --master_addr=a t.py &\n  R=$((R + 1))\ndone\nwait"
    ),
    "srun-each-node": (
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\nnodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\n"
        "for ((i = 1; i < SLURM_JOB_NUM_NODES; i++)); do\n"
        "  srun --nodes=1 --ntasks=1 -w ${nodes[$i]} torchrun --nnodes=4 --node_rank=$i --nproc_per_node=8 "
        "--master_addr=${nodes[0]} t.py &\ndone\n"
        "srun --nodes=1 --ntasks=1 torchrun --nnodes=4 --node_rank=0 --nproc_per_node=8 --master_addr=${nodes[0]} t.py\nwait"
    ),
    "own-launcher": "python -m torch_xla.launch --nnodes=2 t.py\npython tools/launch.py --nproc_per_node 8 t.py",
    "world-for-python": f"export WORLD_SIZE=2\npython t.py\n{T} t.py",
    "world-computed": f"export WORLD_SIZE=$((N * 8))\n{T} t.py",
    "launcher-in-variable": (
        '#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nLAUNCHER="torchrun --nproc_per_node 8 --nnodes 2 '
        '--rdzv_backend c10d --rdzv_endpoint $H:29500"\nCMD="train.py --lr 3"\n'
        'srun bash -c "$LAUNCHER --role \\$(hostname -s): $CMD" 2>&1 | tee -a log\nsrun $LAUNCHER $CMD'
    ),
    "RANDOM": f"PORT=$((12000 + RANDOM % 20000))\n{T} --master_port=$PORT train.py",
    "own-random": f"random=4\n{T} --master_port=$((12000 + random)) train.py",
    "dice-once": (
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nexport MASTER_PORT=$((10000 + RANDOM % 5000))\n"
        f"srun {TWO} --rdzv_backend=c10d --rdzv_endpoint=$HEAD:$MASTER_PORT t.py"
    ),
    "slurm": (
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n"
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        "srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8 --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d "
        "--rdzv_endpoint=$HEAD:29500 train.py"
    ),
    "slurm-bash-c": (
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n"
        'srun bash -c "torchrun --nnodes=4 --node_rank=\\$SLURM_PROCID --nproc_per_node=8 '
        '--master_addr=$MASTER_ADDR --master_port=29500 train.py"'
    ),
    "slurm-override": "#SBATCH --ntasks-per-node=8\nsrun --ntasks-per-node=1 torchrun --nproc_per_node=8 train.py",
    "slurm-lightning": "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun python train.py",
    "slurm-one": "#SBATCH --nodes=1\n#SBATCH --gres=gpu:8\ntorchrun --nproc_per_node=8 train.py",
    "slurm-disabled": "##SBATCH --ntasks-per-node=8\nsrun torchrun --nproc_per_node=8 train.py",
    "slurm-ssh": f"#SBATCH --nodes=2\nfor h in $(cat hosts); do ssh $h {TWO} --rdzv_backend=c10d --rdzv_endpoint=a:1234 t.py & done\nwait",
    "slurm-wait": f"#SBATCH --nodes=1\n{T} train.py &\nwait",
    "slurm-trap": f"#SBATCH --nodes=1\n{T} train.py &\nPID=$!\nwait $PID",
    "slurm-world": "#SBATCH --ntasks=8\nexport WORLD_SIZE=$SLURM_NTASKS\nsrun python t.py",
    "slurm-world-number": "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nexport WORLD_SIZE=8\nsrun python t.py",
    "gloo": "export GLOO_SOCKET_IFNAME=eth0\nexport NCCL_SOCKET_IFNAME=^lo,docker0",
    "nccl-lo-one": f"NCCL_SOCKET_IFNAME=lo {T} t.py",
    "nohup-python": "nohup python train.py &",
    "nohup-setsid": f"setsid nohup {T} train.py &",
    "nohup-signals": f"nohup {T} --signals-to-handle SIGTERM,SIGINT train.py &",
    "nohup-rankwise": "nohup rankwise run --nproc_per_node=2 train.py &",
    "devices": f"CUDA_VISIBLE_DEVICES=2,3 {T} train.py",
    "devices-quoted": f'CUDA_VISIBLE_DEVICES="0,1" {T} train.py',
    "devices-none": f"CUDA_VISIBLE_DEVICES= {T} train.py",
    "devices-minus": f"CUDA_VISIBLE_DEVICES=-1 {T} train.py",
    "devices-unknown": f"CUDA_VISIBLE_DEVICES=$GPUS {T} train.py",
    "devices-python": "CUDA_VISIBLE_DEVICES=0 python train.py",
    "devices-several-each": "CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=2 train.py",
    "devices-prepare": f"export CUDA_VISIBLE_DEVICES=0,1\ntorchrun prepare.py\n{T} train.py",
    "devices-few": "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 train.py",
    "devices-all-processes": "CUDA_VISIBLE_DEVICES=0,1 accelerate launch train.py",
    "devices-twice-unlike": "CUDA_VISIBLE_DEVICES=GPU-8f2,GPU-8f3 python train.py\nCUDA_VISIBLE_DEVICES=1,11 python train.py",
    "devices-gpu": "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=gpu train.py",
    "devices-branch": f"if [ -n \"$X\" ]; then export CUDA_VISIBLE_DEVICES=0; fi\n{T} train.py",
    "info": "export TORCH_DISTRIBUTED_DEBUG=INFO NCCL_DEBUG=INFO NCCL_P2P_DISABLE=0",
    "world-used": "export WORLD_SIZE=2 RANK=1\n"
    "torchrun --nnodes=$WORLD_SIZE --node_rank=$RANK --nproc_per_node=8 --master_addr=h t.py",
    "world-not-exported": f"WORLD_SIZE=4\n{T} train.py",
    "by-hand": "export WORLD_SIZE=2 MASTER_ADDR=localhost\nRANK=0 python t.py &\nRANK=1 python t.py &\nwait",
    "by-hand-two-sizes": (
        "export MASTER_ADDR=10.0.0.1 MASTER_PORT=29617\nRANK=0 WORLD_SIZE=1 python t.py\nRANK=0 WORLD_SIZE=2 python t.py &\n"
        "RANK=1 WORLD_SIZE=2 python t.py &\nwait"
    ),
    "by-hand-last": "export WORLD_SIZE=2 MASTER_ADDR=localhost\nRANK=0 python t.py &\nRANK=1 python t.py",
    "by-hand-other-host": "export WORLD_SIZE=4 MASTER_ADDR=10.0.0.1\nRANK=0 python t.py &\nRANK=1 python t.py &\nwait",
    "by-hand-two-jobs": (
        "export WORLD_SIZE=1\nRANK=0 python a.py\nRANK=0 python b.py\nRANK=0 python a.py"
    ),
    "local-rank-minus": f"{T} train.py --local_rank=-1",
    "local-rank-number": f"{T} train.py --local_rankings=3",
    "gap": "torchrun --nproc_per_node=<NUM_GPUS> --nnodes <N> <your script.py> --lr <lr>",
    "gap-dots": "torchrun ... train.py --lr 3\ntorchrun --nproc_per_node=4 ...",
    "help": "torchrun --help\ntorchrun -h\naccelerate launch --help",
    "zsh": "autoload -U colors && colors\ntorchrun --nproc_per_node=2 train.py",
    "fish": "set -x A 1\nfor i in 1 2\n  echo $i\nend\ntorchrun --nproc_per_node=2 train.py",
    "mpirun": "mpirun -np 4 python train.py",
    "continued": "torchrun \\\n  --nproc_per_node=2 \\\n  train.py \\\n  --lr 3 \\\n\n",
    "crlf-free-end": "torchrun --nproc_per_node=2 train.py \\\n",
    "nested-dollar": "srun -n 1 bash -c 'torchrun --nproc_per_node=$N train.py'",
    "empty": "",
    "only-comments": "#!/bin/bash\n# nothing\n",
}  # fmt: skip


@pytest.mark.parametrize("code", LEGAL.values(), ids=LEGAL.keys())
def test_legal_commands_are_clean(code: str) -> None:
    """What works gives no finding of any rule."""
    assert found_in(code) == set()


FRAGMENTS = {
    "gap-in-capitals": ("torchrun --nproc_per_node=NUM_GPUS --master_addr=MASTER_ADDR train.py", set()),
    "torch's own name": (f"{T} --master_port=MASTER_PORT train.py", {"RW711:e"}),
    "terminals": ("export WORLD_SIZE=2 MASTER_ADDR=localhost\nRANK=0 python t.py\nRANK=1 python t.py", set()),
    "usage": ("torchrun --nproc_per_node=4", set()),
    "copied-node": (
        f"{TWO} --node_rank=0 --master_addr=10.0.0.1 t.py\n{TWO} --node_rank=0 --master_addr=10.0.0.1 t.py",
        {"RW709:e"},
    ),
}


@pytest.mark.parametrize(("code", "expected"), FRAGMENTS.values(), ids=FRAGMENTS.keys())
def test_fences_of_a_page_are_read_as_lines_to_type(code: str, expected: set[str]) -> None:
    """In a page gaps may be open, and lines may be meant for several terminals."""
    assert found_in(code, path="README.md", is_fragment=True) == expected


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (["torchrun", "--proc_per_node=4", "train.py"], "RW701"),
        (["torchrun", "train.py", "--nproc_per_node=4"], "RW702"),
        (["nohup", "torchrun", "train.py"], "RW719"),
        (["torchrun", "--nproc_per_node=4", "train.py", "--name", "a b $x"], None),
    ],
)
def test_a_command_as_typed_is_checked(argv: list[str], rule: str | None) -> None:
    """Words of a command line, split by the user's shell, are checked like a script's."""
    assert {finding.rule for finding in check(unit_of_command(argv))} == ({rule} if rule else set())


@pytest.mark.parametrize(
    ("flag", "fix"),
    [("--proc_per_node", "write --nproc_per_node"), ("--nproc_per_gpu", "did you mean --nproc_per_node?"), ("--zzz", "remove it")],
)  # fmt: skip
def test_a_flag_that_is_much_like_another_is_asked_for(flag: str, fix: str) -> None:
    """What is all but one is written in its place; what is only like one is asked for, as by `rankwise run`, and not written."""
    (found,) = check(CodeUnit(path="job.sh", language="shell", code=f"torchrun {flag}=2 train.py"))
    assert found.fix.startswith(fix)
    assert bool(found.edits) == fix.startswith("write")
