"""Sentences: tied embeddings, branches that few microbatches take, autocast, a scaler that skips, weights by tokens."""

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

import craft
from craft import testing

testing.arm()

PAD = 0
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(2, 12, (50,), generator=generator).tolist()
sentences = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16, padding_idx=PAD)
        self.mix = torch.nn.GRU(16, 16, batch_first=True)
        self.long = torch.nn.Linear(16, 16)
        self.very_long = torch.nn.Linear(16, 16)
        self.never = torch.nn.Linear(16, 16)
        self.out = torch.nn.Linear(16, 32, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mix(self.embed(tokens))
        if tokens.shape[1] > 8:
            hidden = hidden + F.gelu(self.long(hidden))
        if tokens.shape[1] > 10:
            hidden = hidden + F.gelu(self.very_long(hidden))
        return self.out(F.dropout(hidden, 0.1, self.training))  # type: ignore[no-any-return]


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

job = craft.join()
model = job.replicate(model)
job.register(optimizer=optimizer, scheduler=scheduler, scaler=scaler)
for step in job.steps(
    sentences,
    global_batch=20,
    microbatches=6,
    epochs=3,
    collate_fn=lambda samples: pad_sequence(samples, batch_first=True, padding_value=PAD),
):
    optimizer.zero_grad()
    for tokens in step:
        step.weight((tokens[:, 1:] != PAD).sum())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)
        if step.number == 4 and step.microbatch == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        step.log(loss=loss)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if step.number == 4:
        assert scaler.get_scale() == 1024.0, scaler.get_scale()  # grown once, and halved by the overflow
assert model.never.weight.grad is None
