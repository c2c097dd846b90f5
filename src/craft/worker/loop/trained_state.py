"""The parameters, buffers and registered objects that one training loop changes."""

from __future__ import annotations

import torch

from craft.groups.sharded import fsdp_reset
from craft.snapshots.state.leaves import Leaf, digest, module_leaves, registered_leaves
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout, bitmap, parameters_of, trainable_of
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.state.loop_context import LoopContext


class TrainedState:
    """Owned by the main thread; the follower's thread reads which parameters are trained."""

    def __init__(self, context: LoopContext) -> None:
        self.modules = context.modules
        self.registered = context.registered
        self.is_exchanged = not (context.own_loop or context.whole)
        """Whether the loop exchanges the gradients of the modules in each step."""
        exchanged = list(context.modules.values()) if self.is_exchanged else []
        self.params = parameters_of(exchanged)
        self.buffers = ModuleBuffers(exchanged, list(context.modules))
        self.bucket_bytes = int(context.settings.bucket_mb * (1 << 20))
        self._hold = context.settings.hold
        self._confirms = context.link is not None

    def leaves(self) -> list[Leaf]:
        """Return the whole training state."""
        self.reshard()
        return [*module_leaves(self.modules), *registered_leaves(self.registered)]

    def reshard(self) -> None:
        """Bring sharded modules back to their own parameters, if code between the steps has run a forward pass."""
        if self._confirms:
            fsdp_reset.reshard(self.modules.values())

    def digest(self) -> str:
        """Return a hash of the whole training state."""
        return digest(self.leaves())

    def trainable(self) -> bytes:
        """Return the bitmap of the parameters that get gradients now."""
        return bitmap(trainable_of(self.params))

    def new_gradients(self) -> GradientAccumulator:
        """Return an accumulator for the parameters that get gradients now."""
        layout = BucketLayout(self.params, self.bucket_bytes)
        return GradientAccumulator(layout, hold=self._hold, confirms=self._confirms)

    def buffers_now(self) -> ModuleBuffers:
        """Return the current buffers of all modules, including registered ones."""
        items = (*self.modules.values(), *self.registered.values())
        return ModuleBuffers([each for each in items if isinstance(each, torch.nn.Module)])
