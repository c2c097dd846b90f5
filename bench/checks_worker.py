"""One worker of a job that trains blocks of steps in turns with the loop's checks on and off; started by ``bench/checks.py``."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

import craft
from craft.decide.step import combine
from craft.worker.loop.training_loop import TrainingLoop

TIMED_STEPS = 200
SETTLE_STEPS = 10
"""The checks look at more in the first steps, on purpose: these are not counted."""


def build(layers: int, width: int) -> torch.nn.Module:
    """A model with three buffers per layer, as a convolutional network has them."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)) for _ in range(layers)]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(width, 2))


class Switch:
    """Takes everything that the checks add to a step out of it, and puts it back."""

    _OFF: ClassVar[dict[str, Callable[..., Any]]] = {
        "unequal_buffer": lambda *_: None,
        "repeated": lambda *_: (),
        "outcasts": lambda *_: (),
    }

    def __init__(self, training: TrainingLoop) -> None:
        self._training = training
        self._buffers = training.state.buffers
        self._checks = training.checks
        self._hashes = training.state.buffers._hashes
        self._on = {name: getattr(combine, name) for name in self._OFF}

    def turn(self, on: bool) -> None:
        optimizers = self._checks._optimizers
        assert optimizers is not None
        for hook in optimizers._hooks:
            hook.remove()
        if on:
            optimizers._hooks = [
                register_optimizer_step_pre_hook(optimizers._before),
                register_optimizer_step_post_hook(optimizers._after),
            ]
        self._training.checks = self._checks if on else _Nothing()  # type: ignore[assignment]
        self._buffers._hashes = self._hashes if on else (lambda *_: None)  # type: ignore[method-assign]
        for name, function in (self._on if on else self._OFF).items():
            setattr(combine, name, function)


class Stopwatch:
    """Adds up the time that the main thread spends in the code of the checks, from when it is started."""

    def __init__(self, training: TrainingLoop, optimizer: torch.optim.Optimizer) -> None:
        self.spent_ns = 0
        checks = training.checks._optimizers
        assert checks is not None
        for hook in checks._hooks:
            hook.remove()
        checks._hooks = [
            register_optimizer_step_pre_hook(self._timed(checks._before)),
            register_optimizer_step_post_hook(self._timed(checks._after)),
        ]
        repeats = training.consistency.repeats
        runner = training.runner
        inspections = ("at_boundary", "inner_loop_begins", "inner_loop_ended")
        inside = [
            *((training.checks, name) for name in inspections),
            (training.state.buffers, "_hashes"),
            (runner, "_look_at_newcomers"),
        ]
        inside += [(repeats, name) for name in ("begin", "due", "committed")]
        inside += [(combine, name) for name in Switch._OFF]
        for thing, name in inside:
            setattr(thing, name, self._timed(getattr(thing, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter_ns()
            found = function(*args)
            self.spent_ns += time.perf_counter_ns() - began
            return found

        return timed


class _Nothing:
    looks_at_losses = False

    def at_boundary(self, step: int) -> None: ...

    def inner_loop_begins(self) -> None: ...

    def inner_loop_ended(self) -> None: ...

    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--steps-per-block", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = build(args.layers, args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs = torch.randn(256, args.width)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    job = craft.join()
    model = job.replicate(model)
    job.register(optimizer=optimizer)
    blocks: list[dict[str, Any]] = []
    switch: Switch | None = None
    cpu = wall = 0.0
    switched = SETTLE_STEPS + 2 * args.pairs * args.steps_per_block
    watch: Stopwatch | None = None
    spent: list[int] = []
    steps = switched + 1 + TIMED_STEPS
    for step in job.steps(data, global_batch=16, microbatches=2, steps=steps):
        block, place = divmod(step.number - SETTLE_STEPS, args.steps_per_block)
        if step.number > switched:
            watch = watch or Stopwatch(job._training, optimizer)  # type: ignore[arg-type]
            spent.append(watch.spent_ns)
        elif step.number >= SETTLE_STEPS and place == 0:
            switch = switch or Switch(job._training)  # type: ignore[arg-type]
            if blocks:
                blocks[-1] |= {"cpu_s": time.thread_time() - cpu, "wall_s": time.perf_counter() - wall}
            # On, off, off, on, ...: a drift of the machine meets both alike.
            on = block % 4 in (0, 3) or step.number == switched
            switch.turn(on)
            blocks.append({"on": on})
            cpu, wall = time.thread_time(), time.perf_counter()
        optimizer.zero_grad()
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if job.is_leader:
        inside = [after - before for before, after in itertools.pairwise(spent)]
        args.out.write_text(json.dumps({"blocks": blocks[:-1], "inside_ns": inside}))


if __name__ == "__main__":
    main()
