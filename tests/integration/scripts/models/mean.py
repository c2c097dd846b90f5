"""Compares each step's gradient with that of one big batch, which every worker computes for itself."""

import torch

import craft

BATCH, TOKENS = 10, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
plain = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
data = [torch.randn(tokens, 3) for tokens in TOKENS]


def loss_of_samples(net: torch.nn.Module, samples: list[torch.Tensor]) -> torch.Tensor:
    """The mean over the samples, each of which counts the same however long it is."""
    return torch.stack([net(sample).mean() for sample in samples]).mean()


def loss_of_tokens(net: torch.nn.Module, samples: list[torch.Tensor]) -> torch.Tensor:
    """The mean over all tokens."""
    return net(torch.cat(samples)).mean()  # type: ignore[no-any-return]


job = craft.join()
model = job.replicate(model)
for step in job.steps(data, global_batch=BATCH, microbatches=4, epochs=2, shuffle=False, collate_fn=list):
    loss_of = loss_of_tokens if step.number % 2 else loss_of_samples
    for samples in step:
        if step.number % 2:
            step.weight(sum(map(len, samples)))
        loss_of(model, samples).backward()
    plain.load_state_dict(model.state_dict())
    plain.zero_grad()
    begin = BATCH * (step.number % 2)
    loss_of(plain, data[begin : begin + BATCH]).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-7)
        with torch.no_grad():
            found.sub_(0.1 * found.grad)
assert job.step == 4
