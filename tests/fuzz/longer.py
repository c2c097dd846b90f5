"""Features of longer scripts: epochs, several loops, calls before and after the loop, work that is done once."""

from __future__ import annotations

import random

from .course import evaluation
from .draft import Draft
from .options import nothing, option


@option("loop", "epochs", 2, forces={"length": "epochs"})
def epochs(draft: Draft, draw: random.Random) -> None:
    """A loop over passes, with work after each of them."""
    draft.loop = "epochs"
    draft.arguments["seed"] = str(draw.randint(0, 99))
    draft.after_epoch += ["with torch.no_grad():", "    net.last.weight.mul_(0.99)"]


nothing("before", 4)


@option("before", "once")
def prepared_once(draft: Draft, draw: random.Random) -> None:
    """One worker prepares something before the loop."""
    draft.definitions.append('''
def prepare():
    torch.save({"shift": torch.linspace(0, 1, 8)}, "prepared.pt")
    return {"scale": 0.5}
'''.strip())  # fmt: skip
    draft.before_loop += ['prepared = job.once("prepare", prepare)', 'shift = torch.load("prepared.pt")["shift"]']
    draft.microbatch.append('x = x + prepared["scale"] * shift')
    draft.files.append("prepared.pt")


@option("before", "broadcast")
def broadcast_before(draft: Draft, draw: random.Random) -> None:
    draft.before_loop.append('settings = job.broadcast_object({"scale": 1.25})')
    draft.microbatch.append('x = x * settings["scale"]')


@option("save", "once", 2)
def saved_once(draft: Draft, draw: random.Random) -> None:
    """A file that is complete, whatever is lost while it is written."""
    step = draw.randint(2, 7)
    draft.between += [
        f"if NUMBER == {step}:",
        '    job.once("save", lambda: torch.save(net.state_dict(), "middle.pt"))',
    ]
    draft.files.append("middle.pt")


@option("after", "once_saves", 2)
def saved_once_at_the_end(draft: Draft, draw: random.Random) -> None:
    draft.after_loop.append('job.once("final", lambda: torch.save(net.state_dict(), "final.pt"))')
    draft.files.append("final.pt")


@option("stop", "break", forces={"loop": "steps"})
def breaks(draft: Draft, draw: random.Random) -> None:
    """Every worker leaves the loop after the same step."""
    draft.between += [f"if NUMBER == {draw.randint(6, 14)}:", "    break"]


nothing("tail", 4)


@option("tail", "second_loop", forces={"loop": "steps", "data": "tensors"})
def second_loop(draft: Draft, draw: random.Random) -> None:
    """The same net goes on with other data."""
    draft.data.append("more = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.randint(2, (40,)))")
    zero = [f"    {each}.zero_grad()" for each in draft.optimizers]
    draft.after_loop = [
        f"for step in job.steps(more, global_batch=8, microbatches={draw.choice([2, 4])}, steps=8, seed=3):",
        *zero,
        "    for x, y in step:",
        "        pace()",
        "        loss = F.cross_entropy(net(x), y)",
        "        loss.backward()",
        "        step.log(loss=loss)",
        *(f"    {each}.step()" for each in draft.optimizers),
        "    show(step.number, step.metrics)",
        "",
        *draft.after_loop,
    ]


@option("tail", "evaluates")
def evaluates_at_the_end(draft: Draft, draw: random.Random) -> None:
    """Scores after the last step."""
    if not any("held_out" in line for line in draft.data):
        evaluation(draft, draw)
    draft.after_loop = ["net.eval()", "last = job.evaluate(held_out, score, batch_size=5)", *draft.after_loop]
    draft.state.append("last")
