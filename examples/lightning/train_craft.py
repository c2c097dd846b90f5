"""A small network on made-up data, trained with Lightning through failures: craft run --workers 4 train_craft.py."""

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def samples(number: int, seed: int) -> TensorDataset:
    x = torch.randn(number, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(dim=1))


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(strategy="craft", accelerator="cpu", max_epochs=2, gradient_clip_val=1.0, logger=False)
    trainer.fit(
        Classifier(),
        DataLoader(samples(512, 0), batch_size=16, shuffle=True),
        DataLoader(samples(256, 1), batch_size=64),
    )
    print(f"val_loss {trainer.callback_metrics['val_loss']:.4f} after {trainer.global_step} steps")
