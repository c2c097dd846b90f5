"""Export a checkpoint in a format that other programs read: a new file or directory, complete or absent."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from craft.protocol.errors import ConfigError, SnapshotError
from craft.snapshots.interop.named_values import contents_of, tensors_of
from craft.snapshots.store.atomic_files import sync
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.tiers import Tiers

Form = Literal["safetensors", "torch", "dcp"]


def export(
    tiers: Tiers, manifest: Manifest, form: Form, out: Path, progress: Callable[[int], None] | None = None
) -> None:
    """Write a checkpoint to ``out``: as ``safetensors`` only tensors (of a job: of its modules); otherwise all of it.

    Raises ConfigError if that is impossible here, and SnapshotError if a chunk is missing or damaged.
    """
    if form == "safetensors":
        _check_safetensors()
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists already: remove it, or give another name")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory {out.absolute().parent}: make it first")
    write = {"safetensors": _write_safetensors, "torch": _write_torch, "dcp": _write_dcp}[form]
    found = (tensors_of if form == "safetensors" else contents_of)(tiers, manifest, progress)
    # Beside it, so that a rename finishes it.
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        write(found, manifest, unfinished)
        for each in (*unfinished.rglob("*"), unfinished):
            sync(each)
        os.rename(unfinished, out)
        sync(out.absolute().parent)
    except Exception as error:
        # Each library has its own errors for a full disk.
        raise SnapshotError(f"{out} could not be written: {error}", str(out)) from error
    finally:
        _remove(unfinished)


def _check_safetensors() -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the format safetensors needs the package safetensors: pip install 'craft[export]', or export as torch"
        ) from None


def _write_safetensors(found: Mapping[str, torch.Tensor], manifest: Manifest, path: Path) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    tensors = {}
    for name, tensor in found.items():
        # A tensor with two names is written twice: the format has no other way, and a model needs both.
        tensors[name] = tensor.contiguous().clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    save_file(tensors, path, {"format": "pt", "step": str(manifest.step), "branch": str(manifest.branch)})


def _write_torch(found: Mapping[str, Any], _: Manifest, path: Path) -> None:
    torch.save(found, path)


def _write_dcp(found: dict[str, Any], _: Manifest, path: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        # A single process is intended.
        warnings.simplefilter("ignore")
        try:
            save(found, storage_writer=FileSystemWriter(path), no_dist=True)
        except CheckpointException as error:
            # It is not an Exception, and its text is a traceback: the error inside says what happened.
            raise next(iter(error.failures.values()))[0] from None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
