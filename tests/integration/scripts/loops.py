"""A script with a download before its loops, epochs, a second loop, and work after them that one worker does."""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import craft
from craft import testing

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True, help="a folder for what the script saves")
parser.add_argument("--break-at", type=int, help="leave the second loop after this step")
parser.add_argument("--slow-s", type=float, default=0.0, help="every microbatch takes so much longer")
parser.add_argument("--loader-processes", type=int, default=0)
parser.add_argument("--change-after-loop", action="store_true", help="code after the last loop changes the model")
parser.add_argument("--exit", help="how the leader ends after the last loop: os._exit, raise")
options = parser.parse_args()
testing.arm()


class Heard(torch.nn.Module):
    """What calls returned, as state: a worker that heard something else would be found out."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))


job = craft.join()


def download() -> dict[str, float]:
    testing.reach("download", 0)
    with (options.out / "downloads").open("a") as file:
        file.write(f"{job.worker_id}\n")
    return {"lr": 0.01}


rate = job.once("download", download)["lr"]
torch.manual_seed(0)
inputs = torch.randn(120, 8)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
first = torch.nn.Linear(8, 16)
model = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))
heard = Heard()
optimizer = torch.optim.Adam(model.parameters(), lr=rate)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model = job.replicate(model)
job.register(optimizer=optimizer, scheduler=scheduler, heard=heard)
held_out = DataLoader(data, batch_size=32, num_workers=options.loader_processes)


def score(batch: list[torch.Tensor]) -> dict[str, float]:
    return {"loss": float(F.cross_entropy(model(batch[0]), batch[1]))}


def learn(step: craft.Step, *more: torch.nn.Module) -> None:
    for x, y in step:
        time.sleep(options.slow_s)
        loss = F.cross_entropy(torch.stack([each(x) for each in (model, *more)]).sum(0), y)
        loss.backward()
        step.log(loss=loss)


for epoch in job.epochs(2, data, global_batch=24, microbatches=4, seed=1):
    before = job.step
    for step in epoch:
        # A worker that joins at this step runs this, and must not have it in the state that it takes.
        heard.seen[1] += step.number + 1
        if step.number % 4 == 1:
            # Before the inner loop: of the state as of the last commit.
            heard.seen[0] += job.evaluate(data, score, batch_size=50)["loss"]
        optimizer.zero_grad()
        learn(step)
        optimizer.step()
        testing.reach("updated", step.number)
    assert step.last_of_epoch and step.number % 5 == 4, step.number
    assert epoch.number == step.number // 5, (epoch.number, step.number)
    heard.seen[1] += job.evaluate(held_out, score)["loss"]
    scheduler.step()

assert job.step == 10
heard.seen[0] += job.evaluate(data, score, batch_size=50)["loss"]
testing.reach("between", 10)

head = torch.nn.Linear(8, 2)
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
job.replicate(head)
job.register(head_optimizer=head_optimizer)
for step in job.steps(data, global_batch=24, microbatches=4, steps=10, seed=2):
    optimizer.zero_grad()
    head_optimizer.zero_grad()
    learn(step, head)
    optimizer.step()
    head_optimizer.step()
    testing.reach("updated", step.number)
    if step.number == options.break_at:
        break

final = job.evaluate(data, score, batch_size=50)["loss"]
if options.change_after_loop:
    with torch.no_grad():
        first.bias.add_(1.0)


def save() -> str:
    testing.reach("saving", job.step)
    torch.save(model.state_dict(), options.out / "once.pt")
    return "once.pt"


assert job.once("final", save) == "once.pt"
if job.is_leader:
    testing.reach("leads", job.step)
    if options.exit == "raise":
        raise OSError("No space left on device")
    torch.save(model.state_dict(), options.out / "leader.pt")
    (options.out / "leader").write_text(f"{job.worker_id} rank {job.rank} of {job.world_size}: {final:.6f}\n")
job.barrier()
