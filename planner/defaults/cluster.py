"""`default_cluster`, `cluster_of_program`: the cluster where none is given, and where it comes from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from cost_model import ClusterSpec
from cost_model.hardware.devices import DeviceSpec
from cost_model.hardware.reading import ClusterError
from planner.defaults.local_devices import LocalDevices, local_devices
from planner.defaults.ranks import Ranks, current_ranks
from planner.errors import JobError

VARIABLE = "SHARDPLAN_CLUSTER"
"""Environment variable with the user's cluster: its short form, or the path of its file."""

WITHOUT_GPU = "1x8xh100-sxm-80gb"
"""The cluster of a process that has neither a GPU nor ranks: one node of the kind that most models are trained on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DefaultCluster:
    """A cluster that nobody gave with the job.

    Attributes:
        cluster: the cluster.
        why: where it comes from, in words.
    """

    cluster: ClusterSpec
    why: str


def cluster_file() -> Path:
    """Return the path of the user's cluster file, which ``shardplan calibrate -o`` may write; it need not exist."""
    return platformdirs.user_config_path("shardplan") / "cluster.yaml"


def default_cluster(*, size: int | None = None) -> DefaultCluster:
    """Return the cluster of a job without one.

    It is the user's (``SHARDPLAN_CLUSTER``, or `cluster_file`), else the GPUs of this process's ranks or machine, else
    the ranks' CPUs, else `WITHOUT_GPU`.

    Args:
        size: number of devices of the job's mesh, in nodes like those found; None: as many as were found.

    Raises:
        ClusterError: the user's cluster cannot be read, or the catalogue lacks the GPU.
        JobError: the nodes have different numbers of ranks.
    """
    found = user_cluster() or _own_cluster()
    if size is None or size == found.cluster.size:
        return found
    per_node = min(size, found.cluster.devices_per_node)
    if size % per_node:
        return found  # the mesh and the cluster contradict each other, which is reported where both are known
    ranks = Ranks(total=size, per_node=per_node)
    return DefaultCluster(
        cluster=with_ranks(found.cluster, ranks), why=f"{found.why}, for the {size} devices of the mesh"
    )


def cluster_of_program(devices: Sequence[LocalDevices], hosts: Sequence[str]) -> DefaultCluster:
    """Return the cluster of ranks that say what they run on: the user's links and figures if there are any.

    Args:
        devices: what each rank sees; a rank uses one device.
        hosts: name of the host of each rank.

    Raises:
        ClusterError: the ranks of one host have different devices, the user's cluster cannot be read, or the catalogue
            lacks the GPU.
        JobError: the hosts have different numbers of ranks.
    """
    by_host: dict[str, list[LocalDevices]] = {}
    for device, host in zip(devices, hosts, strict=True):
        by_host.setdefault(host, []).append(device)
    for host, own in by_host.items():
        if len(products := sorted({device.product or "no GPU" for device in own})) > 1:
            raise ClusterError(
                f"the ranks of {host} have different devices ({', '.join(products)}); a plan needs devices of one type "
                "in each host"
            )
    per_host = sorted({len(own) for own in by_host.values()})
    if len(per_host) > 1:
        raise JobError(
            f"some hosts have {per_host[0]} ranks, and some {per_host[-1]}.",
            what_to_do="Start equally many ranks on each host, or give the cluster.",
            field="cluster",
        )
    ranks = Ranks(total=len(hosts), per_node=per_host[0])
    users = user_cluster()
    if users is not None:
        cluster = with_ranks(users.cluster, ranks)
        why = users.why if cluster == users.cluster else f"devices and links of {users.why}, {ranks}"
        return DefaultCluster(cluster=cluster, why=why)
    found = sorted({device.product for device in devices})
    if len(found) == 1:
        least = min(devices, key=lambda device: device.memory_bytes)
        return DefaultCluster(cluster=cluster_of_ranks(least.spec, ranks), why=why_ranks(ranks, found[0]))
    groups = [
        {"nodes": 1, "device": min(own, key=lambda device: device.memory_bytes).spec.to_dict()}
        for own in by_host.values()
    ]
    cluster = ClusterSpec.from_dict({"devices_per_node": ranks.per_node, "groups": groups})
    return DefaultCluster(cluster=cluster, why=why_ranks(ranks, " and ".join(name or "no GPU" for name in found)))


def with_ranks(cluster: ClusterSpec, ranks: Ranks) -> ClusterSpec:
    """Return ``cluster`` with the nodes and devices of ``ranks``; devices, links and what was measured stay.

    Sweeps of more ranks than there are do not stay.
    """
    if (cluster.nodes, cluster.devices_per_node) == (ranks.nodes, ranks.per_node):
        return cluster
    cards = round(cluster.cards_per_node * ranks.per_node / cluster.devices_per_node)
    return dataclasses.replace(
        cluster,
        nodes=ranks.nodes,
        devices_per_node=ranks.per_node,
        cards_per_node=max(1, cards),
        reserved_gb=(max(cluster.reserved_gb),) * ranks.nodes if cluster.reserved_gb else (),
        sweeps=tuple(
            sweep for sweep in cluster.sweeps if sweep.ranks_per_node <= ranks.per_node and sweep.nodes <= ranks.nodes
        ),
    )


def cluster_of_ranks(device: DeviceSpec, ranks: Ranks) -> ClusterSpec:
    """Return the cluster of ``ranks`` with one ``device`` each and the device's usual links."""
    return ClusterSpec(
        nodes=ranks.nodes,
        devices_per_node=ranks.per_node,
        device=device,
        intra_node=device.intra_node,
        inter_node=device.inter_node,
        cards_per_node=max(1, round(ranks.per_node * device.cards_per_device)),
    )


def user_cluster() -> DefaultCluster | None:
    """Return the user's cluster: that of ``SHARDPLAN_CLUSTER``, else that of `cluster_file`; None: there is none.

    Raises:
        ClusterError: it cannot be read.
    """
    text = os.environ.get(VARIABLE)
    if text:
        try:
            return DefaultCluster(cluster=ClusterSpec.parse(text), why=f"the environment's {VARIABLE}")
        except ClusterError as error:
            raise ClusterError(f"{VARIABLE}: {error}") from error
    file = cluster_file()
    return DefaultCluster(cluster=ClusterSpec.parse(file), why=_shortened(file)) if file.is_file() else None


def _own_cluster() -> DefaultCluster:
    """Return the cluster of this process's ranks or GPUs, else `WITHOUT_GPU`."""
    ranks, devices = current_ranks(), local_devices()
    if ranks is None and devices.count == 0:
        how = f"name yours with cluster, {VARIABLE} or {_shortened(cluster_file())}"
        return DefaultCluster(cluster=ClusterSpec.parse(WITHOUT_GPU), why=f"there is no GPU here; {how}")
    ranks = ranks or Ranks(total=devices.count, per_node=devices.count)
    return DefaultCluster(cluster=cluster_of_ranks(devices.spec, ranks), why=why_ranks(ranks, devices.product))


def why_ranks(ranks: Ranks, product: str) -> str:
    """Return in words that a cluster is that of ``ranks`` with a GPU ``product`` each; "": with no GPU."""
    if product:
        return f"{ranks}, {product}"
    return f"{ranks} without a GPU; time and memory are those of the catalogue's device cpu"


def _shortened(file: Path) -> str:
    """Return the path of ``file``, from ~ on where it is in the user's home."""
    home = Path.home()
    return f"~/{file.relative_to(home)}" if file.is_relative_to(home) else str(file)
