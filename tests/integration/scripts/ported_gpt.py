"""The script of ``ported_gpt_plain.py`` as a job."""

import itertools
import math
import os

import torch
import torch.nn.functional as F
from torch import nn

import craft

batch_size, block_size, width, heads, layers = 4, 16, 32, 2, 2
gradient_accumulation_steps = 4
max_iters, eval_interval, eval_iters, log_interval = 24, 8, 4, 4
learning_rate, min_lr, warmup_iters, grad_clip = 3e-3, 3e-4, 4, 1.0
out_dir = os.environ.get("OUT_DIR", ".")
vocabulary = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


text = torch.arange(4000).mul(7).remainder(vocabulary)
splits = {"train": text[:3600], "val": text[3600:]}


def get_batch(split):
    data = splits[split]
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[start : start + block_size] for start in starts.tolist()])
    y = torch.stack([data[start + 1 : start + 1 + block_size] for start in starts.tolist()])
    return x, y


def get_lr(iteration):
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / warmup_iters
    ratio = (iteration - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def stream(microbatch, num_microbatches, start_step):
    for step in itertools.count(start_step):
        torch.manual_seed(1337 + step * num_microbatches + microbatch)
        yield get_batch("train")


job = craft.join()
torch.manual_seed(1337)

autocast = torch.autocast("cpu", dtype=torch.bfloat16)
model = job.replicate(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
best = {"loss": math.inf}
job.register(optimizer=optimizer)
job.register_state(save=lambda: dict(best), load=best.update)


@torch.no_grad()
def estimate_loss():
    losses = {}
    model.eval()
    for split in splits:
        found = []
        for _ in range(eval_iters):
            x, y = get_batch(split)
            with autocast:
                found.append(model(x, y).item())
        losses[split] = sum(found) / len(found)
    model.train()
    return losses


def save():
    torch.save({"model": model.state_dict(), "iteration": iteration}, os.path.join(out_dir, "ckpt.pt"))


for step in job.steps(stream, microbatches=gradient_accumulation_steps, steps=max_iters, seed=1337):
    iteration = step.number
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    for x, y in step:
        with autocast:
            loss = model(x, y)
        loss.backward()
        step.log(loss=loss)
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iteration % log_interval == 0 and job.is_leader:
        print(f"iter {iteration}: loss {step.metrics['loss']:.4f}")
    if (iteration + 1) % eval_interval == 0:
        losses = job.once("evaluate", estimate_loss)
        if job.is_leader:
            print(f"step {iteration}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best["loss"]:
            best["loss"] = losses["val"]
            job.once("save", save)
