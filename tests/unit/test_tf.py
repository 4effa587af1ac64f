"""rankwise.tf without a second process: resolvers, names, contexts, arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwise
from rankwise import tf
from rankwise.base.identity_clusters import read_tf_config
from rankwise.tf.datasets import find_part
from rankwise.tf.values import count_rows, cut_rows

CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]}


def test_tf_config_is_read() -> None:
    """The cluster, this task and addresses come from TF_CONFIG; ranks follow the order of jobs that is asked for."""
    env = {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": "1"}})}
    it = tf.TFConfigClusterResolver(env=env)
    assert it.cluster_spec().as_dict() == CLUSTER
    assert (it.task_type, it.task_id) == ("worker", 1)
    assert (it.master(), it.master("ps", 0, "grpc")) == ("c:3", "grpc://d:4")
    assert it.order(("ps", "chief", "worker")) == (3, ["d:4", "a:1", "b:2", "c:3"])
    empty = tf.TFConfigClusterResolver(env={})
    assert (bool(empty.cluster_spec()), empty.task_type, empty.master(), empty.order(("worker",))) == (
        False,
        None,
        "",
        None,
    )


def test_slurm_and_kubernetes_are_read() -> None:
    """Each task of an srun step has its job and address, each pod of an indexed job its name."""
    env = {"SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    it = tf.SlurmClusterResolver({"ps": 1, "worker": 3}, port_base=9000, env=env)
    assert it.cluster_spec().as_dict() == {"ps": ["n1:9000"], "worker": ["n1:9001", "n2:9000", "n2:9001"]}
    assert (it.task_type, it.task_id, it.master()) == ("worker", 1, "n2:9000")
    assert tf.SlurmClusterResolver(env=env).task_id == 2
    pod = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "train-0.svc"}
    assert tf.KubernetesClusterResolver(env=pod).master() == "train-1.svc:8470"
    assert len(tf.KubernetesClusterResolver(env=pod).cluster_spec().job_tasks("worker")) == 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tf.TFConfigClusterResolver(env={"TF_CONFIG": "{"}), "TF_CONFIG can't be read"),
        (lambda: tf.SlurmClusterResolver(env={}), "SLURM_PROCID="),
        (lambda: tf.SlurmClusterResolver({"ps": 1}, env={"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}), "has 2 tasks"),
        (lambda: tf.KubernetesClusterResolver(env={"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}), "MASTER_ADDR=h"),
        (lambda: tf.ClusterSpec(CLUSTER).task_address("worker", 5), "task 5 of job 'worker', which has 2"),
        (lambda: tf.ClusterSpec(CLUSTER).job_tasks("x"), "no job 'x'"),
        (lambda: tf.SimpleClusterResolver(CLUSTER, task_type="evaluator", task_id=0).order(("worker",)), "task evaluator 0"),
        (lambda: tf.SimpleClusterResolver({"worker": ["h"]}, task_type="worker", task_id=0).order(("worker",)), "worker 0 has no port in the cluster: 'h'"),
        (lambda: tf.TFConfigClusterResolver(env={"TF_CONFIG": '{"cluster": {"ps": ["h:"]}, "task": {"type": "ps", "index": 0}}'}).order(("ps",)),
         "ps 0 has no port in TF_CONFIG: 'h:'"),
        (lambda: read_tf_config({"TF_CONFIG": '{"cluster": {"worker": ["h", "i:1"]}, "task": {"type": "worker", "index": 1}}'}), "worker 0 has no port in TF_CONFIG: 'h'"),
        (lambda: tf.InputContext(2, 0, 2).get_per_replica_batch_size(7), "global_batch_size=7 for 2 replicas"),
        (lambda: tf.compute_average_loss(torch.zeros(())), "loss without a batch dim"),
        (lambda: tf.compute_average_loss(torch.zeros(2), global_batch_size=0), "global_batch_size=0"),
        (lambda: tf.get_strategy().reduce("MAX", 1), "op='MAX'"),
        (lambda: tf.get_strategy().reduce("SUM", torch.zeros(()), axis=0), "which has no such dim"),
        (lambda: tf.get_strategy().gather(1.0, axis=0), "gather(..., axis=0) of 1.0"),
        (lambda: tf.get_strategy().run(lambda: tf.get_strategy().run(int)), "strategy.run() inside"),
        (lambda: tf.Variable(1.0, trainable=True), "Variable(trainable=True)"),
        (lambda: tf.BackupAndRestore("x", "epoch"), "save_freq='epoch'"),  # type: ignore[arg-type]
        (lambda: tf.PreemptionCheckpointHandler(None, tf.Checkpoint()), "without checkpoint_dir"),
        (lambda: tf.ClusterCoordinator(tf.get_strategy()), "ClusterCoordinator of a"),  # type: ignore[arg-type]
        (lambda: tf.aggregate_gradients(torch.optim.SGD([torch.zeros(1)], 0.1)), "aggregate_gradients() outside"),
    ],
)  # fmt: skip
def test_bad_calls_are_named(make: Any, text: str) -> None:
    """Each says what is wrong, before anything is started."""
    with pytest.raises(rankwise.UsageError, match=r"(?s).*") as error:
        make()
    assert text in str(error.value)


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(torch.arange(4)), DataLoader(TensorDataset(torch.arange(4)), batch_size=None), rankwise.DataLoader(TensorDataset(torch.arange(4)), global_batch=2),
     DataLoader(TensorDataset(torch.arange(4)), sampler=rankwise.DistributedSampler(range(4)))],
)  # fmt: skip
def test_data_that_is_split_or_not_batched_is_refused(dataset: Any) -> None:
    """Single samples, our loader, and a loader with a DistributedSampler have no global batch to split."""
    with pytest.raises(rankwise.UsageError, match="experimental_distribute_dataset"):
        tf.get_strategy().experimental_distribute_dataset(dataset)


def test_names_are_found_as_in_tensorflow() -> None:
    """Tf's modules lead to ours."""
    assert tf.distribute.cluster_resolver.TFConfigClusterResolver is tf.TFConfigClusterResolver  # type: ignore[attr-defined]
    assert tf.distribute.experimental.CommunicationImplementation is tf.CommunicationImplementation  # type: ignore[attr-defined]
    assert tf.nn.compute_average_loss is tf.compute_average_loss  # type: ignore[attr-defined]
    assert tf.train.latest_checkpoint is tf.latest_checkpoint  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("distribute.TPUStrategy", "no TPUStrategy\n  -> MirroredStrategy()"), ("function", "torch.compile"), ("GradientTape", "loss.backward()"),
        ("keras.callbacks.BackupAndRestore", "tf.BackupAndRestore"), ("data.experimental.AutoShardPolicy", "tf.AutoShardPolicy"),
        ("constant", "the names of tf.distribute only, and no constant\n  -> in torch: "), ("config.list_physical_devices", "torch.cuda has the devices"),
        ("summary", "torch.utils.tensorboard"), ("compat", "and no compat"), ("nn.softmax", "in torch there is torch.softmax"), ("nn.relu6", "torch.nn.functional.relu6"),
        ("random.set_seed", "in torch there is torch.random"), ("train.CheckpointsManager", "the nearest name here is tf.CheckpointManager"),
        ("distribute.experimental_set_strategy", "with strategy.scope()"), ("distribute.ReduceOp.MIN", "ReduceOp has no MIN\n  -> its members are SUM, MEAN"),
        ("AutoShardPolicy.HINT", "its members are AUTO, DATA, FILE, OFF"),
        ("get_strategy.extended", "has no meaning on torch\n  -> reduce()"),
        ("get_strategy.experimental_distribute_datasets_from_function", "the nearest name here is strategy.distribute_datasets_from_function"),
        ("get_strategy.experimental_gather", "the nearest name here is strategy.gather"),
    ],
)  # fmt: skip
def test_names_that_are_not_here_say_what_to_use(path: str, text: str) -> None:
    """Any name of tf that is not here is a UsageError with what to use, and an AttributeError: hasattr() answers."""
    owner: Any = tf
    for name in path.split("."):
        if not hasattr(owner, name):
            break
        owner = getattr(owner, name)
        owner = owner() if name == "get_strategy" else owner
    with pytest.raises(rankwise.UsageError) as error:
        getattr(owner, name)
    assert text in str(error.value)
    assert isinstance(error.value, AttributeError)


def test_names_that_nobody_has_are_plain_errors() -> None:
    """Python's own questions, and members that exist, are no matter of tf's names."""
    for owner in (tf, tf.get_strategy(), tf.ReduceOp):
        assert not hasattr(owner, "__no_such_name__")
    assert [one.name for one in tf.ReduceOp] == ["SUM", "MEAN"]
    assert tf.ReduceOp["SUM"] is tf.ReduceOp.SUM is tf.ReduceOp("SUM")


def test_every_public_name_is_there() -> None:
    """All names of the room can be had, and have docstrings."""
    for name in tf.__all__:
        assert getattr(tf, name).__doc__


def test_the_default_strategy_is_one_replica() -> None:
    """Outside of any scope there is a replica's context of one replica, and nothing to wait for."""
    it = tf.get_strategy()
    assert (tf.has_strategy(), tf.in_cross_replica_context(), it.num_replicas_in_sync) == (False, False, 1)
    context = tf.get_replica_context()
    assert context is not None
    assert context.all_reduce("SUM", {"a": 2})["a"] == 2
    assert it.reduce("MEAN", torch.tensor([1.0, 3]), axis=0) == 2
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> float:
        loss = nn.MSELoss()(model(x), torch.ones(3, 1))
        loss.backward()
        optimizer.step()
        return loss.item()

    assert it.run(step, args=(torch.ones(3, 2),)) > it.run(step, kwargs={"x": torch.ones(3, 2)})


def test_what_is_subtracted_has_the_variables_type() -> None:
    """assign_sub takes numbers and tensors of any type, and reckons in the variable's own."""
    with tf.get_strategy().scope():
        single, double = tf.Variable(torch.tensor(10.0)), tf.Variable(torch.tensor(1.0, dtype=torch.float64))
        assert single.assign_sub(torch.tensor(3, dtype=torch.uint8)).read_value() == 7
        assert single.assign_sub(torch.tensor(True)).read_value() == 6
        assert double.assign_sub(0.1).read_value() == 0.9


def test_a_replica_has_one_context() -> None:
    """What a function keeps at its replica's context is there when it asks again."""
    strategy = tf.get_strategy()
    assert strategy.run(lambda: tf.get_replica_context() is tf.get_replica_context())


def test_losses_are_parts_of_the_global_mean() -> None:
    """compute_average_loss divides the weighted sum, and knows empty batches; regularization is divided by the replicas."""
    losses = torch.tensor([1.0, 2, 3])
    assert tf.compute_average_loss(losses) == 2
    assert tf.compute_average_loss(losses, torch.tensor([0.0, 1, 1]), global_batch_size=10) == 0.5
    assert tf.compute_average_loss(losses[:0]) == 0
    assert tf.scale_regularization_loss([losses, losses[:1]]) == 7


def test_rows_are_cut_in_any_batch() -> None:
    """Tensors, dicts, tuples and lists of texts are cut by rows, and tf's split covers all rows once."""
    batch = {"x": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "pair": (torch.arange(3), 5)}
    assert count_rows(batch) == 3
    part = cut_rows(batch, slice(1, 3))
    assert (part["x"].tolist(), part["names"], part["pair"][0].tolist(), part["pair"][1]) == (
        [[2, 3], [4, 5]],
        ["b", "c"],
        [1, 2],
        5,
    )
    with pytest.raises(rankwise.DataError, match="no tensor with rows"):
        count_rows({"a": None})
    for rows in range(9):
        for replicas in range(1, 5):
            parts = [range(rows)[find_part(rows, replicas, one)] for one in range(replicas)]
            assert [row for part in parts for row in part] == list(range(rows))


def test_what_is_told_of_a_loss_holds_no_graph() -> None:
    """`reduce` and `gather` give values without a gradient, with one replica as with several; those of a replica's context keep it."""
    strategy = tf.get_strategy()
    loss = torch.ones(2, requires_grad=True) * 2
    told = [
        strategy.reduce("SUM", loss),
        strategy.reduce("MEAN", loss, axis=0),
        strategy.gather(loss, axis=0),
    ]
    assert [one.requires_grad for one in told] == [False] * 3
    assert strategy.run(lambda: tf.get_replica_context().all_reduce("SUM", loss)).requires_grad
