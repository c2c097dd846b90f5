"""Features that need more of the job: data of other kinds, state that is carried, losses over a whole batch."""

from __future__ import annotations

import random

from .course import SAMPLES
from .draft import Draft
from .options import nothing, option


@option("data", "iterable", 2, forces={"loop": "steps"})
def iterable(draft: Draft, draw: random.Random) -> None:
    """A dataset that can only be read from its beginning."""
    draft.definitions.append('''
class Lines(torch.utils.data.IterableDataset):
    def __iter__(self):
        for row in torch.randperm(len(inputs)):
            yield inputs[row] + 0.1 * torch.randn(8), labels[row]
'''.strip())  # fmt: skip
    draft.data += [SAMPLES, "data = torch.utils.data.DataLoader(Lines(), batch_size=BATCH)"]


@option("data", "weighted", forces={"loop": "steps"})
def weighted(draft: Draft, draw: random.Random) -> None:
    """A sampler with replacement: a new draw for each pass."""
    draft.data += [
        SAMPLES,
        "sampler = torch.utils.data.WeightedRandomSampler(1.0 + labels.double(), len(labels))",
        "data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=BATCH, sampler=sampler)",
    ]


@option("length", "later_start", forces={"loop": "steps", "data": "tensors"})
def later_start(draft: Draft, draw: random.Random) -> None:
    """A script that goes on from a file of its own."""
    draft.arguments["steps"] = str(draft.steps)
    draft.arguments["start_step"] = str(draw.randint(2, 6))


@option("memory", "carried", 2, forces={"loop": "steps"})
def carried(draft: Draft, draw: random.Random) -> None:
    """State from a microbatch to the same one of the next step."""
    draft.microbatch += [
        "lane = step.carry(hidden=torch.zeros(8))",
        "x = x + 0.3 * lane.hidden",
        "lane.hidden = x.detach().mean(0)",
    ]


nothing("whole", 5)


@option("whole", "gathered", forces={"loop": "steps"}, bars="precision")
def gathered(draft: Draft, draw: random.Random) -> None:
    """A loss over the outputs of the whole global batch."""
    draft.loss.append("loss = loss + 0.1 * step.gather(out).mean(0).pow(2).sum()")
