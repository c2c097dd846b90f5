"""Check the script's loop in its first steps: refuse or warn once of what would silently go wrong.

``TrainingLoop`` makes one per loop and reports steps and microbatches to it; adapters' loops are checked in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
import torch.distributed
from torch.utils.data.distributed import DistributedSampler

from craft.groups.sharded.process_group import BACKEND
from craft.protocol.worker_events import ScriptWarned
from craft.snapshots.state.leaves import Leaf, Stateful, digest, registered_leaves
from craft.worker.checks.losses import LossChecks
from craft.worker.checks.optimizers import OptimizerChecks
from craft.worker.checks.unregistered import UnregisteredChecks
from craft.worker.data import rng
from craft.worker.state.carried_state import REGISTERED_AS as CARRIED

logger = logging.getLogger(__name__)

_HASHED = 1 << 20
"""A tensor of up to so many bytes is hashed; of a larger one only in-place changes are seen."""


class ScriptChecks:
    """The checks of one loop of a script. Belongs to the main thread."""

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        registered: Mapping[str, Stateful],
        own_loop: bool,
        in_microbatch: Callable[[], bool],
        note: Callable[[ScriptWarned], None],
        wanted: bool = True,
        *,
        is_heard: bool = False,
    ) -> None:
        """``wanted``: whether the loop is checked; if not, only ``warn`` has an effect.

        ``is_heard``: whether ``note`` already prints on the terminal.
        """
        self._level = logging.INFO if is_heard else logging.WARNING
        self._wanted = wanted
        self._modules = modules
        self._registered = registered
        self._own_loop = own_loop
        self._in_microbatch = in_microbatch
        self._note = note
        self._warned: set[str] = set()
        self._summed_over = 0
        """Workers in the last ``job.all_reduce`` of the loop."""
        self._warned_of_sums = False
        self._first: int | None = None
        """The first step of this worker's loop."""
        self._optimizers: OptimizerChecks | None = None
        self._unregistered: UnregisteredChecks | None = None
        self._losses: LossChecks | None = None
        self._before: dict[str, str] | None = None
        """Digests of registered objects at the begin of the first step's inner loop."""
        self._driven = False

    def warn(self, text: str) -> None:
        """Warn once: in this worker's log, in the journal and on the terminal."""
        if text not in self._warned:
            self._warned.add(text)
            logger.log(self._level, "%s", text)
            self._note(ScriptWarned(text=text))

    def at_boundary(self, step: int) -> None:
        """Run the checks between two steps: ``step`` is about to begin, the update of the one before is done."""
        if not self._wanted:
            return
        if self._optimizers is None:
            self._begin(step)
            return
        assert self._first is not None and self._unregistered is not None
        self._optimizers.step = step
        if step == self._first + 1:
            self._end_losses()
            self._unregistered.search()
            self._warn_of_groups()
        elif step > self._first:
            self._unregistered.check()

    def _begin(self, step: int) -> None:
        self._first = step
        self._optimizers = OptimizerChecks(self._modules, self._registered, self._own_loop, self._in_microbatch)
        self._optimizers.step = step
        self._unregistered = UnregisteredChecks(self._optimizers, not self._own_loop, self.warn)
        if not self._own_loop:
            self._losses = LossChecks(self.warn)
        self._warn_of_groups()

    @property
    def looks_at_losses(self) -> bool:
        """Whether this is still the first step."""
        return self._losses is not None

    def microbatch(self, sizes: Mapping[int, int | None], microbatch: int, share: int, slots: int) -> None:
        """Begin ``microbatch``; ``sizes`` are those of all microbatches of the step."""
        if self._losses is None:
            return
        known = sorted({size for size in sizes.values() if size})
        uneven = f"microbatches have from {known[0]} to {known[-1]} samples" if len(known) > 1 else ""
        divisors = [len(sizes), share, len(sizes) // slots if len(sizes) % slots == 0 else 0]
        self._losses.microbatch(divisors, sizes.get(microbatch), uneven)

    def driven(self) -> None:
        """Allow changes of registered state in the inner loop: a framework drives it and keeps counters there."""
        self._driven = True

    def inner_loop_begins(self) -> None:
        """Hash the registered objects before the microbatches of the first step."""
        if self._losses is not None and not self._driven:
            self._before = self._registered_now()

    def inner_loop_ended(self) -> None:
        """Warn of registered objects that changed while microbatches were computed."""
        before, self._before = self._before, None
        if before is None or before == (now := self._registered_now()):
            return
        changed = [name for name, found in now.items() if before.get(name) != found]
        self.warn(
            f"{', '.join(changed)}: registered, and changed inside the loop over microbatches. How many of these a worker"
            " computes depends on the number of workers, and some are computed twice, to compare bits. Change it once per"
            " step, after `for batch in step` has ended, by the same amount on every worker (scheduler.step(), a moving"
            " average, a counter)"
        )

    def _registered_now(self) -> dict[str, str]:
        with rng.preserved():
            # A registered function may save the state of a random generator, which microbatches change, and CRAFT seeds.
            rng.seed_host(0)
            return {
                name: digest([_mark(leaf) for leaf in registered_leaves({name: item})])
                for name, item in self._registered.items()
                if name != CARRIED
            }

    def world_size_read(self) -> None:
        """Warn if the script reads ``job.world_size`` while it computes a microbatch: losses change that number."""
        if self._wanted and not (self._own_loop or self._driven) and self._in_microbatch():
            self.warn(
                "job.world_size is read while a microbatch is computed: a loss that is divided by it, as under DDP, gives other"
                " gradients after a worker is lost or joins. Leave the division out: p.grad is the mean over the global batch"
            )

    def weighed(self) -> None:
        """Record that the script weighs its microbatches itself."""
        if self._losses is not None:
            self._losses.weighed()

    def summed(self, num_workers: int, step: int) -> None:
        """Warn once if ``job.all_reduce`` sums over another number of workers than before."""
        before, self._summed_over = self._summed_over, num_workers
        if self._wanted and before not in (0, num_workers) and not self._warned_of_sums:
            self._warned_of_sums = True
            self.warn(
                f"job.all_reduce sums over the workers that are there: {num_workers} as step {step} begins, {before} before. If"
                " its result goes into the training state, or decides what is trained, the weights depend on how many workers"
                " there are. step.metrics and job.evaluate(...) do not: they are means over samples"
            )

    def _warn_of_groups(self) -> None:
        if not self._own_loop and (text := script_group_warning()):
            self.warn(text)

    def _end_losses(self) -> None:
        if self._losses is not None:
            self._losses.close()
            self._losses = None

    def close(self) -> None:
        """Remove the hooks: the loop is over."""
        self._end_losses()
        if self._optimizers is not None:
            self._optimizers.close()


def _mark(leaf: Leaf) -> Leaf:
    """Return what shows, at little cost, that a value was changed."""
    value = leaf.value
    if isinstance(value, bytes) or value.nbytes <= _HASHED or value.is_inference():
        return leaf
    return Leaf(leaf.name, f"{value.data_ptr()}/{value._version}".encode())


def script_group_warning() -> str:
    """Return a warning of a process group that the script opened over several workers; empty without one."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    if dist.get_backend() == BACKEND:
        # The replica's, which CRAFT opened.
        return ""
    return (
        f"the script called torch.distributed.init_process_group for {dist.get_world_size()} workers: calls on that group"
        " (dist.barrier, dist.all_reduce) break or hang as soon as a worker is lost or joins. CRAFT exchanges gradients itself:"
        " remove init_process_group, and use job.barrier(), job.all_reduce(tensor) and job.broadcast_object(value) instead"
    )


def ignored_sampler(data: object) -> str:
    """Return a warning of a sampler that gives each rank its part of ``data``; empty without one."""
    sampler = getattr(data, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas == 1:
        return ""
    batch = getattr(data, "batch_size", None)
    return (
        f"the DataLoader has a DistributedSampler for {sampler.num_replicas} replicas, which is not used: CRAFT shares every"
        f" batch over the workers itself. Its batch_size={batch} is that of the whole step, not of one worker (DDP would have"
        f" {batch} times {sampler.num_replicas} samples in a step). Remove the sampler, use"
        " shuffle=True, and set batch_size to the global batch"
    )
