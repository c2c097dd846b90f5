"""Read a checkpoint as plain tensors and values, under the names that a script uses; ``export.py`` writes them.

``torch.load(weights_only=True)`` accepts the values. Every chunk is checked.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import torch

from craft.protocol.errors import ConfigError
from craft.snapshots.checkpoint.sharded.reshard import restore_whole
from craft.snapshots.interop.dcp_contents import DcpContents
from craft.snapshots.state.serialized import Header
from craft.snapshots.state.tree import Builder, Items, Node, Nothing, Own, Table
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.tiers import Tiers

Progress = Callable[[int], None]


def tensors_of(tiers: Tiers, manifest: Manifest, progress: Progress | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by the keys of ``state_dict``; of several modules, with their names in front."""
    if manifest.kind == "dcp":
        return _dcp_values(DcpContents(tiers, manifest), progress, plain=False)
    restored = restore_whole(tiers, manifest, progress, registered=False)
    modules = _state_dicts(restored.header, restored.tensors)
    if len(modules) == 1:
        return dict(*modules.values())
    return {f"{name}.{key}": tensor for name, found in modules.items() for key, tensor in found.items()}


def contents_of(tiers: Tiers, manifest: Manifest, progress: Progress | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint: of a job ``{"model": ..., "registered": ..., "step": ..., "branch": ...}``."""
    if manifest.kind == "dcp":
        found = DcpContents(tiers, manifest)
        return _nested(_dcp_values(found, progress, plain=True), found.header.paths or {})
    restored = restore_whole(tiers, manifest, progress)
    return nested_values(restored.header, restored.tensors, manifest)


def nested_values(header: Header, tensors: Sequence[torch.Tensor], manifest: Manifest) -> dict[str, Any]:
    """Return the content of a job's checkpoint, made of whole ``tensors``, which need no mesh."""
    builder = Builder(tensors)
    registered = {
        name: _plain(builder.build(name, _without_functions(node), None)) for name, node in header.skeleton.items()
    }
    return {
        **_state_dicts(header, tensors),
        "registered": registered,
        "step": manifest.step,
        "branch": manifest.branch,
    }


def _state_dicts(header: Header, tensors: Sequence[torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the ``state_dict`` of each module."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, number in header.names.items():
        module, _, key = name.partition(".")
        found.setdefault(module, {})[key] = tensors[number]
    return found


def _without_functions(node: Node) -> Node:
    """Replace functions and classes, which a checkpoint only names, by None."""
    if isinstance(node, Own):
        return Nothing()
    if isinstance(node, Table):
        return Table(node.kind, node.keys, tuple(map(_without_functions, node.values)))
    if isinstance(node, Items):
        return Items(node.kind, tuple(map(_without_functions, node.items)))
    return node


def _plain(value: Any) -> Any:
    """Return the same without types that ``torch.load`` considers unsafe."""
    if isinstance(value, Mapping):
        plain = {key: _plain(value[key]) for key in value}
        return type(value)(plain) if isinstance(value, OrderedDict | Counter) else plain
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, set | frozenset):
        return set(value)
    if isinstance(value, numpy.ndarray):
        return _array(value)
    return value.item() if isinstance(value, numpy.generic) else value


def _array(value: numpy.ndarray[Any, Any]) -> Any:
    try:
        return torch.from_numpy(value.copy())
    except TypeError:
        # For example of strings.
        return value.tolist()


def _dcp_values(contents: DcpContents, progress: Progress | None, plain: bool) -> dict[str, Any]:
    """Return complete tensors by key, and on request other values."""
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(contents.parallel, "craft-export") as pool:
        for key, form in contents.header.forms.items():
            if form is not None or plain:
                value = contents.whole(key, pool)
                found[key] = value if form is not None else _unpickled(key, value)
            if progress is not None:
                progress(contents.manifest.total_bytes // len(contents.header.forms))
    return found


def _unpickled(key: str, data: torch.Tensor) -> Any:
    """Return what torch's planner has pickled, if it can be read without running code from the file."""
    try:
        return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{key} is an object that only torch.distributed.checkpoint.load reads, since that may run any code"
            f" ({str(error).splitlines()[0]}): export as safetensors, which has the tensors alone"
        ) from None


def _nested(flat: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """Return the nested state dict that a planner had flattened."""
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        *above, last = paths.get(key, (key,))
        place = root
        for each in above:
            place = place.setdefault(each, {})
        place[last] = value
    return {key: _listed(value) for key, value in root.items()}


def _listed(value: Any) -> Any:
    if type(value) is not dict:
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_listed(value[key]) for key in sorted(value)]
    return {key: _listed(each) for key, each in value.items()}
