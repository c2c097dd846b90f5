"""``step.gather``: give each microbatch the rows of all microbatches, for losses over the whole batch.

A step that gathers is computed in two passes. In the first, each microbatch yields only its rows, which its owner sends to all
other owners. In the second, ``gather`` returns all rows; the microbatch's rows are in its graph. Rows depend on (state, step,
microbatch) alone: after a loss, the next owner recomputes a lost worker's rows with the same bits, so held gradients stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from blake3 import blake3

from craft.decide.step.ledger import Ledger
from craft.groups.group import P2P
from craft.protocol.errors import ConfigError
from craft.snapshots.state.leaves import tensor_bytes
from craft.telemetry.fault_points import reach
from craft.worker.membership.all_gather import gather_among
from craft.worker.state.carried_state import pack, unpack

_TAGS = (60, 61)
"""Tags, below those of buckets."""


class BatchGather:
    """Collects and exchanges the rows of the step in flight. Owned by the main thread."""

    def __init__(self, device: torch.device, samples: Callable[[int, int], int | None], *, drops: bool) -> None:
        """``samples(step, microbatch)``: the sample count, if known. ``drops``: whether lost microbatches are dropped."""
        self.in_use = False
        """Whether a microbatch of this step has gathered."""
        self.complete = False
        """Whether the rows of all microbatches are here, under the current generation."""
        self.in_first_pass = False
        """Whether the current microbatch gathered before all rows were here: its gradient is discarded."""
        self.expected = False
        """Whether this worker gathered in the previous step."""
        self._device = device
        self._drops = drops
        self._samples = samples
        self._rows: dict[int, list[Any]] = {}
        """By microbatch: its weight, and the rows of each of its calls."""
        self._given: list[torch.Tensor] = []
        """Rows that the current microbatch has given."""

    def clear(self) -> None:
        """Clear the rows when a step ends or another begins."""
        self.in_use = self.complete = False
        self._rows = {}

    def regrouped(self) -> None:
        """Require another exchange: members of a new generation may lack rows."""
        self.complete = False

    def start(self) -> None:
        """Begin a microbatch."""
        self.in_first_pass, self._given = False, []

    def missing(self, pending: Sequence[int]) -> list[int]:
        """Return the pending microbatches whose rows are not here yet."""
        return [microbatch for microbatch in pending if microbatch not in self._rows]

    def keep(self, microbatch: int, weight: float, held: Sequence[int]) -> None:
        """Keep the rows of ``microbatch`` after its first pass. ``held``: microbatches whose gradients are held."""
        without = [each for each in held if each not in self._rows]
        if without:
            raise ConfigError(
                f"microbatch {microbatch} called step.gather(...), and microbatch {without[0]} did not: {_RULE}"
            )
        self.in_use = self.expected = True
        self._rows[microbatch] = [weight, *self._given]

    def digest_of(self, microbatch: int) -> bytes:
        """Return a hash of the rows that ``microbatch`` gave, or is giving."""
        rows = self._rows[microbatch][1:] if microbatch in self._rows else self._given
        hasher = blake3()
        for tensor in rows:
            hasher.update(memoryview(tensor_bytes(tensor)))
        return bytes(hasher.digest(length=16))

    def keep_empty(self, microbatch: int) -> None:
        """Record that the stream of ``microbatch`` has ended: its owner sends no rows if the others gather."""
        self._rows[microbatch] = []
        # If all its streams have ended, nothing else shows this worker that the others wait for it.
        self.in_use = self.in_use or self.expected

    def gather(self, tensor: torch.Tensor, step: int, microbatch: int, num_microbatches: int) -> torch.Tensor:
        """Return the rows of all microbatches, in order; in the first pass, as many meaningless rows."""
        if self._drops:
            raise ConfigError(
                "step.gather(...) with --on-loss shrink: no part of a loss over the whole batch can be left out"
            )
        if tensor.dim() == 0:
            raise ConfigError("step.gather(tensor): the tensor has no rows; give one of shape (rows, ...)")
        place = len(self._given)
        # The rows of the microbatches must be contiguous, whatever the script's memory format.
        self._given.append(tensor.detach().clone(memory_format=torch.contiguous_format))
        if not self.complete:
            self.in_first_pass = True
            return self._placeholder(tensor, step, microbatch, num_microbatches)
        if place + 1 >= len(self._rows[microbatch]):
            raise ConfigError(f"microbatch {microbatch} called step.gather(...) more often than before: {_RULE}")
        own = self._rows[microbatch][place + 1]
        if own.shape != tensor.shape or not torch.equal(own, self._given[place]):
            raise ConfigError(
                f"microbatch {microbatch} of step {step} gave other rows to step.gather(...) than in the first pass over it,"
                " which another worker may have computed: a step that gathers is computed twice, and its code must give the same"
                " bits each time (what it changes besides the model's buffers stays changed)"
            )
        found = {each: values for each, values in sorted(self._rows.items()) if values}
        weight = found[microbatch][0]
        scale = sum(values[0] for values in found.values()) / weight if weight else 0.0
        rows = {each: values[place + 1] for each, values in found.items()}
        rows[microbatch] = _Scaled.apply(tensor, scale) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
        return torch.cat(list(rows.values()))

    def finished(self, microbatch: int) -> None:
        """Check that ``microbatch`` gathered as often as it must, before its gradient is held."""
        if not self.in_use:
            self.expected = False
        elif not self.complete:
            raise ConfigError(f"microbatch {microbatch} did not call step.gather(...), and others did: {_RULE}")
        elif len(self._given) + 1 != len(self._rows[microbatch]):
            raise ConfigError(f"microbatch {microbatch} called step.gather(...) less often than before: {_RULE}")

    def _placeholder(self, tensor: torch.Tensor, step: int, microbatch: int, num_microbatches: int) -> torch.Tensor:
        """Return a leaf shaped like the rows of all microbatches: in the first pass ``backward()`` ends there."""
        own = self._samples(step, microbatch)
        rows = []
        for each in range(num_microbatches):
            theirs = self._samples(step, each)
            count = len(tensor) if not own or theirs is None else len(tensor) * theirs // own
            rows += [tensor.detach()] * (count // max(1, len(tensor))) + [
                tensor.detach()[: count % max(1, len(tensor))]
            ]
        return torch.cat(rows).requires_grad_(tensor.requires_grad)

    def exchange(self, group: P2P | None, ledger: Ledger) -> None:
        """Exchange rows with all other owners; raise GroupError."""
        own = {str(microbatch): self._rows[microbatch] for microbatch in ledger.share}
        owners = sorted(set(ledger.owners))
        if group is not None and len(owners) > 1 and ledger.rank in owners:
            peers = [each for each in owners if each != ledger.rank]
            for row in gather_among(group, peers, pack(own), _TAGS, lambda: reach("gathering", ledger.step)):
                theirs = {int(name): values for name, values in unpack(row, self._device).items()}
                self._rows = theirs | self._rows
        counts = {len(values) for values in self._rows.values() if values}
        if len(counts) > 1:
            raise ConfigError(
                f"step.gather(...) was called a different number of times in different microbatches: {_RULE}"
            )
        self.complete = True


_RULE = "every microbatch of a step calls it as often as the others, in the same order, in both passes"


class _Scaled(torch.autograd.Function):
    """Identity whose gradient is scaled, because the mean over microbatches divides it."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        context.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * context.scale, None
