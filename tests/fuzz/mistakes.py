"""Mistakes that scripts make: each may be exact all the same, or refused with a sentence, but never silently different."""

from __future__ import annotations

import random

from .draft import Draft
from .options import nothing, option
from .updates import EMA

nothing("mistake", 60)

STEPS = {"loop": "steps"}


def _forget(draft: Draft, name: str) -> None:
    draft.registered.remove(name)


@option("mistake", "optimizer_not_registered", 2, forces={"optimizer": "momentum"}, says="register|optimizer|state")
def optimizer_not_registered(draft: Draft, draw: random.Random) -> None:
    _forget(draft, "optimizer")


@option("mistake", "scheduler_not_registered", forces={"scheduler": "steplr"}, says="register|scheduler|state")
def scheduler_not_registered(draft: Draft, draw: random.Random) -> None:
    _forget(draft, "scheduler")


@option("mistake", "nothing_registered", forces={"optimizer": "two", "scheduler": "cosine"}, says="register|state")
def nothing_registered(draft: Draft, draw: random.Random) -> None:
    draft.registered = []


@option("mistake", "scaler_not_registered", forces={"precision": "scaler"}, says="register|scal|state")
def scaler_not_registered(draft: Draft, draw: random.Random) -> None:
    _forget(draft, "scaler")


@option("mistake", "module_not_replicated", forces={"second": "decoder"}, says="replicate|decoder|parameter")
def module_not_replicated(draft: Draft, draw: random.Random) -> None:
    draft.modules.remove("decoder")


@option("mistake", "stray_module", forces=STEPS, says="replicate|stray|parameter|optimizer")
def stray_module(draft: Draft, draw: random.Random) -> None:
    """A module with an optimizer, neither of which the job knows."""
    draft.setup += ["stray = torch.nn.Linear(8, 3)", "own = torch.optim.SGD(stray.parameters(), lr=0.05)"]
    draft.loss.append("loss = loss + F.cross_entropy(out[:, :3] + stray(x), y)")
    draft.after_update += ["own.step()", "own.zero_grad()"]
    draft.state.append("stray")


@option("mistake", "average_not_registered", says="register|average|state")
def average_not_registered(draft: Draft, draw: random.Random) -> None:
    """A moving average that the loss depends on."""
    draft.definitions.append(EMA.replace("Ema", "Teacher"))
    draft.setup.append("teacher = Teacher(net)")
    draft.after_update.append("teacher.update(net)")
    draft.loss.append("loss = loss + 0.1 * (net.last.weight - teacher.values['last.weight']).pow(2).sum()")
    draft.state.append("teacher")


@option("mistake", "average_only_kept", says="register|average|state")
def average_only_kept(draft: Draft, draw: random.Random) -> None:
    """A moving average of which nothing depends in the job, but that the script ends with."""
    draft.setup.append("kept = torch.optim.swa_utils.AveragedModel(net)")
    draft.after_update.append("kept.update_parameters(net)")
    draft.state.append("kept")


@option("mistake", "own_generator", 2, says="generator|random|bits|depend")
def own_generator(draft: Draft, draw: random.Random) -> None:
    draft.setup.append("generator = torch.Generator().manual_seed(5)")
    draft.microbatch.append("x = x + 0.1 * torch.randn(x.shape, generator=generator)")


@option("mistake", "own_numpy_generator", says="generator|random|bits|depend")
def own_numpy_generator(draft: Draft, draw: random.Random) -> None:
    draft.setup.append("generator = numpy.random.default_rng(5)")
    draft.microbatch.append("x = x * float(generator.uniform(0.8, 1.2))")


@option("mistake", "generator_between_steps", says="generator|random|state|register|bits")
def generator_between_steps(draft: Draft, draw: random.Random) -> None:
    """Every worker draws the same, but for one that joins."""
    draft.setup.append("generator = torch.Generator().manual_seed(5)")
    draft.gradients += [
        "for p in net.parameters():",
        "    if p.grad is not None:",
        "        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)",
    ]


@option("mistake", "carried_state", 2, forces={"net": "mlp"}, says="carr|state|bits|depend|microbatch")
def carried_state(draft: Draft, draw: random.Random) -> None:
    """What one microbatch leaves in a global is used by the next one."""
    draft.setup.append("carried = torch.zeros(8)")
    draft.microbatch += ["x = x + 0.3 * carried", "carried = x.detach().mean(0)"]


@option("mistake", "carried_within_step", forces=STEPS, says="carr|state|bits|depend|microbatch")
def carried_within_step(draft: Draft, draw: random.Random) -> None:
    """Reset in every step, and so the same on one worker only."""
    draft.before_microbatches.append("carried = torch.zeros(8)")
    draft.microbatch += ["x = x + 0.3 * carried", "carried = x.detach().mean(0)"]


@option("mistake", "counts_forwards", says="bits|depend|state|register|forward")
def counts_forwards(draft: Draft, draw: random.Random) -> None:
    """A plain attribute of a module that grows with every forward pass, and changes what it computes."""
    draft.layers.append("self.calls = 0")
    draft.forward += ["self.calls += 1", "h = h * (1 + 0.01 * (self.calls % 7))"]


@option("mistake", "own_counter", says="count|register|state|bits")
def own_counter(draft: Draft, draw: random.Random) -> None:
    """Steps are counted by the script, and the rate depends on that."""
    draft.setup.append("count = 0")
    draft.gradients += ["count += 1", "for group in optimizer.param_groups:", "    group['lr'] = 0.05 / (1 + count)"]


@option("mistake", "best_not_registered", says="register|state|bits")
def best_not_registered(draft: Draft, draw: random.Random) -> None:
    draft.setup.append("best = 1e9")
    draft.after_update += [
        'if LOOP.metrics["loss"] > best:',
        "    for group in optimizer.param_groups:",
        "        group['lr'] *= 0.9",
        'best = min(best, LOOP.metrics["loss"])',
    ]


@option("mistake", "attribute_set_once", forces={"noise": "dropout"}, says="register|state|bits|differ")
def attribute_set_once(draft: Draft, draw: random.Random) -> None:
    draft.after_update.append(f"if NUMBER == {draw.randint(1, 6)}:\n    net.drop.p = 0.6")


@option("mistake", "leader_forward", 2, forces={"norm": "batchnorm"}, says="buffer|diverge|differ")
def leader_forward(draft: Draft, draw: random.Random) -> None:
    """The leader alone samples from the model, in ``train()``."""
    draft.between += [
        f"if NUMBER % {draw.choice([2, 5])} == 1 and job.is_leader:",
        "    with torch.no_grad():",
        "        net(torch.ones(4, 8))",
    ]


@option("mistake", "leader_sets_rate", says="diverge|differ")
def leader_sets_rate(draft: Draft, draw: random.Random) -> None:
    draft.between += [
        f"if NUMBER == {draw.randint(3, 12)} and job.is_leader:",
        "    optimizer.param_groups[0]['lr'] *= 0.5",
    ]


@option("mistake", "leader_changes_weight", says="diverge|differ")
def leader_changes_weight(draft: Draft, draw: random.Random) -> None:
    draft.between += [f"if NUMBER == {draw.randint(3, 12)} and job.is_leader:", "    net.last.weight.data.mul_(1.01)"]


@option("mistake", "leader_evaluates", forces={"evaluate": "none", "calls": "none"}, says="call|evaluate|leader|same")
def leader_evaluates(draft: Draft, draw: random.Random) -> None:
    """A call of all that only one makes."""
    draft.between += [f"if NUMBER == {draw.randint(3, 8)} and job.is_leader:", "    job.barrier()"]


@option("mistake", "noise_by_rank", says="diverge|differ|bits|rank")
def noise_by_rank(draft: Draft, draw: random.Random) -> None:
    draft.gradients += [
        "torch.manual_seed(job.rank)",
        "for p in net.parameters():",
        "    if p.grad is not None:",
        "        p.grad.add_(torch.randn_like(p.grad), alpha=0.001)",
    ]


@option("mistake", "loss_by_rank", says="diverge|differ|bits|rank")
def loss_by_rank(draft: Draft, draw: random.Random) -> None:
    draft.loss.append("loss = loss * (1 + 0.1 * job.rank)")


@option("mistake", "mean_over_world", says="world|differ|bits|rank")
def mean_over_world(draft: Draft, draw: random.Random) -> None:
    """Left over from DDP: the loss is divided by the number of workers."""
    draft.loss.append("loss = loss / job.world_size")


@option("mistake", "sum_into_state", forces=STEPS, says="all_reduce|world|differ|bits")
def sum_into_state(draft: Draft, draw: random.Random) -> None:
    """A sum over the workers, of which there may be more or fewer, goes into the state."""
    draft.between += [
        "total = torch.ones(1)",
        "job.all_reduce(total)",
        "net.last.weight.data.mul_(1 + 0.001 * total.item())",
    ]


@option("mistake", "step_inside", forces=STEPS, bars="precision", says="inner loop|inside|optimizer|step")
def step_inside(draft: Draft, draw: random.Random) -> None:
    draft.after_backward += ["optimizer.step()", "optimizer.zero_grad()"]
    draft.update = ["pass"]


@option("mistake", "clip_inside", forces=STEPS, says="inner loop|inside|clip|grad")
def clip_inside(draft: Draft, draw: random.Random) -> None:
    draft.after_backward.append("torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)")


@option("mistake", "stream_ignores_start", 2, forces={"data": "stream"}, says="stream|start_step|bits|differ")
def stream_ignores_start(draft: Draft, draw: random.Random) -> None:
    draft.definitions = [
        text.replace("itertools.count(start_step)", "itertools.count(0)") for text in draft.definitions
    ]


@option("mistake", "dataset_counts", forces={"data": "noisy"}, says="data|sample|bits|differ")
def dataset_counts(draft: Draft, draw: random.Random) -> None:
    """A sample depends on how often the dataset was asked."""
    draft.definitions = [
        text.replace(
            "        return inputs[index] + 0.1 * torch.randn(8), labels[index]",
            "        self.asked = getattr(self, 'asked', 0) + 1\n"
            "        return inputs[index] * (1 + 0.01 * (self.asked % 5)), labels[index]",
        )
        for text in draft.definitions
    ]


@option("mistake", "break_inner_loop", forces=STEPS, bars="gradients", says="inner loop|end|No inf checks")
def break_inner_loop(draft: Draft, draw: random.Random) -> None:
    """There are no gradients yet after it, which a GradScaler says first."""
    draft.after_backward.append("if NUMBER == 5:\n    break")


@option("mistake", "raises", says="no such thing")
def raises(draft: Draft, draw: random.Random) -> None:
    """A bug that comes in the middle of the job, on every worker."""
    draft.gradients.append(f"if NUMBER == {draw.randint(2, 9)}:\n    raise ValueError('there is no such thing here')")


@option(
    "mistake",
    "freezes_on_leader",
    forces={"net": "mlp", "optimizer": "momentum"},
    says="diverge|differ|frozen|requires_grad",
)
def freezes_on_leader(draft: Draft, draw: random.Random) -> None:
    draft.after_update.append(
        f"if NUMBER == {draw.randint(2, 9)} and job.is_leader:\n    net.first.requires_grad_(False)"
    )


@option(
    "mistake",
    "optimizer_made_anew",
    forces={"optimizer": "momentum", "scheduler": "none"},
    says="optimizer|register|state",
)
def optimizer_made_anew(draft: Draft, draw: random.Random) -> None:
    draft.between += [
        f"if NUMBER == {draw.randint(3, 9)}:",
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)",
    ]


@option("mistake", "parameter_replaced", says="parameter|replaced|module")
def parameter_replaced(draft: Draft, draw: random.Random) -> None:
    """A layer is put in the place of another one in the middle of the job."""
    draft.between += [
        f"if NUMBER == {draw.randint(3, 9)}:",
        "    net.last = torch.nn.Linear(net.last.in_features, net.last.out_features)",
    ]


@option(
    "mistake", "scheduler_after_attempt", 2, forces={"loop": "attempts", "optimizer": "momentum", "scheduler": "steplr"}
)
def scheduler_after_attempt(draft: Draft, draw: random.Random) -> None:
    """The scheduler steps after the body, whether or not the attempt counts."""
    draft.after_update.remove("scheduler.step()")
    draft.after_attempt.append("scheduler.step()")


@option("mistake", "counter_in_attempt", forces={"loop": "attempts"}, says="register|state|diverge|differ")
def counter_in_attempt(draft: Draft, draw: random.Random) -> None:
    """A count of bodies, some of which are taken back."""
    draft.setup.append("bodies = 0")
    draft.after_update += [
        "bodies += 1",
        "for group in optimizer.param_groups:",
        "    group['lr'] = 0.05 / (1 + bodies)",
    ]
