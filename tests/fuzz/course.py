"""Features of the course of a job: its loop, data, memory, evaluation, calls between the steps, checkpoints, saves, its end."""

from __future__ import annotations

import random

from .draft import Draft
from .options import nothing, option


@option("loop", "steps", 4)
def steps(draft: Draft, draw: random.Random) -> None:
    draft.arguments["seed"] = str(draw.randint(0, 99))


@option("loop", "attempts", 1, bars="weight partial")
def attempts(draft: Draft, draw: random.Random) -> None:
    """The script's own loop; the job gives attempts at a step."""
    draft.loop = "attempts"
    draft.arguments["seed"] = str(draw.randint(0, 99))


SAMPLES = "inputs = torch.randn({0}, 8)\nlabels = (inputs[:, :4].sum(1) > 0).long() + (inputs[:, 4] > 1).long()"
TENSORS = "data = torch.utils.data.TensorDataset(inputs, labels)"
NOISY = '''
class Noisy(torch.utils.data.Dataset):
    """Draws random numbers for each sample, as augmentation does."""

    def __len__(self):
        return len(inputs)

    def __getitem__(self, index):
        return inputs[index] + 0.1 * torch.randn(8), labels[index]
'''.strip()
STREAM = '''
def stream(microbatch, num_microbatches, start_step):
    """Batches of one microbatch, from any step on."""
    for number in itertools.count(start_step):
        generator = torch.Generator().manual_seed(1000 * number + microbatch)
        rows = torch.randint(len(inputs), (4,), generator=generator)
        yield inputs[rows], labels[rows]
'''.strip()


@option("data", "tensors", 2)
def tensors(draft: Draft, draw: random.Random) -> None:
    draft.data += [SAMPLES, TENSORS]


@option("data", "in_order")
def in_order(draft: Draft, draw: random.Random) -> None:
    draft.data += [SAMPLES, TENSORS]
    draft.arguments["shuffle"] = "False"


@option("data", "noisy")
def noisy(draft: Draft, draw: random.Random) -> None:
    draft.definitions.append(NOISY)
    draft.data += [SAMPLES, "data = Noisy()"]


@option("data", "loader", 2)
def loader(draft: Draft, draw: random.Random) -> None:
    draft.definitions.append(NOISY)
    more = draw.choice(["shuffle=True", "shuffle=False", "shuffle=True, drop_last=True"])
    draft.data += [SAMPLES, f"data = torch.utils.data.DataLoader(Noisy(), batch_size=BATCH, {more})"]


@option("data", "loader_processes")
def loader_processes(draft: Draft, draw: random.Random) -> None:
    draft.definitions.append(NOISY)
    draft.data += [
        SAMPLES,
        "data = torch.utils.data.DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=1)",
    ]


@option("data", "dicts")
def dicts(draft: Draft, draw: random.Random) -> None:
    """Batches that a function of the script's own makes."""
    draft.definitions.append('''
def collate(samples):
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}
'''.strip())  # fmt: skip
    draft.data += [SAMPLES, TENSORS]
    draft.arguments["collate_fn"] = "collate"
    draft.unpack = ['x, y = batch["x"], batch["y"]']


@option("data", "stream", 2, forces={"loop": "steps", "length": "steps"})
def stream(draft: Draft, draw: random.Random) -> None:
    draft.definitions.append(STREAM)
    draft.data.append(SAMPLES)
    draft.source = "stream"


@option("data", "short_streams", forces={"loop": "steps", "length": "steps"}, bars="stop weight")
def short_streams(draft: Draft, draw: random.Random) -> None:
    """Streams that end, each at another step."""
    text = STREAM.replace("itertools.count(start_step)", "range(start_step, LENGTH - 2 * microbatch)")
    draft.definitions.append(text)
    draft.data.append(SAMPLES)
    draft.source = "stream"


def _cut(draft: Draft, batch: int, microbatches: int, samples: int) -> None:
    """Settle sizes: of the batch, of the cut, of the dataset."""
    draft.data = [line.format(samples) if line == SAMPLES else line.replace("BATCH", str(batch)) for line in draft.data]
    if draft.source == "data" and not any("batch_size=" in line for line in draft.data):
        draft.arguments["global_batch"] = str(batch)
    draft.arguments["microbatches"] = str(microbatches)


@option("cut", "even", 2)
def even(draft: Draft, draw: random.Random) -> None:
    microbatches = draw.choice([2, 3, 4, 6])
    _cut(draft, 4 * microbatches, microbatches, 4 * microbatches * draw.randint(4, 9))


@option("cut", "uneven", 2)
def uneven(draft: Draft, draw: random.Random) -> None:
    """Microbatches of different sizes, and a short last batch of each pass."""
    microbatches = draw.choice([3, 4, 5])
    batch = 3 * microbatches + draw.randint(1, microbatches - 1)
    _cut(draft, batch, microbatches, batch * draw.randint(4, 8) + 2 * microbatches + 1)


@option("cut", "one")
def one(draft: Draft, draw: random.Random) -> None:
    """Fewer microbatches than workers."""
    _cut(draft, 8, 1, 64)


@option("length", "steps", 3)
def by_steps(draft: Draft, draw: random.Random) -> None:
    draft.arguments["steps"] = str(draft.steps)
    draft.definitions = [text.replace("LENGTH", str(draft.steps)) for text in draft.definitions]


@option("length", "epochs")
def by_epochs(draft: Draft, draw: random.Random) -> None:
    draft.arguments["epochs"] = str(draw.choice([2, 3]) if draft.steps > 10 else 1)


@option("length", "short_epochs", forces={"loop": "steps"})
def short_epochs(draft: Draft, draw: random.Random) -> None:
    draft.arguments["epochs"] = "5"
    draft.arguments["steps_per_epoch"] = "4"


nothing("weight", 4)


@option("weight", "tokens", bars="precision")
def tokens(draft: Draft, draw: random.Random) -> None:
    """Microbatches that weigh by what is not masked."""
    draft.microbatch += ["mask = x[:, 0] > -0.5", "step.weight(int(mask.sum()))"]
    draft.loss[0] = "loss = F.cross_entropy(out, y, reduction='none').mul(mask).sum() / mask.sum().clamp(min=1)"


nothing("memory", 2)


@option("memory", "plain")
def plain(draft: Draft, draw: random.Random) -> None:
    """Numbers of the script's own, that the rate depends on."""
    draft.setup.append('memory = {"best": 1e9, "bad": 0}')
    draft.before_loop.append("job.register_state(save=lambda: dict(memory), load=memory.update)")
    draft.after_update += [
        'if LOOP.metrics["loss"] < memory["best"]:',
        '    memory["best"] = LOOP.metrics["loss"]',
        "else:",
        '    memory["bad"] += 1',
        '    optimizer.param_groups[0]["lr"] *= 0.95',
    ]
    draft.state.append("memory")


@option("memory", "growing")
def growing(draft: Draft, draw: random.Random) -> None:
    """A list that grows, and a tensor that is replaced."""
    draft.definitions.append('''
class Record:
    def __init__(self):
        self.losses = []
        self.mean = torch.zeros(1)

    def add(self, loss):
        self.losses.append(loss)
        self.mean = self.mean * 0.9 + 0.1 * loss

    def state_dict(self):
        return {"losses": list(self.losses), "mean": self.mean}

    def load_state_dict(self, state):
        self.losses = list(state["losses"])
        self.mean = state["mean"]
'''.strip())  # fmt: skip
    draft.setup.append("record = Record()")
    draft.registered.append("record")
    draft.after_update.append('record.add(LOOP.metrics["loss"])')
    draft.state.append("record")


nothing("evaluate", 2)


def evaluation(draft: Draft, draw: random.Random) -> str:
    draft.data.append("held_out = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randint(2, (24,)))")
    draft.definitions.append('''
def score(batch):
    x, y = batch
    return {"loss": F.cross_entropy(OUTPUT, y), "hits": (OUTPUT.argmax(1) == y).float().mean()}
'''.strip().replace("OUTPUT", draft.output))  # fmt: skip
    return f"job.evaluate(held_out, score, batch_size={draw.choice([5, 7, 16])})"


@option("evaluate", "eval_mode")
def in_eval_mode(draft: Draft, draw: random.Random) -> None:
    call = evaluation(draft, draw)
    draft.setup.append('scores = {"best": 1e9}')
    draft.before_loop.append('job.register_state(save=lambda: dict(scores), load=scores.update, name="scores")')
    lines = ["net.eval()", f"found = {call}", "net.train()", 'scores["best"] = min(scores["best"], found["loss"])']
    draft.between += [f"if NUMBER % {draw.choice([3, 5])} == 0:", *("    " + line for line in lines)]
    draft.state.append("scores")


@option("evaluate", "train_mode")
def in_train_mode(draft: Draft, draw: random.Random) -> None:
    """Random numbers and buffers in the evaluation, and random numbers behind it."""
    call = evaluation(draft, draw)
    draft.between += [
        f"if NUMBER % {draw.choice([4, 6])} == 1:",
        f'    loss = {call}["loss"]',
        "    with torch.no_grad():",
        "        net.last.weight.mul_(1 + 0.001 * float(torch.rand(())) * min(loss, 1.0))",
    ]


@option("evaluate", "plateau", bars="scheduler")
def evaluated_plateau(draft: Draft, draw: random.Random) -> None:
    """A scheduler that follows the evaluation."""
    call = evaluation(draft, draw)
    draft.setup.append("plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.6)")
    draft.registered.append("plateau")
    draft.state.append("plateau")
    lines = ["net.eval()", f'plateau.step({call}["loss"])', "net.train()"]
    draft.between += ["if NUMBER % 4 == 3:", *("    " + line for line in lines)]


nothing("calls", 3)


@option("calls", "all_reduce")
def all_reduce(draft: Draft, draw: random.Random) -> None:
    draft.between += ["total = torch.ones(3)", "job.all_reduce(total)", "assert 1 <= total[0] <= 3"]


@option("calls", "broadcast")
def broadcast(draft: Draft, draw: random.Random) -> None:
    """A value of the first worker that all would have had."""
    draft.between += [
        f"if NUMBER % {draw.choice([2, 5])} == 0:",
        '    rate = job.broadcast_object({"rate": 0.01 / (1 + LOOP.metrics["loss"])})["rate"]',
        "    optimizer.param_groups[0]['lr'] = rate",
    ]


@option("calls", "barrier")
def barrier(draft: Draft, draw: random.Random) -> None:
    draft.between += ["if NUMBER % 3 == 0:", "    job.barrier()"]


nothing("checkpoints", 3)


@option("checkpoints", "every")
def every(draft: Draft, draw: random.Random) -> None:
    draft.before_loop.append(f'job.checkpoints("checkpoints", every="{draw.choice([3, 5, 8])} steps", keep=2)')


@option("checkpoints", "tagged")
def tagged(draft: Draft, draw: random.Random) -> None:
    draft.before_loop.append('job.checkpoints("checkpoints", every="6 steps")')
    draft.between += [f"if NUMBER == {draw.randint(2, 8)}:", '    job.checkpoint(tag="best")']


nothing("save", 3)


@option("save", "leader")
def leader(draft: Draft, draw: random.Random) -> None:
    """The leader writes a file now and then; a later one writes it again."""
    draft.between += ["if NUMBER % 5 == 0 and job.is_leader:", '    torch.save(net.state_dict(), "latest.pt")']


nothing("stop", 5)


@option("stop", "by_number")
def stop_by_number(draft: Draft, draw: random.Random) -> None:
    draft.between += [f"if NUMBER == {draw.randint(6, 14)}:", '    job.stop("enough")']


@option("stop", "by_loss")
def stop_by_loss(draft: Draft, draw: random.Random) -> None:
    draft.between += ['if NUMBER > 8 and LOOP.metrics["loss"] < 1.0:', '    job.stop("good enough")']


nothing("after", 2)


@option("after", "leader_saves")
def leader_saves_at_the_end(draft: Draft, draw: random.Random) -> None:
    draft.after_loop += ["if job.is_leader:", '    torch.save(net.state_dict(), "final.pt")']
    draft.files.append("final.pt")
