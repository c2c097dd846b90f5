"""pytest plugin: ``strategy="craft"`` where a test of Lightning's leaves the strategy and the number of devices open."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.utilities.argparse import _defaults_from_env_vars

import craft.adapters.lightning  # noqa: F401  # registers the strategy

# Inside of what fills in PL_TRAINER_... variables: those leave nothing open, either.
_own = pl.Trainer.__init__.__wrapped__  # type: ignore[attr-defined]


def _is_open(named: dict[str, Any]) -> bool:
    """Whether Lightning would take its own strategy for one device, on the CPU."""
    one = named.get("devices", "auto") in ("auto", 1, "1") and named.get("num_nodes", 1) == 1
    plugins = named.get("plugins") or ()
    given = plugins if isinstance(plugins, list | tuple) else (plugins,)
    cluster = any(isinstance(each, ClusterEnvironment) for each in given)
    return (
        named.get("strategy", "auto") == "auto"
        and named.get("accelerator", "auto") in ("auto", "cpu")
        and one
        and not cluster
    )


@functools.wraps(_own)
def _by_craft(self: Any, *given: Any, **named: Any) -> None:
    if _is_open(named):
        named["strategy"] = "craft"
    _own(self, *given, **named)


pl.Trainer.__init__ = _defaults_from_env_vars(_by_craft)  # type: ignore[method-assign]
