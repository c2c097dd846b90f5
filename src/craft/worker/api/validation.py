"""Checks on what a script gives its job; each refusal says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from craft.decide.techniques import Divergence, Loss
from craft.decide.techniques.technique import Chosen
from craft.protocol.errors import ConfigError, Refused
from craft.protocol.events import Event
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.state.shards import is_sharded
from craft.worker.data.source_args import is_stream


def check_model(model: torch.nn.Module, *, sharded: bool = False) -> None:
    """Raise ConfigError if CRAFT cannot keep copies of ``model`` identical; ``sharded``: in a replica that may shard it."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the model'} is a SyncBatchNorm, which exchanges statistics inside the forward pass and so"
                " would make a microbatch depend on who computes the others: use BatchNorm or GroupNorm instead"
            )
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{name or 'the model'} is an embedding with max_norm, which changes its weight inside the forward pass and so"
                " would give every worker another one: leave max_norm out, and after the optimizer's step,"
                " under torch.no_grad(), do weight.copy_(weight.renorm(2, 0, max_norm))"
            )
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the model is wrapped in DistributedDataParallel: pass the plain module, CRAFT replaces it"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ConfigError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel, the older FSDP: shard the plain module with"
                " torch.distributed.fsdp.fully_shard, over a mesh of job.mesh(shard=...)"
            )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_sharded(value) and not sharded:
            raise ConfigError(
                f"{name} is a DTensor, as fully_shard and parallelize_module make them, on a mesh that CRAFT does not know: start"
                " the job with --workers-per-replica, and make the mesh with job.mesh(shard=...)"
            )
        if torch.nn.parameter.is_lazy(value):
            raise ConfigError(f"{name} has no shape yet: run one batch through the model before job.replicate(model)")


def check_registered(name: str, item: Any, registered: Mapping[str, Stateful]) -> None:
    """Raise ConfigError unless ``item`` has state to save and restore, and an unused name."""
    if isinstance(item, DataLoader):
        raise ConfigError(
            f"register({name}=...) got a {type(item).__qualname__}: its place in the data follows the job without that: give it"
            " to job.steps, and do not register it"
        )
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise ConfigError(
            f"register({name}=...) got a {type(item).__qualname__}, which has no state_dict and load_state_dict"
        )
    if name in registered and registered[name] is not item:
        raise ConfigError(f"register({name}=...): something else is registered under this name")


def check_optimizers(registered: Mapping[str, Stateful], modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise ConfigError if an optimizer trains a parameter of no replicated module: every worker would train a different copy."""
    params = [param for module in modules.values() for param in module.parameters()]
    known = set(map(id, params))
    hint = ""
    if any(map(is_sharded, params)):
        hint = "; make the optimizer after fully_shard and parallelize_module, which put other parameters in the place of these"
    for name, item in registered.items():
        groups = getattr(item, "param_groups", ())
        for param in (each for group in groups for each in group["params"]):
            if param.requires_grad and id(param) not in known:
                raise ConfigError(
                    f"the optimizer registered as {name} has a parameter of shape {tuple(param.shape)} that is in no module"
                    " given to job.replicate: every worker would train its own. Replicate the module that it is of"
                    f"{hint}"
                )


def check_attempts(data: Any, techniques: Chosen, has_state: bool) -> None:
    """Raise ConfigError or Refused unless steps over ``data`` can be undone and retried by other workers."""
    if not has_state:
        raise ConfigError(
            "job.attempts() before job.replicate, job.register or job.register_state: there is no state that could be"
            " put back after an attempt that failed"
        )
    if is_stream(data):
        raise ConfigError(
            "job.attempts() takes no stream: leave data out, and read what belongs to (attempt.step, microbatch)"
        )
    loader = data if isinstance(data, DataLoader) else None
    if isinstance(data if loader is None else loader.dataset, IterableDataset):
        raise ConfigError(
            "job.attempts() takes no IterableDataset: leave data out, and read what belongs to (attempt.step, microbatch)"
        )
    if loader is not None and type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ConfigError(
            f"job.attempts() takes no DataLoader with a {type(loader.batch_sampler).__qualname__}: give it a sampler and a"
            " batch_size, or leave data out and read what belongs to (attempt.step, microbatch)"
        )
    # Techniques that would change a step whose updates are made before its commit.
    loss, divergence = techniques.get(Loss), techniques.get(Divergence)
    if loss is not None and loss.settings.answer == "shrink":
        raise Refused(
            "--on-loss shrink with job.attempts(): the body of an attempt has seen the whole step before anything could be"
            " dropped from it; use redo or wait"
        )
    if divergence is not None and divergence.settings.answer in ("skip", "lower-lr"):
        raise Refused(
            f"--on-divergence {divergence.settings.answer} with job.attempts(): the body of an attempt makes its own updates;"
            " use report, rollback or stop"
        )


def check_whole(techniques: Chosen) -> None:
    """Raise Refused if a technique acts on gradients of steps that every worker computes in full."""
    divergence = techniques.get(Divergence)
    if divergence is not None and (divergence.settings.answer != "report" or divergence.settings.spikes is not None):
        raise Refused(
            f"--on-divergence {divergence.settings.answer} in a fit that every worker computes whole (manual optimization,"
            " several loaders, iterables): gradients and losses do not pass through CRAFT, which cannot see them; leave it out"
        )


def check_event(event: object) -> None:
    """Raise ConfigError unless ``job.on`` can listen to ``event``."""
    if not (isinstance(event, type) and issubclass(event, Event)):
        raise ConfigError(f"job.on({event!r}, ...): the first argument is an event type of craft.events")


def check_epochs(data: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of ``job.epochs`` that contradict the number of passes."""
    for taken in ("steps", "epochs"):
        if taken in options:
            raise ConfigError(f"job.epochs(n, data, {taken}=...): n is the number of passes; leave {taken} out")
    if is_stream(data):
        raise ConfigError("job.epochs(n, stream): a stream has no passes; use job.steps(stream, steps=...)")
