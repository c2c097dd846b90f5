"""Takes a checkpoint out of the store, in a form that other programs read.

Enters: stores and a manifest. Leaves: a file or a directory that was not there before, whole or not at all, of tensors whose
every chunk was checked. ``craft checkpoints export`` calls it.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

from craft.protocol.errors import ConfigError, SnapshotError
from craft.snapshots.manifest import Manifest
from craft.snapshots.portable import Header
from craft.snapshots.restore import Restored, restore
from craft.snapshots.skeleton import Builder, Items, Node, Nothing, Own, Table
from craft.snapshots.tiers import Tiers
from craft.snapshots.whole_files import sync_folder

Form = Literal["safetensors", "torch", "dcp"]


def export(
    tiers: Tiers, manifest: Manifest, form: Form, out: Path, progress: Callable[[int], None] | None = None
) -> None:
    """Write a checkpoint to ``out``. ``safetensors``: the modules alone; ``torch`` and ``dcp``: also what was registered.

    Raises ConfigError if that cannot be done here, and SnapshotError if a chunk is missing or damaged.
    """
    write = {"safetensors": _write_safetensors, "torch": _write_torch, "dcp": _write_dcp}[form]
    if form == "safetensors":
        _check_safetensors()
    if os.path.lexists(out):
        raise ConfigError(f"{out} is there already: remove it, or give another name")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory {out.absolute().parent}: make it first")
    if manifest.kind != "job":
        raise ConfigError(
            f"checkpoint {manifest.name} was written through torch.distributed.checkpoint: load it there, with"
            f" craft.dcp.StorageReader({tiers.url!r}, {manifest.step})"
        )
    restored = restore(tiers, manifest, progress=progress)
    # Beside it, so that a rename is all that is left to do.
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        write(restored, unfinished)
        _make_durable(unfinished)
        os.rename(unfinished, out)
        sync_folder(out.absolute().parent)
    except Exception as error:
        # Each library has errors of its own for a disk that is full.
        raise SnapshotError(f"{out} could not be written: {error}", str(out)) from error
    finally:
        _remove(unfinished)


def state_dicts(header: Header, tensors: list[torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """For each module what its ``state_dict`` gave."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, number in header.names.items():
        module, _, key = name.partition(".")
        found.setdefault(module, {})[key] = tensors[number]
    return found


def contents(restored: Restored) -> dict[str, Any]:
    """Everything, as plain values that ``torch.load(weights_only=True)`` takes."""
    builder = Builder(restored.tensors)
    registered = {
        name: _plain(builder.build(name, _without_functions(node), None))
        for name, node in restored.header.skeleton.items()
    }
    return {
        **state_dicts(restored.header, restored.tensors),
        "registered": registered,
        "step": restored.manifest.step,
        "branch": restored.manifest.branch,
    }


def _without_functions(node: Node) -> Node:
    """None in the place of functions and classes, which are only named in a checkpoint."""
    if isinstance(node, Own):
        return Nothing()
    if isinstance(node, Table):
        return Table(node.kind, node.keys, tuple(map(_without_functions, node.values)))
    if isinstance(node, Items):
        return Items(node.kind, tuple(map(_without_functions, node.items)))
    return node


def _plain(value: Any) -> Any:
    """The same without types that ``torch.load`` would call unsafe."""
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
        # Of strings, say.
        return value.tolist()


def _check_safetensors() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the format safetensors needs the package safetensors: pip install 'craft[export]', or export as torch"
        ) from None


def _write_safetensors(restored: Restored, path: Path) -> None:
    from safetensors.torch import save_file

    modules = state_dicts(restored.header, restored.tensors)
    prefixed = {f"{module}.{key}": tensor for module, found in modules.items() for key, tensor in found.items()}
    names = (
        prefixed if len(modules) > 1 else {key: tensor for found in modules.values() for key, tensor in found.items()}
    )
    seen: set[int] = set()
    tensors = {}
    for name, tensor in names.items():
        # A tensor of two names is written twice: the format has no other way, and a model wants both.
        tensors[name] = tensor.contiguous().clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    manifest = restored.manifest
    save_file(tensors, path, {"format": "pt", "step": str(manifest.step), "branch": str(manifest.branch)})


def _write_torch(restored: Restored, path: Path) -> None:
    torch.save(contents(restored), path)


def _write_dcp(restored: Restored, path: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        # That there is only one process is what is wanted.
        warnings.simplefilter("ignore")
        try:
            save(contents(restored), storage_writer=FileSystemWriter(path), no_dist=True)
        except CheckpointException as error:
            # It is no Exception, and its text is a traceback: what it carries says what happened.
            raise next(iter(error.failures.values()))[0] from None


def _make_durable(path: Path) -> None:
    for each in (*path.rglob("*"), path) if path.is_dir() else (path,):
        file = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
