"""Average what ``self.log`` gets in microbatches over the global batch, through the control word.

Lightning keeps logged values in the worker that computed them. Decisions by them (when to stop, which checkpoint is best, the
learning rate) would depend on who computes what. So a ``MetricRecorder`` replaces Lightning's results while a microbatch is
computed, and after the step's commit every worker logs the means.
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
    """Replaces Lightning's results during a microbatch."""

    def __init__(self, reduce: Callable[..., Any] | None = None) -> None:
        """``reduce`` is the strategy's: the values are logged as Lightning would."""
        self._reduce = {} if reduce is None else {"sync_dist_fn": reduce}
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.known: dict[str, dict[str, Any]] = {}
        """How each value is logged, by its name in the word; the same on every worker, even one that logged none."""
        self.values: dict[str, torch.Tensor] = {}
        """Of the current microbatch."""
        self._new: dict[str, dict[str, Any]] = {}
        """Logged values that are not known yet."""
        self._updated: list[Any] = []
        """Metrics that it updated without asking for a value."""
        self._results: Any = None
        """Lightning's results, which this replaces."""
        self._checked: Any = None
        """Lightning's results that receive each value's logging arguments, so that they refuse what Lightning refuses."""
        self._how: dict[str, dict[str, Any]] = {}
        """The script's last logging arguments of each."""
        self._metrics: list[Any] = []
        """Metrics logged in this epoch: they have the state of this worker's microbatches."""

    def stand_for(self, results: Any) -> None:
        """Replace Lightning's results for a microbatch."""
        self._results = results

    def metrics(self, on_step: bool) -> Any:
        """What was logged before this microbatch, for the script."""
        return self._results.metrics(on_step)

    def _check(self, fx: str, name: str, value: Any, more: dict[str, Any]) -> None:
        """Let Lightning refuse what it refuses."""
        key, how = f"{fx}.{name}", {word: each for word, each in more.items() if word != "batch_size"}
        if self._results is None or self._how.get(key) == how:
            return
        if self._checked is None:
            self._checked = type(self._results)(training=True)
        self._checked.log(fx, name, value, batch_size=1, **how)
        self._how[key] = how

    def log(self, fx: str, name: str, value: Any, **more: Any) -> None:
        """Replaces the method of Lightning's results."""
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
        """Return the value of a torchmetrics.Metric for this microbatch; of one that was only updated, its contribution."""
        if hasattr(metric, "reset") and not any(each is metric for each in self._metrics):
            self._metrics.append(metric)
        given = getattr(metric, "_forward_cache", None)
        if given is None and getattr(metric, "update_called", False):
            self._updated.append(metric)
            return metric.compute()
        return given

    def reset_metrics(self) -> None:
        """Reset the metrics at the end of an epoch, as Lightning does."""
        for metric in self._metrics:
            metric.reset()
        self._metrics = []

    def reset(self, *_: Any, **__: Any) -> None:
        """Do nothing: microbatches share no state here."""

    def tell(self, step: Step) -> None:
        """Send what was logged with the microbatch."""
        step.log(**self.values)
        for how in self._new.values():
            say_aside(step, json.dumps(how, sort_keys=True))
        for metric in self._updated:
            # Over several microbatches it would depend on which of them this worker had.
            metric.reset()
        self.values, self._new, self._updated = {}, {}, []

    def put(self, results: Any, metrics: Mapping[str, float], samples: int, said: Iterable[str] = ()) -> None:
        """Log the means over the global batch, as a microbatch of any worker logged them."""
        for how in map(json.loads, said):
            self.known.setdefault(_key(how["fx"], how["name"]), how)
        for key, value in metrics.items():
            if key in self.known:
                results.log(value=torch.tensor(value), batch_size=samples, **self.arguments(self.known[key]))

    def arguments(self, how: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``results.log`` from the sent value."""
        return {**how, **self._reduce, "reduce_fx": getattr(torch, how["reduce_fx"])}


def _key(fx: str, name: str) -> str:
    """Return the name of a value in the word and in ``metrics.jsonl``, apart from CRAFT's own names."""
    return name if fx == _IN_STEP and name not in RESERVED else f"{fx}.{name}"


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return Lightning's ``callback_metrics`` under such names, if CRAFT does not make the steps."""
    return {f"callback_metrics.{name}" if name in RESERVED else name: float(each) for name, each in metrics.items()}


def _name_of(reduction: Any) -> str:
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "mean")
    return name.lower() if name.lower() in _REDUCTIONS else "mean"


def _how(metric: Any) -> dict[str, Any] | None:
    """Return how Lightning logged a value that no microbatch logged; None if it cannot be expressed."""
    meta = metric.meta
    if getattr(meta.reduce_fx, "__name__", None) not in _REDUCTIONS or meta.dataloader_idx is not None:
        return None
    how = {name: getattr(meta, name) for name in ("fx", "name", *_KEPT) if hasattr(meta, name)}
    return how | {"reduce_fx": meta.reduce_fx.__name__, "sync_dist": bool(meta.sync.should)}


def save(results: Any, recorder: MetricRecorder) -> list[dict[str, Any]]:
    """Return the values of the current epoch as plain data."""
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
    """Load what ``save`` returned into the results of another worker."""
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
