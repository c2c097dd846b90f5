"""A small Llama whose parameters FSDP2 spreads over all processes, with torch alone.

torchrun --nproc-per-node 2 examples/llama/train_fsdp.py --size small --steps 100
"""

import argparse
import os

# Matrix products of the same numbers give the same bits only with this; it must be set before CUDA is used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from model import SIZES, Llama, Text, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch", type=int, default=16, help="samples in a step")
parser.add_argument("--length", type=int, default=64, help="tokens in a sample")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
size = SIZES[options.size]
with device:
    model = Llama(size, options.length, dropout=0.1)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

text = Text(1200, options.length, size.tokens)
data = DataLoader(text, options.batch // dist.get_world_size(), sampler=DistributedSampler(text), drop_last=True)
for number, text in zip(range(options.steps), data, strict=False):
    optimizer.zero_grad()
    loss = loss_of(model, text.to(device))
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if number % 10 == 9 and dist.get_rank() == 0:
        print(f"step {number + 1} loss {loss.item():.4f}")
dist.destroy_process_group()
