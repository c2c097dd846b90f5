"""The objects that one loop of a script uses: ``Job`` builds it; ``TrainingLoop`` and ``CheckpointLifecycle`` read it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from craft.decide.techniques.technique import Chosen
from craft.settings.worker import WorkerSettings
from craft.snapshots.state.leaves import Stateful
from craft.snapshots.state.reserved_memory import Reserve
from craft.snapshots.transfer.donor import Donor
from craft.worker.data.data_split import WHOLE, DataSplit
from craft.worker.data.skipping import SkippingSource
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.participant import Participant
from craft.worker.replica.link import ReplicaLink
from craft.worker.report.activity_page import ActivityPage
from craft.worker.report.reporter import Reporter
from craft.worker.state.carried_state import CarriedState
from craft.worker.state.checkpoint_target import CheckpointTarget
from craft.worker.state.metadata import Conditions


class LoopContext(msgspec.Struct, frozen=True, kw_only=True):
    """The objects and settings of one call of ``job.steps`` or ``job.attempts``."""

    settings: WorkerSettings
    techniques: Chosen
    membership: MembershipClient
    reporter: Reporter
    activity: ActivityPage
    participant: Participant
    donor: Donor | None
    """Sends the state to workers that join; None outside of ``craft run``."""
    reserve: Reserve | None
    """Memory for the state that a late worker will receive."""
    modules: Mapping[str, torch.nn.Module]
    registered: Mapping[str, Stateful]
    lanes: CarriedState
    device: torch.device
    """The device that this worker computes on."""
    source: SkippingSource
    seed: int
    conditions: Conditions
    target: CheckpointTarget | None
    """Where checkpoints go; None: none are taken."""
    link: ReplicaLink | None = None
    """To the other workers of the replica; None: a replica is one worker."""
    split: DataSplit = WHOLE
    """Which part of each microbatch's samples this worker computes."""
    drops: bool = False
    """Whether the microbatches of a lost worker are dropped."""
    own_loop: bool = False
    """Whether the script reduces gradients itself and updates before the commit (``Attempts``)."""
    whole: bool = False
    """Whether every worker computes the whole step, after its commit, so that no gradient is exchanged."""
