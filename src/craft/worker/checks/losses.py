"""Warn of losses that are scaled for another kind of loop, by the graph behind ``backward()`` in the first step.

Autograd's graph shows two mistakes for certain: a mean that is divided by the number of microbatches, as in scripts that
accumulate gradients, and a loss that is a sum although microbatches have different numbers of samples. Other scales may be
intended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_MEAN, _SUM = 1, 2
"""torch's codes for reductions."""
_SCALED = 256.0
"""A factor of at least this is a gradient scaler's."""


class LossChecks:
    """Wraps ``Tensor.backward`` until it is closed, or those of another loop begin. Belongs to the main thread."""

    _current: LossChecks | None = None
    """The instance that wraps it now: a loop that ended by an error may not have closed its checks."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        if LossChecks._current is not None:
            LossChecks._current.close()
        LossChecks._current = self
        self._warn = warn
        self._divisors: frozenset[int] = frozenset()
        self._samples: int | None = None
        self._uneven = ""
        self._original = torch.Tensor.backward
        torch.Tensor.backward = self._wrap(self._original)  # type: ignore[method-assign]

    def close(self) -> None:
        """Restore ``Tensor.backward``."""
        if LossChecks._current is self:
            LossChecks._current = None
            torch.Tensor.backward = self._original  # type: ignore[method-assign]

    def microbatch(self, divisors: Iterable[int], samples: int | None, uneven: str) -> None:
        """Begin a microbatch of ``samples``. ``uneven`` describes the sizes of microbatches if they differ, else is empty."""
        self._divisors = frozenset(each for each in divisors if each > 1)
        self._samples, self._uneven = samples, uneven

    def weighed(self) -> None:
        """Do not warn of uneven microbatches: the script weighs them itself."""
        self._uneven = ""

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: torch.Tensor, *args: Any, **named: Any) -> Any:
            self._check(loss)
            return original(loss, *args, **named)

        return backward

    def _check(self, loss: torch.Tensor) -> None:
        node = _unscaled(loss.grad_fn)
        if node is None or loss.numel() != 1:
            return
        divided = divided_by(node)
        if divided in self._divisors:
            self._warn(
                f"the loss is a mean that is divided by {divided} before backward(), and {divided} is the number of"
                " microbatches: CRAFT takes the mean over them, so that gradients become too small by that factor. Call"
                " backward() on the loss itself, without / accumulation_steps"
            )
        elif self._uneven and is_sum(node, self._samples):
            self._warn(
                f"the loss is a sum over the samples of a microbatch, and {self._uneven}: CRAFT weighs microbatches by their"
                " samples, so that larger ones count twice. Use reduction='mean', or step.weight(1) to count all"
                " microbatches alike"
            )


def divided_by(node: Any) -> int | None:
    """Return the integer by which ``node`` divides a mean; None if it does something else."""
    operand = _next(node)
    factor = _number(node)
    if operand is None or factor is None or not _is_mean(operand):
        return None
    if node.name() == "MulBackward0" and factor != 0:
        factor = 1 / factor
    elif node.name() != "DivBackward0":
        return None
    return round(factor) if abs(factor - round(factor)) < 1e-6 * factor else None


def is_sum(node: Any, samples: int | None) -> bool:
    """Whether ``node`` adds up one loss for each of ``samples``."""
    if node.name() == "SumBackward0":
        sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
        operand = _next(node)
        # A sum of several losses, each perhaps a mean, is not a sum over samples.
        parts = operand is not None and operand.name() in ("StackBackward0", "CatBackward0")
        return bool(sizes) and sizes[0] == samples and not parts
    return getattr(node, "_saved_reduction", None) == _SUM


def _is_mean(node: Any) -> bool:
    return node.name() == "MeanBackward0" or getattr(node, "_saved_reduction", None) == _MEAN


def _unscaled(node: Any) -> Any:
    """Return the node below a gradient scaler's factor and changes of type."""
    while node is not None:
        factor = _number(node) if node.name() == "MulBackward0" else None
        if node.name() != "ToCopyBackward0" and (factor is None or factor < _SCALED):
            return node
        node = _next(node)
    return None


def _next(node: Any) -> Any:
    following = [each for each, _ in node.next_functions if each is not None]
    return following[0] if len(following) == 1 else None


def _number(node: Any) -> float | None:
    other = getattr(node, "_saved_other", None)
    return float(other) if isinstance(other, torch.Tensor) and other.numel() == 1 else None
