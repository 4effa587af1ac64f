"""tf.distribute's words on torch: strategies, scope, run, reduce, global batches, coordinators, over the rest of rankwise.

    from rankwise import tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

Each replica is a process: `rankwise run --nproc-per-node 4 train.py`, or a process for each entry of TF_CONFIG. All names are here, and
under tf's own modules as well: ``tf.distribute.cluster_resolver.TFConfigClusterResolver`` is ``tf.TFConfigClusterResolver``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rankwise.base.lazy import find_homes, make_getattr
from rankwise.tf.missing import MODULES, explain

if TYPE_CHECKING:  # which names are public says _NAMES
    from rankwise.tf.checkpoints import *  # noqa: F403
    from rankwise.tf.datasets import *  # noqa: F403
    from rankwise.tf.losses import *  # noqa: F403
    from rankwise.tf.mirrored_strategies import *  # noqa: F403
    from rankwise.tf.parameter_servers import *  # noqa: F403
    from rankwise.tf.resolvers import *  # noqa: F403
    from rankwise.tf.strategy import *  # noqa: F403
    from rankwise.tf.values import *  # noqa: F403
    from rankwise.tf.variables import *  # noqa: F403

_NAMES = {
    "rankwise.tf.datasets": "AutoShardPolicy DistributedDataset InputContext InputOptions",
    "rankwise.tf.checkpoints": "BackupAndRestore Checkpoint CheckpointManager PreemptionCheckpointHandler TerminationConfig latest_checkpoint",
    "rankwise.tf.mirrored_strategies": "CentralStorageStrategy CommunicationImplementation CommunicationOptions MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy",
    "rankwise.tf.losses": "compute_average_loss scale_regularization_loss",
    "rankwise.tf.resolvers": "ClusterResolver ClusterSpec KubernetesClusterResolver SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver",
    "rankwise.tf.parameter_servers": "ClusterCoordinator MinSizePartitioner ParameterServerStrategy PerWorkerDataset PerWorkerIterator RemoteValue",
    "rankwise.tf.strategy": "ReplicaContext Strategy aggregate_gradients get_replica_context get_strategy has_strategy in_cross_replica_context",
    "rankwise.tf.values": "ReduceOp",
    "rankwise.tf.variables": "Variable VariableAggregation VariableSynchronization",
}
_HOME = find_homes(_NAMES)
_find = make_getattr(__name__, _HOME)

__all__ = [*_HOME]  # noqa: PLE0604 - strings all


def __getattr__(name: str) -> object:
    if name in MODULES:
        return sys.modules[__name__]
    if name not in _HOME:
        raise explain(name, _HOME)
    return _find(name)


def __dir__() -> list[str]:
    return sorted(__all__)
