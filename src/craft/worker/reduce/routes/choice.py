"""Which way the blocks of a plan travel: chosen by where the members and their gradients are, the same on every member."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from craft.decide.step.topology import host_first
from craft.groups.group import DeviceLines, Lines
from craft.worker.reduce.buckets import Layout
from craft.worker.reduce.routes.flat import Route, word_bytes
from craft.worker.reduce.routes.flat_cuda import device_route
from craft.worker.reduce.routes.hierarchical import RouteByHost
from craft.worker.reduce.routes.hierarchical_cuda import DeviceRouteByHost

logger = logging.getLogger(__name__)


def route_of(group: Lines | None, hosts: Sequence[str], layout: Layout, owners: Sequence[int]) -> Route:
    """The way of one plan through ``group``; ``hosts`` names the host of each of its ranks."""
    size = word_bytes(owners, max(1, len(hosts)), len(layout.params))
    spread = host_first(hosts, owners)
    if layout.on_device and spread is not None and isinstance(group, DeviceLines):
        logger.info("gradients travel within %d hosts first, by NCCL", spread.num_hosts)
        return DeviceRouteByHost(group, layout, owners, size, spread)
    if layout.on_device:
        # Through the memory of the host, blocks go straight to their owners, wherever these are.
        return device_route(group, layout, owners, size)
    if group is None or spread is None:
        return Route(group, layout, owners, size)
    return RouteByHost(group, layout, owners, size, spread)
