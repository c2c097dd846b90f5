"""Features of what is trained: the nets, their buffers, random numbers in the forward pass, gradients that are absent."""

from __future__ import annotations

import random

from .draft import Draft
from .options import nothing, option

WIDTH = 12


@option("net", "mlp", 3)
def mlp(draft: Draft, draw: random.Random) -> None:
    draft.layers += [f"self.first = torch.nn.Linear(8, {WIDTH})", f"self.last = torch.nn.Linear({WIDTH}, 3)"]
    draft.forward += ["h = torch.relu(self.first(x))"]


@option("net", "conv")
def conv(draft: Draft, draw: random.Random) -> None:
    draft.layers += [f"self.first = torch.nn.Conv1d(2, {WIDTH}, 2)", f"self.last = torch.nn.Linear({WIDTH}, 3)"]
    draft.forward += ["h = torch.relu(self.first(x.view(-1, 2, 4))).mean(2)"]


@option("net", "lstm")
def lstm(draft: Draft, draw: random.Random) -> None:
    draft.layers += [
        f"self.first = torch.nn.LSTM(2, {WIDTH}, batch_first=True)",
        f"self.last = torch.nn.Linear({WIDTH}, 3)",
    ]
    draft.forward += ["h = self.first(x.view(-1, 4, 2))[0][:, -1]"]


@option("net", "tied", bars="switch")
def tied(draft: Draft, draw: random.Random) -> None:
    """One weight in two places."""
    draft.layers += [
        f"self.first = torch.nn.Embedding(16, {WIDTH})",
        f"self.last = torch.nn.Linear({WIDTH}, 16, bias=False)",
        "self.last.weight = self.first.weight",
    ]
    draft.forward += ["h = self.first((x.abs() * 4).long().clamp(max=15)).mean(1)"]


@option("net", "attention")
def attention(draft: Draft, draw: random.Random) -> None:
    draft.layers += [
        f"self.first = torch.nn.Linear(2, {WIDTH})",
        f"self.mix = torch.nn.MultiheadAttention({WIDTH}, 2, batch_first=True)",
        f"self.last = torch.nn.Linear({WIDTH}, 3)",
    ]
    draft.forward += ["h = self.first(x.view(-1, 4, 2))", "h = (h + self.mix(h, h, h)[0]).mean(1)"]


nothing("norm", 2)


@option("norm", "batchnorm", 3)
def batchnorm(draft: Draft, draw: random.Random) -> None:
    momentum = draw.choice(["0.1", "0.3", "None"])
    draft.layers.append(f"self.norm = torch.nn.BatchNorm1d({WIDTH}, momentum={momentum})")
    draft.forward.append("h = self.norm(h)")


@option("norm", "layernorm")
def layernorm(draft: Draft, draw: random.Random) -> None:
    draft.layers.append(f"self.norm = torch.nn.LayerNorm({WIDTH})")
    draft.forward.append("h = self.norm(h)")


@option("norm", "spectral")
def spectral(draft: Draft, draw: random.Random) -> None:
    """Its forward pass changes buffers of a parametrization."""
    linear = f"torch.nn.Linear({WIDTH}, {WIDTH})"
    draft.layers.append(f"self.norm = torch.nn.utils.parametrizations.spectral_norm({linear})")
    draft.forward.append("h = h + self.norm(h)")


@option("norm", "own_buffers")
def own_buffers(draft: Draft, draw: random.Random) -> None:
    """A moving scale and a counter, one of them outside of ``state_dict``."""
    persistent = draw.choice(["True", "False"])
    draft.layers += [
        f'self.register_buffer("scale", torch.ones({WIDTH}), persistent={persistent})',
        'self.register_buffer("seen", torch.zeros((), dtype=torch.long))',
    ]
    draft.forward += [
        "if self.training:",
        "    self.scale.lerp_(h.detach().float().abs().mean(0) + 0.5, 0.1)",
        "    self.seen += len(h)",
        "h = h / self.scale",
    ]
    draft.state.append("[net.scale, net.seen]")


nothing("noise", 2)


@option("noise", "dropout", 3)
def dropout(draft: Draft, draw: random.Random) -> None:
    draft.layers.append(f"self.drop = torch.nn.Dropout({draw.choice([0.1, 0.3])})")
    draft.forward.append("h = self.drop(h)")


@option("noise", "jitter")
def jitter(draft: Draft, draw: random.Random) -> None:
    draft.microbatch.append(
        draw.choice(
            [
                "x = x + 0.1 * torch.randn(x.shape)",
                "x = x + torch.as_tensor(numpy.random.normal(0, 0.1, tuple(x.shape)), dtype=x.dtype)",
                "x = x * random.uniform(0.9, 1.1)",
            ]
        )
    )


@option("noise", "mixup")
def mixup(draft: Draft, draw: random.Random) -> None:
    draft.microbatch += [
        "order = torch.randperm(len(x))",
        "share = float(numpy.random.beta(0.4, 0.4))",
        "x = share * x + (1 - share) * x[order]",
    ]
    draft.loss = ["loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])"]


nothing("partial", 4)


@option("partial", "by_step")
def absent_by_step(draft: Draft, draw: random.Random) -> None:
    """Parameters that get a gradient in some steps only."""
    draft.layers.append("self.extra = torch.nn.Linear(8, 3)")
    draft.loss.append(f"if NUMBER % {draw.choice([2, 3])} == 0:\n    loss = loss + 0.1 * net.extra(x).pow(2).mean()")


@option("partial", "by_microbatch", bars="loop")
def absent_by_microbatch(draft: Draft, draw: random.Random) -> None:
    """Parameters that get a gradient from some microbatches only."""
    draft.layers.append("self.extra = torch.nn.Linear(8, 3)")
    draft.loss.append("if step.microbatch % 2:\n    loss = loss + 0.1 * net.extra(x).pow(2).mean()")


@option("partial", "never")
def unused(draft: Draft, draw: random.Random) -> None:
    draft.layers.append("self.extra = torch.nn.Linear(8, 3)")


nothing("second", 4)


@option("second", "decoder")
def decoder(draft: Draft, draw: random.Random) -> None:
    """Another module, in the same optimizer."""
    draft.setup.append("decoder = torch.nn.Linear(3, 8)")
    draft.modules.append("decoder")
    draft.state.append("decoder")
    draft.loss.append("loss = loss + 0.1 * F.mse_loss(decoder(out[:, :3]), x)")


@option("second", "target")
def target(draft: Draft, draw: random.Random) -> None:
    """A frozen module that follows the trained one, and that the loss depends on."""
    draft.setup.append("target = Net().requires_grad_(False)")
    draft.modules.append("target")
    draft.frozen.append("target")
    draft.state.append("target")
    draft.loss.append("loss = loss + 0.1 * F.mse_loss(out, target(x))")
    draft.after_update += [
        "with torch.no_grad():",
        "    for old, new in zip(target.parameters(), net.parameters()):",
        "        old.lerp_(new, 0.1)",
    ]
