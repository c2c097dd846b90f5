"""What ``self.log`` is called with while a microbatch is computed: averaged over the global batch, by the control word.

Lightning keeps logged values in the worker that computed them. Here that would depend on who computes what, and so would
whatever is decided by them: when to stop, which checkpoint is best, the learning rate. So a ``Recorder`` stands in for
Lightning's results while a microbatch is computed, and after the step's commit every worker logs the means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from craft.worker.scalars import RESERVED
from craft.worker.steps import Step, say_aside

_IN_STEP = "training_step"
_KEPT = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "rank_zero_only")
_REDUCTIONS = ("mean", "sum", "max", "min")


class Recorder:
    """In the place of Lightning's results during a microbatch."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.known: dict[str, dict[str, Any]] = {}
        """By its name in the word: how it is logged. The same on every worker, also where no microbatch of its own logged it."""
        self.values: dict[str, torch.Tensor] = {}
        """Of the microbatch that is being computed."""
        self._new: dict[str, dict[str, Any]] = {}
        """What that logged and is not known yet."""
        self._updated: list[Any] = []
        """Metrics that it updated, and did not ask for a value."""

    def log(self, fx: str, name: str, value: Any, **more: Any) -> None:
        """As that of Lightning's results."""
        if not isinstance(value, torch.Tensor):
            value = self._of_microbatch(value)
        if not isinstance(value, torch.Tensor):
            return
        key = _key(fx, name)
        if key not in self.known:
            self._new[key] = {"fx": fx, "name": name, "reduce_fx": _name_of(more.get("reduce_fx", "mean"))} | {
                kept: more[kept] for kept in _KEPT if kept in more
            }
        self.values[key] = value.detach().float().mean()

    def _of_microbatch(self, metric: Any) -> Any:
        """What a torchmetrics.Metric gave for this microbatch; where it was only updated, what that comes to."""
        given = getattr(metric, "_forward_cache", None)
        if given is None and getattr(metric, "update_called", False):
            self._updated.append(metric)
            return metric.compute()
        return given

    def reset(self, *_: Any, **__: Any) -> None:
        """Nothing is kept here from one microbatch to the next."""

    def tell(self, step: Step) -> None:
        """Have what was logged travel with the microbatch."""
        step.log(**self.values)
        for how in self._new.values():
            say_aside(step, json.dumps(how, sort_keys=True))
        for metric in self._updated:
            # Over more than one microbatch it would depend on which of them fell to this worker.
            metric.reset()
        self.values, self._new, self._updated = {}, {}, []

    def put(self, results: Any, metrics: Mapping[str, float], samples: int, said: Iterable[str] = ()) -> None:
        """Log the means over the global batch, as each was logged in a microbatch, by whomever."""
        for how in map(json.loads, said):
            self.known.setdefault(_key(how["fx"], how["name"]), how)
        for key, value in metrics.items():
            if key in self.known:
                results.log(value=torch.tensor(value), batch_size=samples, **_arguments(self.known[key]))


def _key(fx: str, name: str) -> str:
    """Under which a value travels, and is in ``metrics.jsonl``: there CRAFT has names of its own, as Lightning's loggers do."""
    return name if fx == _IN_STEP and name not in RESERVED else f"{fx}.{name}"


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Lightning's ``callback_metrics``, where it is not CRAFT that makes steps, under such names."""
    return {f"callback_metrics.{name}" if name in RESERVED else name: float(each) for name, each in metrics.items()}


def _name_of(reduction: Any) -> str:
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")
    return name if name in _REDUCTIONS else "mean"


def _arguments(known: dict[str, Any]) -> dict[str, Any]:
    return {**known, "reduce_fx": getattr(torch, known["reduce_fx"])}


def save(results: Any, recorder: Recorder) -> list[dict[str, Any]]:
    """Values that an epoch has gathered so far, as plain data."""
    saved = []
    for key, metric in results.items():
        how = next((each for each in recorder.known.values() if f"{each['fx']}.{each['name']}" == key), None)
        if how is not None and metric.is_tensor:
            cache = metric._forward_cache
            saved.append(
                {
                    "how": dict(how),
                    "value": float(metric.value),
                    "count": int(getattr(metric, "cumulated_batch_size", 0)),
                    "last": None if cache is None else float(cache),
                    "has_reset": bool(metric.has_reset),
                }
            )
    return saved


def load(results: Any, recorder: Recorder, saved: list[dict[str, Any]]) -> None:
    """Put what ``save`` gave into the results of another worker."""
    for each in saved:
        how = dict(each["how"])
        fx, name = how["fx"], how["name"]
        recorder.known[_key(fx, name)] = how
        results.log(value=torch.tensor(0.0), batch_size=1, **_arguments(how))
        metric = results[f"{fx}.{name}"]
        metric.value = torch.tensor(each["value"])
        if hasattr(metric, "cumulated_batch_size"):
            metric.cumulated_batch_size = torch.tensor(each["count"])
        metric._forward_cache = None if each["last"] is None else torch.tensor(each["last"])
        metric._computed = None
        metric.has_reset = each["has_reset"]
