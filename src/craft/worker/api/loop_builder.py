"""What a script gives to its job, and the training loops made of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from craft.decide.techniques import Loss, Stragglers
from craft.groups.sharded.install import install, mesh
from craft.groups.sharded.operation import Replica
from craft.protocol.errors import ConfigError
from craft.protocol.events import Event
from craft.settings.worker import WorkerSettings
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.store.owner import job_of
from craft.snapshots.transfer.donor import Donor
from craft.worker.api.validation import check_optimizers, check_registered
from craft.worker.checks.script import ignored_sampler
from craft.worker.checks.sharding import check_sharding, own_statistics
from craft.worker.data.data_split import split_of
from craft.worker.data.skipping import SkippingSource
from craft.worker.data.source_args import check_start_step, is_stream, make_source
from craft.worker.loop.pre_loop_calls import PreLoopCalls
from craft.worker.loop.training_loop import TrainingLoop
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.devices import between_devices, device_of, make_scales, own_device, warm_up
from craft.worker.membership.participant import Participant
from craft.worker.replica.link import ReplicaLink, SoloReplica
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.channel import Channel
from craft.worker.report.reporter import Reporter
from craft.worker.state.carried_state import REGISTERED_AS, CarriedState
from craft.worker.state.checkpoint_target import CheckpointRequest, check_every, choose_target
from craft.worker.state.loop_context import LoopContext
from craft.worker.state.metadata import Conditions, ExtraState

logger = logging.getLogger(__name__)


class _Saved:
    """Wraps a script's two functions as an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, save: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        self.state_dict = save
        self.load_state_dict = load


class LoopBuilder:
    """Keeps the script's modules and registered objects, and builds its loops. Owned by the main thread."""

    def __init__(
        self,
        settings: WorkerSettings,
        membership: MembershipClient,
        channel: Channel | None,
        activity: ActivityPage,
        donor: Donor | None,
        reserve: Reserve | None,
        emit: Callable[[Event], None],
        link: ReplicaLink | None,
    ) -> None:
        """``link``: to the other workers of the replica, if it has several. ``emit`` calls the script's handlers of an event."""
        self.modules: dict[str, torch.nn.Module] = {}
        self.registered: dict[str, Stateful] = {}
        self.asked = CheckpointRequest()
        """Where the script wants its checkpoints."""
        self.techniques = settings.chosen()
        self.reporter = Reporter(settings.worker_id, membership, channel, emit)
        loss, stragglers = self.techniques.get(Loss), self.techniques.get(Stragglers)
        assert loss is not None
        self._drops = loss.settings.answer == "shrink"
        self.participant = Participant(
            settings.worker_id,
            membership,
            loss.settings.answer,
            self.reporter.state_lost,
            stragglers.settings if stragglers is not None else None,
            link,
        )
        self.link = link
        self.replica: Replica | None = link
        """What torch's process groups run in: the replica; None while nothing is sharded."""
        self._dimensions: dict[str, int] | None = None
        """Those of ``job.mesh``."""
        self._settings = settings
        self._membership = membership
        self._activity = activity
        self._donor = donor
        self._reserve = reserve
        self._device: torch.device | None = None
        """Device of the model; None while it is unknown."""
        self._outside: PreLoopCalls | None = None
        """Serves calls that this worker makes before it takes part in a loop."""

    @property
    def device(self) -> torch.device:
        """The model's device; before there is a model, a GPU of the host, or the CPU without one."""
        if self._device is not None:
            return self._device
        device = own_device(self._settings.local_rank)
        if device.type == "cuda" and self._settings.group != "gloo":
            # The script is about to build its model there.
            warm_up(device)
        return device

    def mesh(self, dimensions: dict[str, int]) -> DeviceMesh:
        """Return a mesh over this worker's replica, and divide samples over its data dimensions from here on."""
        if self.replica is None:
            self.replica = SoloReplica()
            install(self.replica)
        made = mesh(self.replica, self.device, **dimensions)
        if self._dimensions is not None and self._dimensions != dimensions:
            raise ConfigError(f"job.mesh({dimensions}) after job.mesh({self._dimensions}): a job has one mesh")
        self._dimensions = dimensions
        return made

    def refuse_sharded(self, call: str, instead: str) -> None:
        """Raise ConfigError if this worker is part of a replica of several: ``call`` is not built for them yet."""
        if self.link is not None:
            raise ConfigError(
                f"{call} in a job with --workers-per-replica {self.link.size} is not built yet: {instead}"
            )

    def add_model(self, model: torch.nn.Module) -> None:
        """Have all loops from here on keep ``model`` identical on every worker."""
        modules = [*self.modules.values(), model]
        device = device_of(named for module in modules for named in module.named_parameters())
        self._device = device or self._device
        if any(module is model for module in self.modules.values()):
            return
        name = "model" if not self.modules else f"model{len(self.modules)}"
        self.modules[name] = model
        if extra := ExtraState(model):
            self.register(f"{name}.extra_state", extra)

    def register(self, name: str, item: Any) -> None:
        """Have all loops from here on save, restore and transfer the state of ``item``."""
        check_registered(name, item, self.registered)
        self.registered[name] = item

    def register_state(self, save: Callable[[], Any], load: Callable[[Any], Any], name: str | None) -> None:
        """Have all loops save and restore what two functions of the script return and take."""
        if not (callable(save) and callable(load)):
            raise ConfigError("register_state(save=..., load=...) takes two functions")
        taken = sum(1 for each in self.registered.values() if isinstance(each, _Saved))
        self.register(name or f"state{taken or ''}", _Saved(save, load))

    def outside_loops(self) -> PreLoopCalls:
        """Return what serves calls before this worker takes part in a loop."""
        if self._outside is None:
            self._membership.equip(between_devices(self._settings.group, self.device))
            self._outside = PreLoopCalls(
                self.participant,
                self._membership,
                self.reporter,
                self._activity,
                self._donor,
                self._settings.state_key_bytes,
                self._settings.late,
            )
        return self._outside

    def build(
        self,
        data: Any,
        *,
        own_loop: bool,
        microbatches: int | None,
        seed: int,
        whole: bool = False,
        start_step: int = 0,
        split: Sequence[str] | None = None,
        **more: Any,
    ) -> TrainingLoop:
        """Return a loop over ``data``; ``LoopContext`` explains ``own_loop`` and ``whole``, ``make_source`` the rest."""
        size = self._settings.replica_size
        count = microbatches if microbatches is not None else self._membership.slots // size
        parts = split_of(self._settings.position, size, self._dimensions, split)
        if self.link is not None:
            check_sharding(self.modules, parts)
        source, total_steps, shared = make_source(data, microbatches=count, seed=seed, split=parts, **more)
        shared |= {name: True for name, holds in (("own_loop", own_loop), ("all_compute", whole)) if holds}
        if self.participant.loops:
            shared["loop"] = self.participant.loops + 1
        self.participant.begin_at(check_start_step(start_step, total_steps))
        if not own_loop:
            check_optimizers(self.registered, self.modules)
        self._connect()
        lanes = CarriedState(self.device)
        target = choose_target(self.asked, self.techniques, job_of(self._settings.state_key_bytes))
        context = LoopContext(
            settings=self._settings,
            techniques=self.techniques,
            membership=self._membership,
            reporter=self.reporter,
            activity=self._activity,
            donor=self._donor,
            reserve=self._reserve,
            participant=self.participant,
            # Copies: objects registered after this loop belong to the next one.
            modules=dict(self.modules),
            registered={**self.registered, **({} if own_loop else {REGISTERED_AS: lanes})},
            lanes=lanes,
            device=self.device,
            source=SkippingSource(
                source, total_steps, more["steps"] is None, lambda: self.participant.ledger.first_step
            ),
            seed=seed,
            conditions=Conditions.here(self.device, shared | self._settings.shared() | self.techniques.shared()),
            target=check_every(target, is_stream(data)),
            link=self.link,
            split=parts,
            drops=self._drops,
            own_loop=own_loop,
            whole=whole,
        )
        training = TrainingLoop(context, self._passed())
        self.reporter.report(microbatches=count)
        for text in (ignored_sampler(data), own_statistics(self.modules.values(), parts)):
            if text:
                training.checks.warn(text)
        return training

    def _connect(self) -> None:
        """Say how gradients travel, and make the group and gradient scalers ready for the device."""
        if self.device.type == "cuda" and self._settings.hold != "device":
            self.refuse_sharded(
                f"hold = {self._settings.hold}", "leave it out, so that gradients are held on the device"
            )
        connected = between_devices(self._settings.group, self.device)
        logger.info("trains on %s; gradients travel by %s", self.device, "Gloo" if connected is None else "NCCL")
        self._membership.equip(connected)
        make_scales(self.registered.values(), self.device)

    def _passed(self) -> PreLoopCalls | None:
        """Return how this late joiner makes calls if the job has already ended the loop that begins now; else None."""
        is_passed = not self.participant.ledger.generation and self.participant.loops + 1 < self._membership.loop
        return self.outside_loops() if is_passed else None
