"""Which way the blocks of a plan travel: chosen by where the members and their gradients are, the same on every member."""

from __future__ import annotations

from collections.abc import Sequence

from craft.decide.hosts import host_first
from craft.groups.group import Lines
from craft.worker.by_host import RouteByHost
from craft.worker.device_route import device_route
from craft.worker.layout import Layout
from craft.worker.route import Route, word_bytes


def route_of(group: Lines | None, hosts: Sequence[str], layout: Layout, owners: Sequence[int]) -> Route:
    """The way of one plan through ``group``; ``hosts`` names the host of each of its ranks."""
    size = word_bytes(owners, max(1, len(hosts)), len(layout.params))
    if layout.on_device:
        return device_route(group, layout, owners, size)
    spread = host_first(hosts, owners)
    if group is None or spread is None:
        return Route(group, layout, owners, size)
    return RouteByHost(group, layout, owners, size, spread)
