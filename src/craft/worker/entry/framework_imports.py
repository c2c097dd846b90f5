"""Import an adapter when the script imports its framework; costs one dictionary look-up per import.

Lightning finds strategies in a registry that a package enters when it is imported, and has no entry point for it. This module
saves the script that import. Adapters are above this package: they are only named here.
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
"""By framework module, the adapter module whose ``register(name)`` is called after its import."""


class FrameworkImports:
    """A finder that makes a framework's loader call the adapter once the framework is imported."""

    def __init__(self) -> None:
        self._awaited = dict(ADAPTERS)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        adapter = self._awaited.pop(name, None)
        if adapter is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _register_after_import(spec, adapter)
        return spec


def _register_after_import(spec: ModuleSpec, adapter: str) -> None:
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = execute
        execute(module)
        importlib.import_module(adapter).register(spec.name)

    loader.exec_module = exec_module


def await_frameworks() -> None:
    """Install the finder, and register adapters of frameworks that are already imported (``craft run --preload``)."""
    sys.meta_path.insert(0, FrameworkImports())
    for name in ADAPTERS.keys() & sys.modules.keys():
        importlib.import_module(ADAPTERS[name]).register(name)
