"""What ``self.log`` is called with while a microbatch is computed: averaged over the global batch, by the control word.

Lightning keeps logged values in the worker that computed them. Here that would depend on who computes what, and so would
whatever is decided by them: when to stop, which checkpoint is best, the learning rate. So a ``MetricRecorder`` stands in for
Lightning's results while a microbatch is computed, and after the step's commit every worker logs the means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from craft.worker.api.steps import Step, say_aside
from craft.worker.report.metrics import RESERVED

_IN_STEP = "training_step"
_KEPT = (
    "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "sync_dist", "add_dataloader_idx", "rank_zero_only",
)  # fmt: skip
_REDUCTIONS = ("mean", "sum", "max", "min")


class MetricRecorder:
    """In the place of Lightning's results during a microbatch."""

    def __init__(self, reduce: Callable[..., Any] | None = None) -> None:
        """``reduce`` is the strategy's: with it the values are logged as Lightning itself would."""
        self._reduce = {} if reduce is None else {"sync_dist_fn": reduce}
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
        self._results: Any = None
        """Lightning's own, in whose place this stands."""
        self._checked: Any = None
        """Others of Lightning's, which are told how each value is logged, so that they refuse what Lightning refuses."""
        self._how: dict[str, dict[str, Any]] = {}
        """How each was logged last, in the script's own words."""
        self._metrics: list[Any] = []
        """Those that were logged in this epoch: they have the state of this worker's microbatches."""

    def stand_for(self, results: Any) -> None:
        """Take the place of Lightning's own for a microbatch."""
        self._results = results

    def metrics(self, on_step: bool) -> Any:
        """What was logged before this microbatch: the script may look at it."""
        return self._results.metrics(on_step)

    def _check(self, fx: str, name: str, value: Any, more: dict[str, Any]) -> None:
        """Have Lightning itself refuse what it refuses."""
        key, how = f"{fx}.{name}", {word: each for word, each in more.items() if word != "batch_size"}
        if self._results is None or self._how.get(key) == how:
            return
        if self._checked is None:
            self._checked = type(self._results)(training=True)
        self._checked.log(fx, name, value, batch_size=1, **how)
        self._how[key] = how

    def log(self, fx: str, name: str, value: Any, **more: Any) -> None:
        """As that of Lightning's results."""
        self._check(fx, name, value, more)
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
        if hasattr(metric, "reset") and not any(each is metric for each in self._metrics):
            self._metrics.append(metric)
        given = getattr(metric, "_forward_cache", None)
        if given is None and getattr(metric, "update_called", False):
            self._updated.append(metric)
            return metric.compute()
        return given

    def reset_metrics(self) -> None:
        """An epoch is over: as Lightning does with the metrics that it logs."""
        for metric in self._metrics:
            metric.reset()
        self._metrics = []

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
                results.log(value=torch.tensor(value), batch_size=samples, **self.arguments(self.known[key]))

    def arguments(self, how: dict[str, Any]) -> dict[str, Any]:
        """Those of ``results.log``, from what travels."""
        return {**how, **self._reduce, "reduce_fx": getattr(torch, how["reduce_fx"])}


def _key(fx: str, name: str) -> str:
    """Under which a value travels, and is in ``metrics.jsonl``: there CRAFT has names of its own, as Lightning's loggers do."""
    return name if fx == _IN_STEP and name not in RESERVED else f"{fx}.{name}"


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Lightning's ``callback_metrics``, where it is not CRAFT that makes steps, under such names."""
    return {f"callback_metrics.{name}" if name in RESERVED else name: float(each) for name, each in metrics.items()}


def _name_of(reduction: Any) -> str:
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")
    return name.lower() if name.lower() in _REDUCTIONS else "mean"


def _how(metric: Any) -> dict[str, Any] | None:
    """How Lightning itself logged a value, where no microbatch of CRAFT's did; None if that cannot be put into words."""
    meta = metric.meta
    if getattr(meta.reduce_fx, "__name__", None) not in _REDUCTIONS or meta.dataloader_idx is not None:
        return None
    how = {name: getattr(meta, name) for name in ("fx", "name", *_KEPT) if hasattr(meta, name)}
    return how | {"reduce_fx": meta.reduce_fx.__name__, "sync_dist": bool(meta.sync.should)}


def save(results: Any, recorder: MetricRecorder) -> list[dict[str, Any]]:
    """Values that an epoch has gathered so far, as plain data."""
    saved = []
    for key, metric in results.items():
        how = next((each for each in recorder.known.values() if f"{each['fx']}.{each['name']}" == key), _how(metric))
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


def load(results: Any, recorder: MetricRecorder, saved: list[dict[str, Any]]) -> None:
    """Put what ``save`` gave into the results of another worker."""
    for each in saved:
        how = dict(each["how"])
        fx, name = how["fx"], how["name"]
        recorder.known[_key(fx, name)] = how
        results.log(value=torch.tensor(0.0), batch_size=1, **recorder.arguments(how))
        metric = results[f"{fx}.{name}"]
        metric.value = torch.tensor(each["value"])
        if hasattr(metric, "cumulated_batch_size"):
            metric.cumulated_batch_size = torch.tensor(each["count"])
        metric._forward_cache = None if each["last"] is None else torch.tensor(each["last"])
        metric._computed = None
        metric.has_reset = each["has_reset"]
