"""The same as ``train_fsdp.py``, as a job of several replicas: each worker that fails is replaced, and no bit changes.

craft run --workers 4 --workers-per-replica 2 examples/llama/train_craft_fsdp.py --size small --steps 100
"""

import argparse
import os

# Matrix products of the same numbers give the same bits only with this; it must be set before CUDA is used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

import craft
from model import SIZES, Llama, Text, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch", type=int, default=16, help="samples in a step")
parser.add_argument("--length", type=int, default=64, help="tokens in a sample")
parser.add_argument("--microbatches", type=int, default=4)
options = parser.parse_args()

job = craft.join()
mesh = job.mesh(shard=job.replica_size)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
size = SIZES[options.size]
with job.device:
    model = Llama(size, options.length, dropout=0.1)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

model = job.replicate(model)
job.register(optimizer=optimizer)
data = Text(1200, options.length, size.tokens)
for step in job.steps(data, global_batch=options.batch, microbatches=options.microbatches, steps=options.steps, seed=0):
    optimizer.zero_grad()
    for text in step:
        loss = loss_of(model, text.to(job.device))
        loss.backward()
        step.log(loss=loss)
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if job.step % 10 == 0 and job.is_leader:
        print(f"step {job.step} loss {step.metrics['loss']:.4f}")
