"""The script of ``ported_mnist_plain.py`` as a job."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import craft


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.25)
        self.out = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.norm(self.conv2(x)))
        x = self.dropout(F.max_pool2d(x, 2))
        return F.log_softmax(self.out(x.flatten(1)), dim=1)


def digits(number: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(number, 1, 12, 12, generator=generator)
    labels = (10 * images[:, 0, :6].mean(dim=(1, 2))).long().clamp(0, 9)
    return TensorDataset(images, labels)


def train(args, job, model, optimizer, epoch):
    model.train()
    for batch, step in enumerate(epoch):
        optimizer.zero_grad()
        for data, target in step:
            loss = F.nll_loss(model(data), target)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        if batch % args.log_interval == 0 and job.is_leader:
            print(f"epoch {epoch.number} batch {batch} loss {step.metrics['loss']:.4f}")


def test(job, model, loader):
    model.eval()

    def score(batch):
        data, target = batch
        output = model(data)
        return {"loss": F.nll_loss(output, target), "accuracy": (output.argmax(dim=1) == target).float().mean()}

    scores = job.evaluate(loader, score)
    if job.is_leader:
        print(f"test loss {scores['loss']:.4f} accuracy {scores['accuracy']:.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--save-model", default="mnist.pt")
    args = parser.parse_args()
    job = craft.join()
    torch.manual_seed(1)
    loader = DataLoader(digits(500, 1), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(digits(200, 2), batch_size=50)
    model = job.replicate(Net())
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    job.register(optimizer=optimizer, scheduler=scheduler)
    for epoch in job.epochs(args.epochs, loader, microbatches=4, seed=1):
        train(args, job, model, optimizer, epoch)
        test(job, model, test_loader)
        scheduler.step()
    job.once("save", lambda: torch.save(model.state_dict(), args.save_model))


if __name__ == "__main__":
    main()
