"""CRAFT keeps PyTorch training jobs running through failures, bit for bit.

``import craft`` is cheap: torch is loaded by ``join()``, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from craft import dcp, techniques
    from craft.protocol import events
    from craft.protocol.errors import BitsDiffer, ConfigError, CraftError, Fenced, GroupError, Unreachable
    from craft.worker.api.job import Job
    from craft.worker.api.steps import Step
    from craft.worker.entry.join import attend, join
    from craft.worker.external.external_worker import Guest
    from craft.worker.external.generation_follower import Change

__version__ = "0.1.0"

__all__ = [
    "BitsDiffer",
    "Change",
    "ConfigError",
    "CraftError",
    "Fenced",
    "GroupError",
    "Guest",
    "Job",
    "Step",
    "Unreachable",
    "attend",
    "dcp",
    "events",
    "join",
    "techniques",
]

_HOMES = {
    "BitsDiffer": "craft.protocol.errors",
    "ConfigError": "craft.protocol.errors",
    "CraftError": "craft.protocol.errors",
    "Fenced": "craft.protocol.errors",
    "GroupError": "craft.protocol.errors",
    "Unreachable": "craft.protocol.errors",
    "Change": "craft.worker.external.generation_follower",
    "Guest": "craft.worker.external.external_worker",
    "Job": "craft.worker.api.job",
    "Step": "craft.worker.api.steps",
    "attend": "craft.worker.entry.join",
    "join": "craft.worker.entry.join",
}
_MODULES = {"dcp": "craft.dcp", "events": "craft.protocol.events", "techniques": "craft.techniques"}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'craft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
