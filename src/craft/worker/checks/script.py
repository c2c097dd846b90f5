"""Checks of the script's own loop in its first steps: what would go wrong unseen is refused, or warned of once.

``Training`` makes one per loop and tells it of steps and microbatches; adapters' loops are checked in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
import torch.distributed
from torch.utils.data.distributed import DistributedSampler

from craft.protocol.worker_events import ScriptWarned
from craft.snapshots.state.leaves import Leaf, Stateful, digest, registered_leaves
from craft.worker.checks.losses import LossChecks
from craft.worker.checks.optimizers import OptimizerChecks
from craft.worker.checks.unregistered import UnregisteredChecks
from craft.worker.data import rng
from craft.worker.state.carried_state import REGISTERED_AS as CARRIED

logger = logging.getLogger(__name__)

_HASHED = 1 << 20
"""Bytes of a tensor up to which its values are looked at; of a larger one, whether it was changed in place."""


class ScriptChecks:
    """Of one loop of a script. Belongs to the main thread."""

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
        """``wanted``: whether the loop is looked at; if not, only what is given to ``warn`` is told.

        ``is_heard``: what is noted is on the terminal already.
        """
        self._level = logging.INFO if is_heard else logging.WARNING
        self._wanted = wanted
        self._modules = modules
        self._registered = registered
        self._own_loop = own_loop
        self._in_microbatch = in_microbatch
        self._note = note
        self._told: set[str] = set()
        self._summed_over = 0
        """Workers in the last ``job.all_reduce`` of the loop."""
        self._warned_of_sums = False
        self._first: int | None = None
        """The step that this worker's loop began with."""
        self._optimizers: OptimizerChecks | None = None
        self._forgotten: UnregisteredChecks | None = None
        self._losses: LossChecks | None = None
        self._before: dict[str, str] | None = None
        """Digests of what is registered, as the inner loop of the first step began."""
        self._driven = False

    def warn(self, text: str) -> None:
        """Warn once: in this worker's log, in the journal and on the terminal."""
        if text not in self._told:
            self._told.add(text)
            logger.log(self._level, "%s", text)
            self._note(ScriptWarned(text=text))

    def at_boundary(self, step: int) -> None:
        """Step ``step`` is about to begin; the one before it is over, its update included."""
        if not self._wanted:
            return
        if self._optimizers is None:
            self._begin(step)
            return
        assert self._first is not None and self._forgotten is not None
        self._optimizers.step = step
        if step == self._first + 1:
            self._end_losses()
            self._forgotten.look()
            self._look_for_groups()
        elif step > self._first:
            self._forgotten.check()

    def _begin(self, step: int) -> None:
        self._first = step
        self._optimizers = OptimizerChecks(self._modules, self._registered, self._own_loop, self._in_microbatch)
        self._optimizers.step = step
        self._forgotten = UnregisteredChecks(self._optimizers, not self._own_loop, self.warn)
        if not self._own_loop:
            self._losses = LossChecks(self.warn)
        self._look_for_groups()

    @property
    def looks_at_losses(self) -> bool:
        """Whether this is still the first step."""
        return self._losses is not None

    def microbatch(self, sizes: Mapping[int, int | None], microbatch: int, share: int, slots: int) -> None:
        """The script computes ``microbatch`` now; ``sizes`` are those of all microbatches of the step."""
        if self._losses is None:
            return
        known = sorted({size for size in sizes.values() if size})
        uneven = f"microbatches have from {known[0]} to {known[-1]} samples" if len(known) > 1 else ""
        divisors = [len(sizes), share, len(sizes) // slots if len(sizes) % slots == 0 else 0]
        self._losses.microbatch(divisors, sizes.get(microbatch), uneven)

    def driven(self) -> None:
        """A framework drives the loop, and keeps its own books while microbatches are computed."""
        self._driven = True

    def inner_loop_begins(self) -> None:
        """The script is about to compute its microbatches: in the first step, look at what is registered."""
        if self._losses is not None and not self._driven:
            self._before = self._registered_now()

    def inner_loop_ended(self) -> None:
        """They are computed: warn of what is registered and changed meanwhile."""
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
            # A registered function may save the state of a random generator, which microbatches change, and CRAFT rng.
            rng.seed_host(0)
            return {
                name: digest([_mark(leaf) for leaf in registered_leaves({name: item})])
                for name, item in self._registered.items()
                if name != CARRIED
            }

    def weighed(self) -> None:
        """The script gave a microbatch a weight of its choice."""
        if self._losses is not None:
            self._losses.weighed()

    def summed(self, num_workers: int, step: int) -> None:
        """``job.all_reduce`` summed over so many workers: warn once if there were more or fewer before."""
        before, self._summed_over = self._summed_over, num_workers
        if self._wanted and before not in (0, num_workers) and not self._warned_of_sums:
            self._warned_of_sums = True
            self.warn(
                f"job.all_reduce sums over the workers that are there: {num_workers} as step {step} begins, {before} before. If"
                " its result goes into the training state, or decides what is trained, the weights depend on how many workers"
                " there are. step.metrics and job.evaluate(...) do not: they are means over samples"
            )

    def _look_for_groups(self) -> None:
        if not self._own_loop and (text := own_group()):
            self.warn(text)

    def _end_losses(self) -> None:
        if self._losses is not None:
            self._losses.close()
            self._losses = None

    def close(self) -> None:
        """The loop is over: remove what is left of the hooks."""
        self._end_losses()
        if self._optimizers is not None:
            self._optimizers.close()


def _mark(leaf: Leaf) -> Leaf:
    """What shows that a value was changed; that takes no time that counts."""
    value = leaf.value
    if isinstance(value, bytes) or value.nbytes <= _HASHED or value.is_inference():
        return leaf
    return Leaf(leaf.name, f"{value.data_ptr()}/{value._version}".encode())


def own_group() -> str:
    """What to say of a process group that the script opened over several workers; empty if there is none."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    return (
        f"the script called torch.distributed.init_process_group for {dist.get_world_size()} workers: calls on that group"
        " (dist.barrier, dist.all_reduce) break or hang as soon as a worker is lost or joins. CRAFT exchanges gradients itself:"
        " remove init_process_group, and use job.barrier(), job.all_reduce(tensor) and job.broadcast_object(value) instead"
    )


def ignored_sampler(data: object) -> str:
    """What to say of a sampler that gives each rank its part of ``data``; empty if there is none."""
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
