"""What watches one training loop: checks of the script, comparisons of bits, parameters, speed, the GPU."""

from __future__ import annotations

from collections.abc import Callable

from craft.decide.techniques import GpuHealth
from craft.worker.checks.script import ScriptChecks
from craft.worker.loop.inner_loop.hooks import InWorker
from craft.worker.loop.trained_state import TrainedState
from craft.worker.monitor.consistency import ConsistencyCheck
from craft.worker.monitor.gpu import GpuWatch, watch_gpu
from craft.worker.monitor.parameter_set import ParameterSet
from craft.worker.monitor.stragglers import SpeedTracker
from craft.worker.state.loop_context import LoopContext


class LoopMonitors:
    """Owned by the main thread."""

    def __init__(self, context: LoopContext, state: TrainedState, in_microbatch: Callable[[], bool]) -> None:
        """``in_microbatch``: whether the script computes a microbatch now."""
        settings, reporter = context.settings, context.reporter
        self.parameters = ParameterSet(state.modules if state.is_exchanged else {})
        self.checks = ScriptChecks(
            state.modules,
            state.registered,
            not state.is_exchanged,
            in_microbatch,
            reporter.note,
            settings.check_script,
            is_heard=reporter.is_heard,
        )
        on_device = any(param.is_cuda for param in state.params)

        def may_vary() -> bool:
            """Return whether a microbatch may vary on this worker while no other worker could differ from it."""
            alone = len(context.participant.ledger.members) == 1
            return on_device and alone and not context.conditions.deterministic

        compares = settings.check_bits and state.is_exchanged
        self.consistency = ConsistencyCheck(compares, settings.digest_bytes, state.leaves, self.checks.warn, may_vary)
        self.speed = SpeedTracker(
            context.techniques, context.activity, lambda: context.participant.ledger, reporter.note, reporter.emit
        )
        self._gpu = _watch_gpu(context)

    def close(self) -> None:
        """Remove hooks and end threads."""
        self.parameters.close()
        self.checks.close()
        if self._gpu is not None:
            self._gpu.close()


def _watch_gpu(context: LoopContext) -> GpuWatch | None:
    technique = context.techniques.get(GpuHealth)
    if technique is None:
        return None
    return watch_gpu(technique.settings, InWorker(technique.name, context.settings, context.reporter))
