"""Choose the route of a plan's blocks from the members' hosts and devices, the same on every member."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from craft.decide.step.replicas import Layout
from craft.decide.step.topology import host_first
from craft.groups.gloo import GlooGroup
from craft.groups.group import P2P, DeviceP2P
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.routes.between_twins import twin_route
from craft.worker.reduce.routes.direct import DirectRoute
from craft.worker.reduce.routes.flat import FlatRoute, word_bytes
from craft.worker.reduce.routes.flat_cuda import device_route
from craft.worker.reduce.routes.hierarchical import HierarchicalRoute
from craft.worker.reduce.routes.hierarchical_cuda import HierarchicalCudaRoute

logger = logging.getLogger(__name__)

ALONE = Layout()
"""Every replica is one worker."""


def route_of(
    group: P2P | None, hosts: Sequence[str], layout: BucketLayout, owners: Sequence[int], replicas: Layout = ALONE
) -> FlatRoute:
    """Return the route of one plan through ``group``; ``hosts`` names the host of each rank, ``replicas`` its replica."""
    size = word_bytes(owners, max(1, len(hosts)), len(layout.params))
    if replicas.slots and group is not None:
        return twin_route(group, replicas, layout, owners, size)
    spread = host_first(hosts, owners)
    if layout.on_device and spread is not None and isinstance(group, DeviceP2P):
        logger.info("gradients travel within %d hosts first, by NCCL", spread.num_hosts)
        return HierarchicalCudaRoute(group, layout, owners, size, spread)
    if layout.on_device:
        # Through host memory, blocks go straight to their owners on any host.
        return device_route(group, layout, owners, size)
    if isinstance(group, GlooGroup) and group.direct is not None:
        return DirectRoute(group, group.direct, layout, owners)
    if group is None or spread is None:
        return FlatRoute(group, layout, owners, size)
    return HierarchicalRoute(group, layout, owners, size, spread)
