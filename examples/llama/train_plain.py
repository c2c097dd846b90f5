"""A small Llama on one device, or the CPU, in bfloat16.

python examples/llama/train_plain.py --size small --steps 100
"""

import argparse
import os

# Matrix products of the same numbers give the same bits only with this; it must be set before CUDA is used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from model import SIZES, Llama, Text, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch", type=int, default=12, help="samples in a step")
parser.add_argument("--length", type=int, default=64, help="tokens in a sample")
options = parser.parse_args()

torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
size = SIZES[options.size]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
with device:
    model = Llama(size, options.length, dropout=0.1).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

data = DataLoader(Text(1200, options.length, size.tokens), options.batch, shuffle=True)
for number, text in zip(range(options.steps), data, strict=False):
    optimizer.zero_grad()
    loss = loss_of(model, text.to(device))
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if number % 10 == 9:
        print(f"step {number + 1} loss {loss.item():.4f}")
