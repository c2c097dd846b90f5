"""Two FSDP2 models with an optimizer each, trained against each other."""

import torch
import torch.nn.functional as F
from setting import WIDTH, Block, join, parser, pause
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from craft import testing

args = parser.parse_args()
job = join()
mesh = job.mesh(shard=job.replica_size)


def build(last: int) -> nn.Module:
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, last))
    for block in list(model.children())[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


maker, judge = job.replicate(build(WIDTH)), job.replicate(build(1))
optimizers = {
    "maker": torch.optim.Adam(maker.parameters(), lr=1e-3, foreach=True),
    "judge": torch.optim.RMSprop(judge.parameters(), lr=1e-3, foreach=False),
}
job.register(**optimizers)
real = TensorDataset(torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)))
for step in job.steps(real, global_batch=32, microbatches=4, steps=args.steps, seed=0):
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    for (sample,) in step:
        made = maker(torch.randn_like(sample))
        # The judge's own loss, with what was made cut off from its maker; then the maker's, with the judge held fixed.
        wrong = F.softplus(-judge(sample)).mean() + F.softplus(judge(made.detach())).mean()
        judge.requires_grad_(True)
        wrong.backward()
        judge.requires_grad_(False)
        F.softplus(-judge(made)).mean().backward()
        judge.requires_grad_(True)
        pause(args.slow)
    testing.reach("before_clip", step.number)
    nn.utils.clip_grad_norm_(judge.parameters(), 0.5)
    testing.reach("update", step.number)
    for optimizer in optimizers.values():
        optimizer.step()
