"""Brings an adapter in when the script imports the framework that it adapts; costs a look into a dictionary per import.

Lightning finds strategies by a registry that a package must be imported to be in, and has no entry point for it. A script
that CRAFT runs needs no line for that. Adapters are above this room: they are named here, and imported by the script's own
import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ADAPTERS = {
    "lightning.pytorch": "craft.adapters.lightning.registration",
    "pytorch_lightning": "craft.adapters.lightning.registration",
}
"""What a script imports, and the module whose ``register(name)`` is called then."""


class FrameworkImports:
    """A finder that finds nothing itself: it has a module's own loader call the adapter once the module is there."""

    def __init__(self) -> None:
        self._awaited = dict(ADAPTERS)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        adapter = self._awaited.pop(name, None)
        if adapter is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _follow(spec, adapter)
        return spec


def _follow(spec: ModuleSpec, adapter: str) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = execute
        execute(module)
        importlib.import_module(adapter).register(spec.name)

    loader.exec_module = exec_module


def await_frameworks() -> None:
    """From now on an adapter comes with its framework; at once with one that is there (``craft run --preload``)."""
    sys.meta_path.insert(0, FrameworkImports())
    for name in ADAPTERS.keys() & sys.modules.keys():
        importlib.import_module(ADAPTERS[name]).register(name)
