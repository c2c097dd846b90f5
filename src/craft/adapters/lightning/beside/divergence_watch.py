"""The technique ``divergence`` beside a strategy of Lightning: it checks the gradients that the update would use."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from craft.decide.techniques import DivergenceSettings
from craft.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_ANSWERS = ("report", "skip", "stop")


class FiniteGradients:
    """Checks gradients after the strategy's reduction, when all workers have the same and find the same."""

    def __init__(self, settings: DivergenceSettings) -> None:
        if settings.answer not in _ANSWERS:
            raise ConfigError(
                f"CraftCallback: divergence with the answer {settings.answer} needs a job of CRAFT's; here: {', '.join(_ANSWERS)}"
            )
        self._answer = settings.answer
        self._bad = False

    def look(self, step: int, optimizer: Any) -> str | None:
        """Check before the update; return why the fit is to stop, if it is."""
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        again, self._bad = self._bad, not all(_is_finite(param.grad) for param in params)
        if not self._bad or (again and self._answer == "report"):
            return None
        what = f"a gradient of step {step} is not finite"
        logger.warning("%s; the answer is %s", what, self._answer)
        if self._answer != "report":
            # Without gradients no optimizer changes anything.
            for param in params:
                param.grad = None
        return what if self._answer == "stop" else None


def _is_finite(tensor: torch.Tensor) -> bool:
    # The sum first: it is fast, and finite unless something is wrong. Then element by element.
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
