"""``Job``: the object that ``craft.join()`` returns, and a script's whole interface to CRAFT."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from craft.protocol.errors import ConfigError
from craft.protocol.events import Event
from craft.settings.worker import WorkerSettings
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.transfer.donor import Donor
from craft.worker.api import collectives, evaluation
from craft.worker.api.attempts import Attempts, numbers
from craft.worker.api.loop_builder import LoopBuilder
from craft.worker.api.membership_view import MembershipView
from craft.worker.api.steps import Epochs, Steps
from craft.worker.api.validation import check_attempts, check_epochs, check_event, check_model
from craft.worker.data.sources import Collate
from craft.worker.loop.pre_loop_calls import PreLoopCalls
from craft.worker.loop.training_loop import TrainingLoop
from craft.worker.membership.client import MembershipClient
from craft.worker.replica.link import ReplicaLink
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel
from craft.worker.report.reporter import paused
from craft.worker.state.checkpoint_target import CheckpointRequest, check_tag

M = TypeVar("M", bound=torch.nn.Module)
E = TypeVar("E", bound=Event)
R = TypeVar("R")


class Job(MembershipView):
    """This worker's handle on the training job. Call its methods from the main thread."""

    def __init__(
        self,
        settings: WorkerSettings,
        membership: MembershipClient,
        channel: Channel | None,
        activity: ActivityPage,
        donor: Donor | None,
        reserve: Reserve | None = None,
        link: ReplicaLink | None = None,
    ) -> None:
        """``link``: to the other workers of the replica, if it has several."""
        self._activity = activity
        self._handlers: list[tuple[type[Event], Callable[[Any], None]]] = []
        self._loops = LoopBuilder(settings, membership, channel, activity, donor, reserve, self._emit, link)
        super().__init__(settings, membership, self._loops.participant)

    def replicate(self, model: M) -> M:
        """Keep the parameters and buffers of ``model`` identical on every worker; return ``model``.

        A sharded model is kept identical on the workers of the same position: give it here after it is sharded.
        """
        check_model(model, sharded=self._loops.replica is not None)
        self._not_training("replicate")
        self._loops.add_model(model)
        return model

    def mesh(self, **dimensions: int) -> DeviceMesh:
        """Return a mesh over the workers of this replica, such as ``job.mesh(shard=2, tp=2)``, for ``fully_shard`` and others.

        The sizes multiply to ``--workers-per-replica``. The samples of a microbatch are divided over the dimensions named
        ``shard``, ``dp_shard`` or ``fsdp``, unless ``job.steps(split=...)`` names others.
        """
        self._not_training("mesh")
        return self._loops.mesh(dimensions)

    def register(self, **items: Any) -> None:
        """Register stateful objects: CRAFT saves, restores and transfers their state.

        Each has ``state_dict`` and ``load_state_dict``: optimizers, schedulers, moving averages.
        """
        self._not_training("register")
        for name, item in items.items():
            self._loops.register(name, item)

    def register_state(self, *, save: Callable[[], Any], load: Callable[[Any], Any], name: str | None = None) -> None:
        """Register state that no object with a ``state_dict`` holds; ``load`` takes what ``save`` returned.

        ``save`` returns tensors and plain data. ``name`` tells several apart, and is the same on every worker.
        """
        self._not_training("register")
        self._loops.register_state(save, load, name)

    def steps(
        self,
        data: Any,
        *,
        global_batch: int | None = None,
        microbatches: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        steps_per_epoch: int | None = None,
        start_step: int = 0,
        split: Sequence[str] | None = None,
    ) -> Steps:
        """Return the loop over the job's steps. A script may run several loops in sequence; step numbers continue.

        ``data`` is a dataset, map-style or iterable, a ``DataLoader`` (CRAFT takes over its collate function, workers, sampler
        and pinning), or ``stream(microbatch, num_microbatches, start_step) -> iterator``. The global batch is divided into
        ``microbatches`` (default: the number of slots), a number that never changes. ``steps_per_epoch`` shortens a pass over a
        dataset. A script that loads its own file passes ``start_step``, the number of steps that the file includes. ``split``
        names the dimensions of ``job.mesh`` over which the samples of a microbatch are divided.
        """
        self._not_training("steps")
        if not self._loops.modules:
            raise ConfigError("job.steps() before job.replicate(model): there is nothing to train yet")
        training = self._begin(
            data,
            own_loop=False,
            global_batch=global_batch,
            microbatches=microbatches,
            steps=steps,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            collate_fn=collate_fn,
            num_workers=num_workers,
            steps_per_epoch=steps_per_epoch,
            start_step=start_step,
            split=split,
        )
        return Steps(training)

    def epochs(self, n: int, data: Any, **options: Any) -> Epochs:
        """Return the loop over ``n`` passes over ``data``; ``for step in epoch`` yields the steps of each.

        ``options`` are those of ``job.steps``. Code after the loop over an epoch's steps runs on every worker, once per epoch.
        """
        check_epochs(data, options)
        return Epochs(self.steps(data, epochs=n, **options))

    def attempts(
        self,
        data: Any = None,
        *,
        global_batch: int | None = None,
        microbatches: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
    ) -> Attempts:
        """Return the loop over attempts at the job's steps, for a body that the script owns.

        ``data`` is a map-style dataset or a ``DataLoader``, divided into microbatches as by ``job.steps``. Without it,
        microbatches are numbers, and the script reads their data itself.
        """
        self._not_training("attempts")
        loops = self._loops
        loops.refuse_sharded("job.attempts", "use job.steps")
        check_attempts(data, loops.techniques, has_state=bool(loops.modules or loops.registered))
        training = self._begin(
            numbers if data is None else data,
            own_loop=True,
            global_batch=global_batch,
            microbatches=microbatches,
            steps=steps,
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            collate_fn=collate_fn,
            num_workers=num_workers,
        )
        return Attempts(training)

    def _begin(self, data: Any, **options: Any) -> TrainingLoop:
        if self._training is not None:
            self._training.finish_loop()
        self._training = self._loops.build(data, **options)
        return self._training

    def checkpoints(
        self,
        url: str | os.PathLike[str],
        *,
        every: str = "auto",
        keep: int = 3,
        local: str | os.PathLike[str] | None = None,
    ) -> None:
        """Take checkpoints into ``url``, a path or a URL such as ``s3://bucket/job``; call it before ``job.steps``.

        ``every``: "auto", "500 steps", "1 epoch", "10 min". ``keep``: how many to keep, besides those with a tag. ``local``: a
        fast directory on each host to which they are written first. Options of ``craft run`` override these.
        """
        self._not_training("checkpoints")
        path = os.fspath(local) if local is not None else None
        self._loops.asked = CheckpointRequest(os.fspath(url), str(every), keep, path)

    def checkpoint(self, tag: str | None = None) -> None:
        """Take a checkpoint of the state at the end of the loop's body, when this step is over.

        CRAFT keeps a checkpoint with a tag for good. Every worker calls this, between steps.
        """
        check_tag(tag)
        collectives.checkpoint(self._loop("checkpoint"), tag)

    def on(self, event: type[E], handler: Callable[[E], None]) -> None:
        """Call ``handler`` with each event of this type, on the main thread at a safe point."""
        check_event(event)
        self._handlers.append((event, handler))

    def _emit(self, event: Event) -> None:
        for kind, handler in self._handlers:
            if isinstance(event, kind):
                handler(event)

    def stop(self, reason: str = "the script asked to", *, final: bool = True) -> None:
        """End the loop on every worker, after the step in flight (outside the inner loop: after the next step).

        A job that resumes from there trains no further. With ``final=False``, as when only its time is up, it goes on.
        """
        if self._training is None:
            raise ConfigError("job.stop() before job.steps(): there is no loop to end")
        self._training.lifecycle.ask_to_stop(reason, final)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all workers, in place, outside inner loops; workers lost meanwhile are left out.

        All workers of all sharded replicas count: divide by ``job.world_size`` for a mean. Use ``torch.distributed`` for sums
        within the replica.
        """
        return collectives.all_reduce(self._place, tensor)

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every worker, outside inner loops; plain data only, nothing is pickled."""
        return collectives.broadcast_object(self._place, value)

    def barrier(self) -> None:
        """Wait until every worker reaches this call, outside inner loops."""
        collectives.gather(self._place, "barrier", b"")

    def once(self, name: str, fn: Callable[[], R]) -> R:
        """Run ``fn`` to its end on one worker and return the result on every worker: to save, download, or log.

        Every worker calls it, outside inner loops. If the worker that runs ``fn`` is lost, the next one runs it again, so ``fn``
        must tolerate work that was begun before. It returns plain data, or None. ``name`` appears in messages. In a sharded
        replica ``fn`` makes no collectives: gather what it needs before, on all workers.
        """
        return collectives.once(self._place, self._activity, name, fn, self._loops.link)

    def evaluate(
        self, data: Any, fn: evaluation.Score, *, batch_size: int | None = None, collate_fn: Collate | None = None
    ) -> dict[str, float]:
        """Score ``data`` across the workers, each sample once, even if workers are lost. Call it outside inner loops.

        ``data`` is a dataset, with ``batch_size``, or a ``DataLoader``. ``fn(batch)`` returns a dict of numbers, the means over
        its batch; ``evaluate`` returns their means over all samples, the same bits on every worker. Gradients are off; the script
        calls ``model.eval()`` and ``train()`` itself. A sharded replica computes a batch together: its samples are divided like
        those of a microbatch if that is possible evenly, else all its workers compute the whole batch.
        """
        return evaluation.evaluate(self._loop("evaluate"), data, fn, batch_size, collate_fn)

    def _loop(self, call: str) -> TrainingLoop:
        if self._training is None:
            raise ConfigError(f"job.{call}() before job.steps(): it belongs into the loop, or after it")
        self._training.finish_loop()
        return self._training

    @property
    def _place(self) -> TrainingLoop | PreLoopCalls:
        """The object that makes collective calls at this point of the script."""
        return self._loops.outside_loops() if self._training is None else self._loop("")

    def paused(self, reason: str) -> AbstractContextManager[None]:
        """Never treat this worker as hung within ``with job.paused("evaluation"):``, however long it takes.

        A pause of more than a second is written to the journal afterwards.
        """
        return paused(self._activity, self._loops.reporter, reason)

    def _not_training(self, call: str) -> None:
        if self._training is not None and not (self._training.over or self._training.broken_off):
            raise ConfigError(f"job.{call}() in the loop over job.steps: it belongs before that loop, or after it")

    @property
    def device(self) -> torch.device:
        """The model's device; before there is a model, a GPU of the host, or the CPU without one."""
        return self._loops.device

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._training.applied if self._training is not None else self._participant.step

    @property
    def epoch(self) -> int:
        """The pass over the data that the step in flight belongs to, from 0."""
        return self._training.source.epoch_of(self.step) if self._training is not None else 0

    @property
    def generation(self) -> int:
        """Number of the current generation; it grows with each membership change."""
        return self._participant.ledger.generation or self._membership.number

    @property
    def branch(self) -> int:
        """Number of the current branch; each rollback begins a new one."""
        return self._participant.ledger.branch
