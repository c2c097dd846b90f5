"""Which way the blocks of a plan travel: chosen by where the members are, the same on every member."""

from __future__ import annotations

from collections.abc import Sequence

from craft.decide.hosts import host_first
from craft.groups.group import Group
from craft.protocol.membership import Generation
from craft.worker.by_host import RouteByHost
from craft.worker.layout import Layout
from craft.worker.route import Route, word_bytes


def route_of(group: Group | None, generation: Generation | None, layout: Layout, owners: Sequence[int]) -> Route:
    """The way of one plan through the group of ``generation``."""
    members = generation.members if generation is not None else ()
    size = word_bytes(owners, max(1, len(members)), len(layout.params))
    spread = host_first([member.host for member in members], owners) if group is not None else None
    if group is None or spread is None:
        return Route(group, layout, owners, size)
    return RouteByHost(group, layout, owners, size, spread)
