"""Features of the update: optimizers, schedulers, moving averages, precision, clipping, parameters that are frozen."""

from __future__ import annotations

import random

from .draft import Draft
from .options import nothing, option


def _trained(draft: Draft) -> list[str]:
    return [name for name in draft.modules if name not in draft.frozen]


def _parameters(draft: Draft) -> str:
    return " + ".join(f"list({name}.parameters())" for name in _trained(draft))


def _only(draft: Draft, construction: str) -> None:
    draft.setup.append(f"optimizer = {construction}")
    draft.registered.append("optimizer")
    draft.state.append("optimizer")


def _simple(name: str, *constructions: str, weight: float = 1.0) -> None:
    def make(draft: Draft, draw: random.Random) -> None:
        _only(draft, draw.choice(constructions).format(_parameters(draft)))

    option("optimizer", name, weight)(make)


_simple("sgd", "torch.optim.SGD({}, lr=0.05)")
_simple(
    "momentum",
    "torch.optim.SGD({}, lr=0.02, momentum=0.9, nesterov=True)",
    "torch.optim.SGD({}, lr=0.02, momentum=0.9, dampening=0.1, weight_decay=0.01)",
    weight=2,
)
_simple("adam", "torch.optim.Adam({}, lr=0.01, amsgrad=True)", "torch.optim.Adam({}, lr=0.01, foreach=True)")
_simple("fused", "torch.optim.AdamW({}, lr=0.01, fused=True)")
_simple("others", "torch.optim.RMSprop({}, lr=0.005, momentum=0.5, centered=True)", "torch.optim.Adagrad({}, lr=0.02)",
        "torch.optim.NAdam({}, lr=0.005)", "torch.optim.Adafactor({}, lr=0.01)", "torch.optim.RAdam({}, lr=0.01)",
        "torch.optim.ASGD({}, lr=0.02)", "torch.optim.Rprop({}, lr=0.001)", "torch.optim.Adamax({}, lr=0.01)",
        weight=3)  # fmt: skip


def _later_layers(draft: Draft) -> str:
    """The parameters of everything but the first layer."""
    tail = "".join(f" + list({name}.parameters())" for name in _trained(draft)[1:])
    return f"[p for n, p in net.named_parameters() if not n.startswith('first')]{tail}"


@option("optimizer", "groups", 2)
def groups(draft: Draft, draw: random.Random) -> None:
    slow = "{'params': list(net.first.parameters()), 'lr': 0.003}"
    _only(
        draft,
        f"torch.optim.AdamW([{slow}, {{'params': {_later_layers(draft)}, 'weight_decay': 0.0}}], lr=0.01, weight_decay=0.1)",
    )


@option("optimizer", "two", 2, forces={"net": "mlp"}, bars="switch")
def two(draft: Draft, draw: random.Random) -> None:
    """One for the first layer, one for the rest."""
    _only(draft, "torch.optim.SGD(net.first.parameters(), lr=0.02, momentum=0.9)")
    draft.setup.append(f"second = torch.optim.AdamW({_later_layers(draft)}, lr=0.01)")
    draft.optimizers.append("second")
    draft.registered.append("second")
    draft.state.append("second")


@option("optimizer", "late_group", forces={"net": "mlp"}, bars="scheduler")
def late_group(draft: Draft, draw: random.Random) -> None:
    """A layer that the optimizer gets in the middle of the job."""
    _only(draft, f"torch.optim.SGD({_later_layers(draft)}, lr=0.02, momentum=0.9)")
    draft.before_microbatches.append(
        f"if NUMBER >= {draw.randint(3, 14)} and len(optimizer.param_groups) == 1:\n"
        "    optimizer.add_param_group({'params': list(net.first.parameters()), 'lr': 0.004})"
    )


@option("optimizer", "own_class")
def own_class(draft: Draft, draw: random.Random) -> None:
    draft.definitions.append('''
class Lion(torch.optim.Optimizer):
    """Signs of a moving average of gradients."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.add_(average.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
'''.strip())  # fmt: skip
    _only(draft, f"Lion({_parameters(draft)}, lr=0.003)")


@option("optimizer", "lbfgs", forces={"loop": "attempts"}, bars="precision gradients partial after scheduler")
def lbfgs(draft: Draft, draw: random.Random) -> None:
    """Calls a closure several times in a step."""
    search = draw.choice(["None", "'strong_wolfe'"])
    _only(
        draft, f"torch.optim.LBFGS({_parameters(draft)}, lr=0.1, max_iter=3, history_size=4, line_search_fn={search})"
    )
    draft.closure = True
    draft.steps = 10


nothing("scheduler", 2)

WARMUP = "lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)"


def _scheduler(name: str, *constructions: str) -> None:
    def make(draft: Draft, draw: random.Random) -> None:
        draft.setup.append(f"scheduler = lr_scheduler.{draw.choice(constructions)}")
        draft.after_update.append("scheduler.step()")
        draft.registered.append("scheduler")
        draft.state.append("scheduler")

    option("scheduler", name)(make)


_scheduler(
    "steplr", "StepLR(optimizer, 7, 0.5)", "MultiStepLR(optimizer, [5, 11], 0.3)", "ExponentialLR(optimizer, 0.95)"
)
_scheduler(
    "cosine",
    "CosineAnnealingLR(optimizer, 20)",
    "CosineAnnealingWarmRestarts(optimizer, 6)",
    "PolynomialLR(optimizer, 30)",
)
_scheduler("onecycle", "OneCycleLR(optimizer, 0.05, total_steps=400, cycle_momentum=False)")
_scheduler("lambda", "LambdaLR(optimizer, lambda n: 0.97 ** n)", "MultiplicativeLR(optimizer, lambda n: 0.98)")
_scheduler(
    "sequence",
    f"SequentialLR(optimizer, [{WARMUP}, lr_scheduler.CosineAnnealingLR(optimizer, 20)], [5])",
    f"ChainedScheduler([{WARMUP}, lr_scheduler.ExponentialLR(optimizer, 0.98)])",
)


@option("scheduler", "plateau", 2)
def plateau(draft: Draft, draw: random.Random) -> None:
    """Fed with the mean of the loss over the global batch."""
    draft.setup.append("scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)")
    draft.after_update.append('scheduler.step(LOOP.metrics["loss"])')
    draft.registered.append("scheduler")
    draft.state.append("scheduler")


@option("scheduler", "by_hand")
def by_hand(draft: Draft, draw: random.Random) -> None:
    """The rate follows from the step's number."""
    draft.gradients.append("for group in optimizer.param_groups:\n    group['lr'] = 0.02 / (1 + NUMBER)")


nothing("average", 3)

EMA = '''
class Ema:
    """A moving average of a module's state."""

    def __init__(self, module):
        self.values = {name: value.detach().clone().float() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module):
        for name, value in module.state_dict().items():
            self.values[name].lerp_(value.float(), 0.1)

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values = dict(state)
'''.strip()


@option("average", "own", 2)
def own_average(draft: Draft, draw: random.Random) -> None:
    draft.definitions.append(EMA)
    draft.setup.append("average = Ema(net)")
    draft.after_update.append("average.update(net)")
    draft.registered.append("average")
    draft.state.append("average")


@option("average", "averaged_model", 2)
def averaged_model(draft: Draft, draw: random.Random) -> None:
    buffers = draw.choice(["True", "False"])
    draft.setup.append(
        "average = torch.optim.swa_utils.AveragedModel("
        f"net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers={buffers})"
    )
    start = draw.choice([0, 6])
    draft.after_update.append(f"if NUMBER >= {start}:\n    average.update_parameters(net)")
    draft.registered.append("average")
    draft.state.append("average")


nothing("precision", 3)


@option("precision", "autocast")
def autocast(draft: Draft, draw: random.Random) -> None:
    draft.context = 'torch.autocast("cpu", dtype=torch.bfloat16)'


@option("precision", "scaler", 2)
def scaler(draft: Draft, draw: random.Random) -> None:
    draft.context = 'torch.autocast("cpu", dtype=torch.bfloat16)'
    draft.setup.append('scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)')
    draft.registered.append("scaler")
    draft.state.append("scaler")
    draft.backward = "scaler.scale(loss).backward()"
    draft.gradients += [f"scaler.unscale_({each})" for each in draft.optimizers]
    draft.update = [*(f"scaler.step({each})" for each in draft.optimizers), "scaler.update()"]


nothing("gradients", 2)


@option("gradients", "clip")
def clip(draft: Draft, draw: random.Random) -> None:
    draft.gradients.append(f"torch.nn.utils.clip_grad_norm_({_parameters(draft)}, {draw.choice([0.1, 1.0])})")


@option("gradients", "clip_value")
def clip_value(draft: Draft, draw: random.Random) -> None:
    draft.gradients.append(f"torch.nn.utils.clip_grad_value_({_parameters(draft)}, 0.05)")


@option("gradients", "gradient_noise")
def gradient_noise(draft: Draft, draw: random.Random) -> None:
    """Random numbers after the inner loop: the same on every worker."""
    draft.gradients += [
        f"for p in {_parameters(draft)}:",
        "    if p.grad is not None:",
        "        p.grad.add_(torch.randn_like(p.grad), alpha=0.001)",
    ]


nothing("switch", 4)


@option("switch", "unfreeze")
def unfreeze(draft: Draft, draw: random.Random) -> None:
    draft.setup.append("net.first.requires_grad_(False)")
    draft.after_update.append(f"if NUMBER == {draw.randint(3, 14)}:\n    net.first.requires_grad_(True)")


@option("switch", "freeze")
def freeze(draft: Draft, draw: random.Random) -> None:
    draft.after_update.append(f"net.first.requires_grad_(NUMBER // {draw.randint(3, 6)} % 2 == 0)")


@option("switch", "eval_norm", forces={"norm": "batchnorm"})
def eval_norm(draft: Draft, draw: random.Random) -> None:
    draft.after_update.append(f"if NUMBER == {draw.randint(3, 14)}:\n    net.norm.eval()")
