"""A training script in parts: features add lines to its sections, and ``render`` makes the text.

Lines may use two placeholders, which depend on the kind of loop: ``LOOP`` (the step or attempt) and ``NUMBER`` (the
step's number).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

PRELUDE = '''
import faulthandler
import hashlib
import itertools
import os
import random
import signal
import time

import numpy
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

import craft
from craft import testing

faulthandler.register(signal.SIGUSR1, all_threads=True)
testing.arm()


def pace():
    """Take a moment for each microbatch; a longer one while the driver waits for something to happen in the job."""
    time.sleep(0.04 if os.path.exists("hold") else 0.002)


def show(number, metrics):
    """Print what a step gave, to the bit."""
    print("STEP", number, repr(sorted(metrics.items())), flush=True)


def fingerprint(*objects):
    """Hash everything that the script ends with, whether or not the job knows it."""
    digest = hashlib.sha256()

    def walk(value):
        if hasattr(value, "state_dict"):
            walk(value.state_dict())
        elif isinstance(value, torch.Tensor):
            digest.update(repr((value.dtype, tuple(value.shape))).encode())
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=repr):
                digest.update(repr(key).encode())
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                walk(each)
        elif not callable(value):
            digest.update(repr(value).encode())

    for each in objects:
        walk(each)
    return digest.hexdigest()[:16]
'''.strip()

SHOW = "show(NUMBER, LOOP.metrics)"


@dataclass
class Draft:
    """The sections of a script, each a list of lines."""

    layers: list[str] = field(default_factory=list)
    """Of ``Net.__init__``."""
    forward: list[str] = field(default_factory=list)
    """Of ``Net.forward``: they take ``x`` to ``h``."""
    definitions: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=lambda: ["net = Net()"])
    """Models, optimizers and the like, before the job is joined."""
    modules: list[str] = field(default_factory=lambda: ["net"])
    """Names of the modules that are replicated."""
    frozen: list[str] = field(default_factory=list)
    """Those of them that are not trained."""
    registered: list[str] = field(default_factory=list)
    before_loop: list[str] = field(default_factory=list)
    source: str = "data"
    arguments: dict[str, str] = field(default_factory=dict)
    """Of ``job.steps`` or ``job.attempts``."""
    loop: str = "steps"
    closure: bool = False
    """The optimizer calls the inner loop itself, in a loop of attempts."""
    before_microbatches: list[str] = field(default_factory=list)
    unpack: list[str] = field(default_factory=list)
    """From ``batch`` to ``x`` and ``y``; where there is none, the loop unpacks the batch itself."""
    microbatch: list[str] = field(default_factory=list)
    context: str = ""
    """A ``with`` around the forward pass."""
    output: str = "net(x)"
    loss: list[str] = field(default_factory=lambda: ["loss = F.cross_entropy(out, y)"])
    backward: str = "loss.backward()"
    after_backward: list[str] = field(default_factory=lambda: ["LOOP.log(loss=loss)"])
    gradients: list[str] = field(default_factory=list)
    """Between the inner loop and the update."""
    optimizers: list[str] = field(default_factory=lambda: ["optimizer"])
    update: list[str] = field(default_factory=list)
    after_update: list[str] = field(default_factory=list)
    after_attempt: list[str] = field(default_factory=list)
    """Behind the body of an attempt, whether or not it counts."""
    between: list[str] = field(default_factory=list)
    """Calls between the steps, saves, a stop: in a loop of attempts only after one that counts."""
    after_epoch: list[str] = field(default_factory=list)
    """Behind each pass, in a loop of epochs."""
    after_loop: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=lambda: ["net"])
    """What the fingerprint at the end is of."""
    files: list[str] = field(default_factory=list)
    """Files of tensors that the script leaves, the same ones whatever was killed."""
    options: list[str] = field(default_factory=list)
    """Of ``craft run``."""
    steps: int = 24


def pick(draw: random.Random, *choices: str) -> str:
    return draw.choice(choices)


def indent(lines: list[str], levels: int = 1) -> list[str]:
    return [" " * 4 * levels + line if line else "" for each in lines for line in each.split("\n")]


def render(draft: Draft, title: str, seed: int) -> str:
    """The text of the script."""
    lines = [f'"""{title}"""', "", *PRELUDE.split("\n"), "", ""]
    lines += ["class Net(torch.nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += indent(draft.layers, 2)
    lines += ["", "    def forward(self, x):", *indent(draft.forward, 2), "        return self.last(h)", "", ""]
    for definition in draft.definitions:
        lines += [*definition.split("\n"), "", ""]
    lines += [f"torch.manual_seed({seed})", *draft.data, *draft.setup, "", "job = craft.join()"]
    lines += [f"{name} = job.replicate({name})" for name in draft.modules]
    if draft.registered:
        lines.append(f"job.register({', '.join(f'{name}={name}' for name in draft.registered)})")
    lines += [*draft.before_loop, ""]
    lines += {"steps": _steps, "epochs": _epochs, "attempts": _attempts}[draft.loop](draft)
    lines += ["", *draft.after_loop, f'print("FINAL", fingerprint({", ".join(draft.state)}), flush=True)', ""]
    loop, number = ("attempt", "attempt.step") if draft.loop == "attempts" else ("step", "step.number")
    return "\n".join(lines).replace("LOOP", loop).replace("NUMBER", number)


def _call(draft: Draft) -> str:
    given = [draft.source, *(f"{name}={value}" for name, value in draft.arguments.items())]
    return f"job.{draft.loop}({', '.join(given)})"


def _microbatches(draft: Draft, iterable: str) -> list[str]:
    lines = [f"for {'batch' if draft.unpack else 'x, y'} in {iterable}:", "    pace()"]
    lines += indent([*draft.unpack, *draft.microbatch])
    inner = [f"out = {draft.output}", *draft.loss]
    lines += indent([f"with {draft.context}:", *indent(inner)] if draft.context else inner)
    return [*lines, *indent([draft.backward, *draft.after_backward])]


def _update(draft: Draft) -> list[str]:
    return [*draft.gradients, *(draft.update or [f"{each}.step()" for each in draft.optimizers]), *draft.after_update]


def _body(draft: Draft) -> list[str]:
    """Of one step."""
    zero = [f"{each}.zero_grad()" for each in draft.optimizers]
    return [*zero, *draft.before_microbatches, *_microbatches(draft, "step"), *_update(draft), SHOW, *draft.between]


def _steps(draft: Draft) -> list[str]:
    return [f"for step in {_call(draft)}:", *indent(_body(draft))]


def _epochs(draft: Draft) -> list[str]:
    number = draft.arguments.pop("epochs")
    call = _call(draft).replace("job.epochs(", f"job.epochs({number}, ")
    return [f"for epoch in {call}:", "    for step in epoch:", *indent(_body(draft), 2), *indent(draft.after_epoch)]


def _attempts(draft: Draft) -> list[str]:
    trained = [name for name in draft.modules if name not in draft.frozen]
    parameters = " + ".join(f"list({name}.parameters())" for name in trained)
    loop = _microbatches(draft, f"attempt.microbatches({parameters})")
    if draft.closure:
        closure = ["def closure():", *indent([*loop, 'return attempt.metrics["loss"]']), "", "optimizer.step(closure)"]
        body = [*draft.before_microbatches, *closure, *draft.gradients, *draft.after_update]
    else:
        body = [*draft.before_microbatches, *loop, *_update(draft)]
    lines = [f"for attempt in {_call(draft)}:", "    with attempt:", *indent(body, 2)]
    lines += indent(draft.after_attempt)
    return [*lines, "    if attempt.committed:", *indent([SHOW, *draft.between], 2)]
