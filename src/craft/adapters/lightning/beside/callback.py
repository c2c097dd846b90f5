"""``CraftCallback(techniques=[...])``: techniques beside any strategy of Lightning, as far as it allows.

A technique's hooks run at the safe points of Lightning's step, and its policies answer in the same process. Of the actions, it
can do those that a trainer can: take a checkpoint, and stop after one. What follows on one worker follows on all, at the same
step. Under ``craft run`` there is also a lighthouse, and with it the active path (``active_path.py``).
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from craft.adapters.lightning.beside.active_path import ActivePath, is_under_craft, newest
from craft.decide.job.state import JobState
from craft.decide.techniques import BUILT_IN, Divergence, DivergenceSettings, Preemption
from craft.decide.techniques.technique import AnyTechnique, Hooks, Moment
from craft.protocol import actions
from craft.protocol.errors import ConfigError
from craft.protocol.events import ConditionSeen
from craft.settings.plugins import foreign, load

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Callback
else:
    _Callback = object

logger = logging.getLogger(__name__)

_STOPS = (actions.RequestDrain, actions.Drain, actions.Preempt, actions.WindDown, actions.Stop)
_BUILT_IN_HERE = (Divergence.name, Preemption.name)
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


class CraftCallback(_Callback):
    """Lets techniques take part in a fit that CRAFT does not drive: they detect, save and stop, but replace no worker."""

    def __init__(self, techniques: Iterable[str | AnyTechnique] = (), dirpath: str = "craft") -> None:
        """``techniques``: names, or objects with settings. ``dirpath``: directory for their checkpoints."""
        super().__init__()
        self._techniques = [_made(each) for each in techniques]
        self._dirpath = dirpath
        self._hooks: list[tuple[str, Hooks]] = []
        self._policies = [(each.name, policy) for each in self._foreign for policy in each.policies()]
        self._finite = next(
            (FiniteGradients(each.settings) for each in self._techniques if isinstance(each, Divergence)), None
        )
        self._file = next((each.settings.file for each in self._techniques if isinstance(each, Preemption)), None)
        self._active = ActivePath(dirpath) if is_under_craft() else None
        self._wishes: dict[str, str] = {}
        """What to do at the end of this step, ``checkpoint`` or ``stop``, and why."""

    @property
    def newest(self) -> str | None:
        """Return the newest checkpoint in ``dirpath``, for ``trainer.fit(ckpt_path=...)``; None if there is none."""
        return newest(self._dirpath)

    @property
    def _foreign(self) -> list[AnyTechnique]:
        return [each for each in self._techniques if each.name not in _BUILT_IN_HERE]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if getattr(trainer.strategy, "strategy_name", "") == "craft":
            raise ConfigError(
                'CraftCallback is for strategies of Lightning\'s own: under strategy="craft" techniques are those of craft run'
            )
        surroundings = [_CallbackHost(self, each.name, trainer.global_rank) for each in self._foreign]
        made = [(each.name, each.hooks(around)) for each, around in zip(self._foreign, surroundings, strict=True)]
        self._hooks = [(name, hooks) for name, hooks in made if hooks is not None]

    # The passive path.

    def _reach(self, trainer: Any, point: str, **more: Any) -> None:
        moment = Moment(
            step=trainer.global_step,
            branch=0,
            generation=1,
            members=tuple(f"rank{rank}" for rank in range(trainer.world_size)),
            **more,
        )
        for name, hooks in list(self._hooks):
            try:
                getattr(hooks, point)(moment)
            except Exception:
                # Code of another package: training must not end because of it.
                logger.exception("technique %s failed in %s and is left out from now on", name, point)
                self._hooks.remove((name, hooks))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._active is not None:
            self._active.begins()
        self._reach(trainer, "batch_start", microbatch=batch_idx % trainer.accumulate_grad_batches)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._exchanges(True)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._exchanges(False)
        self._reach(trainer, "after_backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._reach(trainer, "before_commit")
        if self._finite is not None and (reason := self._finite.look(trainer.global_step, optimizer)) is not None:
            self._wishes["stop"] = reason
        if self._active is not None:
            self._active.updates()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()} if self._hooks else {}
        self._reach(trainer, "after_commit", metrics=metrics)
        if self._file is not None and os.path.exists(self._file):
            self._wishes["stop"] = f"{self._file} exists"
        if self._active is not None:
            self._active.stepped(trainer)
            if (reason := self._active.guest.leaving) is not None:
                self._wishes["stop"] = reason
        self._fulfil(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._active is not None:
            self._active.evaluates(begins=True)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._active is not None:
            self._active.evaluates(begins=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._active is not None and self._active.is_lost(exception):
            self._active.begin_again(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for _, hooks in self._hooks:
            hooks.close()

    # What follows.

    def told(self, event: ConditionSeen) -> None:
        """Ask the policies about an event of a hook; the first that answers wins."""
        for name, policy in self._policies:
            answer = policy.decide(JobState(slots=1), event)
            for action in answer:
                self._wish(name, action)
            if answer:
                return
        logger.warning("technique %s: %s %s (no policy answers it)", event.technique, event.what, event.detail)

    def _wish(self, name: str, action: actions.Action) -> None:
        if isinstance(action, actions.TakeCheckpoint):
            self._wishes.setdefault("checkpoint", action.reason)
        elif isinstance(action, _STOPS):
            self._wishes["stop"] = action.reason
        else:
            logger.warning(
                'technique %s wants %s (%s), which needs strategy="craft"', name, type(action).__name__, action.reason
            )

    def _fulfil(self, trainer: Any) -> None:
        """Do on every worker what any of them wants."""
        wishes, self._wishes = self._wishes, {}
        stop, save = self._agreed(trainer, "stop" in wishes, bool(wishes))
        if not save:
            return
        path = os.path.join(self._dirpath, f"step={trainer.global_step}.ckpt")
        trainer.save_checkpoint(f"{path}.part")
        if trainer.is_global_zero and self._active is not None:
            self._active.listed(path, trainer.global_step)
        elif trainer.is_global_zero:
            os.replace(f"{path}.part", path)
        reason = "; ".join(wishes.values()) or "requested by another worker"
        logger.warning("checkpoint %s%s: %s", path, ", and the end of the fit" if stop else "", reason)
        if stop and self._active is not None:
            self._active.part(trainer)
        trainer.should_stop = trainer.should_stop or stop

    def _agreed(self, trainer: Any, stop: bool, save: bool) -> tuple[bool, bool]:
        """Return whether any worker wants the fit to stop, or a checkpoint to be saved."""
        agree = trainer.strategy.reduce_boolean_decision
        self._exchanges(True)
        stop = agree(stop, all=False)
        save = stop or agree(save, all=False)
        self._exchanges(False)
        return stop, save

    def _exchanges(self, begins: bool) -> None:
        if self._active is not None:
            self._active.exchanges(begins)


class _CallbackHost:
    """What the hooks of one technique may know and do."""

    def __init__(self, callback: CraftCallback, technique: str, rank: int) -> None:
        self._callback = callback
        self._technique = technique
        self.worker_id = f"rank{rank}"
        self.host = socket.gethostname()

    def tell(self, what: str, value: float | None = None, detail: str = "") -> None:
        self._callback.told(
            ConditionSeen(
                technique=self._technique,
                what=what,
                worker_id=self.worker_id,
                host=self.host,
                value=value,
                detail=detail,
                time=time.time(),
            )
        )


def _made(wanted: str | AnyTechnique) -> AnyTechnique:
    kinds = {kind.name: kind for kind in BUILT_IN}
    name = wanted if isinstance(wanted, str) else wanted.name
    if name in kinds and name not in _BUILT_IN_HERE:
        raise ConfigError(
            f'CraftCallback: technique {name} needs a job of CRAFT\'s: Trainer(strategy="craft"), started by craft run'
        )
    if not isinstance(wanted, str):
        return wanted
    if name not in kinds and name not in foreign():
        raise ConfigError(f"CraftCallback: there is no technique {name!r}; craft techniques lists them")
    kind = kinds[name] if name in kinds else load(foreign()[name])
    return kind(kind.Settings())


def callback_class(package: str) -> Any:
    """Return the callback as a subclass of this package's ``Callback``."""
    base = importlib.import_module(f"{package}.callbacks").Callback
    return type("CraftCallback", (CraftCallback, base), {"__doc__": CraftCallback.__doc__, "__module__": __name__})
