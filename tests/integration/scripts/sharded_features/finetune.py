"""Low-rank adapters in a frozen FSDP2 model that is built on the meta device, with a tied head and a moving average."""

import torch
import torch.nn.functional as F
from setting import WIDTH, Tower, join, loss_of, parser, pause, text
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_multi_avg_fn

from craft import testing

args = parser.parse_args()


class Adapted(nn.Module):
    """A frozen linear layer and two small trained ones."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.first = nn.Linear(frozen.in_features, rank, bias=False)
        self.second = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(x) + self.second(F.dropout(self.first(x), 0.1, self.training))
        return out


def build() -> Tower:
    model = Tower()
    for block in model.blocks:
        block.requires_grad_(False)
        for name in ("up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    model.head.weight = model.embedding.weight
    return model


job = join()
mesh = job.mesh(shard=job.replica_size)
with torch.device("meta"):
    model = build()
model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
for block in model.blocks:
    fully_shard(block, mesh=mesh, reshard_after_forward=False)
fully_shard(model, mesh=mesh)
model.to_empty(device=job.device)
with torch.no_grad():
    for number, param in enumerate(model.parameters()):
        torch.manual_seed(number)
        nn.init.ones_(param) if param.dim() == 1 else nn.init.normal_(param, std=WIDTH**-0.5)
model = job.replicate(model)
trained = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000)
job.register(optimizer=optimizer, scheduler=scheduler)
# AveragedModel copies the module, which FSDP2 refuses.
average = [param.detach().clone() for param in trained]
follow = get_ema_multi_avg_fn(0.9)


def load(saved: list[torch.Tensor]) -> None:
    for mine, theirs in zip(average, saved, strict=True):
        mine.copy_(theirs)


job.register_state(save=lambda: average, load=load, name="average")
for step in job.steps(text(), global_batch=32, microbatches=4, steps=args.steps, seed=0):
    optimizer.zero_grad()
    for (tokens,) in step:
        loss_of(model, tokens).backward()
        pause(args.slow)
    testing.reach("before_clip", step.number)
    nn.utils.clip_grad_norm_(trained, 0.1, foreach=True)
    testing.reach("update", step.number)
    optimizer.step()
    scheduler.step()
    follow(average, trained, step.number)
