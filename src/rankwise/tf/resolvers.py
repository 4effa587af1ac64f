"""Who is in a job, in tf's words: cluster specifications and resolvers. They read the variables that ``rankwise.init()`` reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, final

from rankwise.base.environ import environ
from rankwise.base.errors import UsageError
from rankwise.base.host_list import expand_hosts
from rankwise.base.identity import read_int
from rankwise.base.identity_clusters import read_kubernetes, refuse_no_port
from rankwise.base.identity_facts import expand_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HOW = 'TF_CONFIG is JSON: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'


@final
class ClusterSpec:
    """Addresses of tasks by job.

    Args:
        cluster: ``{"worker": ["host:port", ...], "ps": [...]}``, or another ``ClusterSpec``.
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]] | ClusterSpec) -> None:
        jobs = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        self._jobs = {str(job): [str(address) for address in tasks] for job, tasks in jobs.items()}

    def as_dict(self) -> dict[str, list[str]]:
        """Return the addresses by job."""
        return {job: list(tasks) for job, tasks in self._jobs.items()}

    def job_tasks(self, job_name: str) -> list[str]:
        """Return a job's addresses.

        Args:
            job_name: As in ``"worker"``.

        Raises:
            UsageError: There is no such job.
        """
        if job_name not in self._jobs:
            known = ", ".join(self._jobs) or "none"
            raise UsageError(f"no job {job_name!r} in this cluster", hint=f"its jobs are {known}")
        return list(self._jobs[job_name])

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return one task's address.

        Args:
            job_name: As in ``"worker"``.
            task_index: From 0.

        Raises:
            UsageError: There is no such task.
        """
        tasks = self.job_tasks(job_name)
        if not 0 <= task_index < len(tasks):
            raise UsageError(f"task {task_index} of job {job_name!r}, which has {len(tasks)}")
        return tasks[task_index]

    def __bool__(self) -> bool:
        """Whether there is any job."""
        return bool(self._jobs)

    def __repr__(self) -> str:
        return f"ClusterSpec({self._jobs})"


class ClusterResolver:
    """A cluster, and which of its tasks this process is.

    Attributes:
        task_type: The job of this process; None if not known.
        task_id: Its index there; None if not known.
    """

    _where = "the cluster"

    def __init__(self, cluster: ClusterSpec, task_type: str | None, task_id: int | None, master: str = "") -> None:
        self.task_type, self.task_id = task_type, task_id
        self._cluster, self._master = cluster, master

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return self._cluster

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task; of this one if none is named.

        Args:
            task_type: Its job.
            task_id: Its index.
            rpc_layer: The scheme of the address: ``"grpc"`` makes ``grpc://host:port``.

        Raises:
            UsageError: There is no such task.
        """
        kind = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        address = self._master
        if kind is not None and index is not None:
            address = self._cluster.task_address(kind, index)
        return f"{rpc_layer}://{address}" if rpc_layer and address else address

    def order(self, jobs: Sequence[str]) -> tuple[int, list[str]] | None:
        """Return this process's rank and all addresses in the order of ranks; None if it is not known which task this is.

        Args:
            jobs: The order of the jobs; each that is not named comes last.

        Raises:
            UsageError: This process's task is not in the cluster, or the first one has no port.
        """
        if self.task_type is None or self.task_id is None:
            return None
        spec = self._cluster.as_dict()
        ranks = [(job, index) for job in jobs for index in range(len(spec.get(job, [])))]
        if (self.task_type, self.task_id) not in ranks:
            raise UsageError(
                f"this process is task {self.task_type} {self.task_id}, and the cluster has {spec}",
                hint=f"tasks that train here are of {', '.join(jobs)}",
            )
        job, index = ranks[0]
        refuse_no_port(job, spec[job][index], self._where)
        return ranks.index((self.task_type, self.task_id)), [spec[job][index] for job, index in ranks]


@final
class SimpleClusterResolver(ClusterResolver):
    """A cluster as it is passed.

    Args:
        cluster_spec: The cluster.
        master: The address where none of its tasks is meant.
        task_type: The job of this process.
        task_id: Its index there.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Sequence[str]],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        ClusterResolver.__init__(self, ClusterSpec(cluster_spec), task_type, task_id, master)


@final
class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG; without it the cluster is empty, and this process has no task.

    Args:
        task_type: In place of what the variable says.
        task_id: In place of what the variable says.
        env: The environment; None: this process's.

    Raises:
        UsageError: The variable can't be read.
    """

    _where = "TF_CONFIG"

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        text = (environ() if env is None else env).get("TF_CONFIG", "").strip()
        try:
            config = json.loads(text) if text else {}
            task = config.get("task", {})
            cluster = ClusterSpec(config.get("cluster", {}))
            kind, index = task.get("type"), task.get("index")
            index = None if index is None else int(index)
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"TF_CONFIG can't be read: {type(error).__name__}: {error}", hint=_HOW) from None
        ClusterResolver.__init__(
            self, cluster, kind if task_type is None else task_type, index if task_id is None else task_id
        )


@final
class SlurmClusterResolver(ClusterResolver):
    """Reads the variables of an srun step: one task of the cluster for each of its tasks.

    Args:
        jobs: How many tasks each job has, in the order of Slurm's tasks; None: all are workers.
        port_base: The port of a host's first task; the next has the next.
        env: The environment; None: this process's.

    Raises:
        UsageError: This is not an srun step, or it has another number of tasks.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        variables = environ() if env is None else env
        rank = read_int(variables, "SLURM_PROCID")
        hosts = expand_hosts(variables.get("SLURM_STEP_NODELIST", "") or variables.get("SLURM_NODELIST", ""))
        tasks = expand_tasks(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if rank is None or not hosts or len(hosts) != len(tasks):
            raise UsageError(
                f"SLURM_PROCID={variables.get('SLURM_PROCID', '')}, {len(hosts)} hosts in SLURM_STEP_NODELIST, {len(tasks)} numbers in SLURM_STEP_TASKS_PER_NODE",
                hint="start the script by srun, in whose tasks these variables are",
            )
        addresses = [f"{host}:{port_base + index}" for host, n in zip(hosts, tasks, strict=True) for index in range(n)]
        jobs = {"worker": len(addresses)} if jobs is None else jobs
        if sum(jobs.values()) != len(addresses) or not 0 <= rank < len(addresses):
            raise UsageError(
                f"SLURM_PROCID={rank}, jobs={dict(jobs)}, and the srun step has {len(addresses)} tasks",
                hint="the jobs together have as many tasks as srun --ntasks has started",
            )
        names = [(job, index) for job, number in jobs.items() for index in range(number)]
        left = iter(addresses)
        spec = {job: [next(left) for _ in range(number)] for job, number in jobs.items()}
        ClusterResolver.__init__(self, ClusterSpec(spec), *names[rank])


@final
class KubernetesClusterResolver(ClusterResolver):
    """Reads the variables of an indexed Kubernetes job, whose pods differ in their index only; it queries no API server.

    Needs JOB_COMPLETION_INDEX, which Kubernetes sets, WORLD_SIZE, and MASTER_ADDR with the name of the pod with index
        0: ``train-0.train``.

    Args:
        tf_server_port: The port of each task.
        env: The environment; None: this process's.

    Raises:
        UsageError: This is not such a pod.
    """

    def __init__(self, tf_server_port: int = 8470, *, env: Mapping[str, str] | None = None) -> None:
        variables = environ() if env is None else env
        it = read_kubernetes(variables)
        name, dot, domain = variables.get("MASTER_ADDR", "").partition(".")
        stem, dash, index = name.rpartition("-")
        if it is None or not dash or index != "0":
            raise UsageError(
                f"JOB_COMPLETION_INDEX={variables.get('JOB_COMPLETION_INDEX', '')}, WORLD_SIZE={variables.get('WORLD_SIZE', '')}, MASTER_ADDR={variables.get('MASTER_ADDR', '')}",
                hint="an indexed job with MASTER_ADDR=NAME-0.SERVICE and WORLD_SIZE=its completions; elsewhere SimpleClusterResolver",
            )
        hosts = [f"{stem}-{number}{dot}{domain}:{tf_server_port}" for number in range(it.world_size)]
        ClusterResolver.__init__(self, ClusterSpec({"worker": hosts}), "worker", it.rank)


def find_resolver(given: Any, *, rank: int, world_size: int) -> ClusterResolver:
    """Return the resolver of a job: the given one, TF_CONFIG's, or one that names ranks."""
    if given is not None:
        return given  # type: ignore[no-any-return]
    by_config = TFConfigClusterResolver()
    if by_config.cluster_spec() and by_config.task_type is not None:
        return by_config
    names = ClusterSpec({"worker": [f"rank-{number}" for number in range(world_size)]})
    return SimpleClusterResolver(names, task_type="worker", task_id=rank)
