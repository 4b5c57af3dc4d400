"""A small convolutional net learns handwritten digits."""

from __future__ import annotations

import torch
from torch import nn

from .job import DemoJob, Outcome, Steps

__all__ = ["JOB"]

BATCH = 128
GOAL = 0.97


class Net(nn.Module):
    """Two convolutions, one pooling, two linear layers, for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    x_train, x_test = (torch.tensor(part, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for part in parts[:2])
    y_train, y_test = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return x_train, y_train, x_test, y_test


def train(device: str, steps: int) -> Steps:
    """Train for ``steps`` batches, then classify images the net has not seen."""
    x_train, y_train, x_test, y_test = _data()
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    shuffle = torch.Generator().manual_seed(0)
    losses: list[float] = []
    while len(losses) < steps:
        order = torch.randperm(len(x_train), generator=shuffle)
        for start in range(0, len(order) - BATCH + 1, BATCH):
            if len(losses) == steps:
                break
            chosen = order[start : start + BATCH]
            images, labels = x_train[chosen].to(device), y_train[chosen].to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            yield f"loss {losses[-1]:.4f}"

    model.eval()
    with torch.no_grad():
        predicted = model(x_test.to(device)).argmax(dim=1).cpu()
    accuracy = (predicted == y_test).double().mean().item()
    return Outcome(
        values=torch.tensor(losses, dtype=torch.float64),
        result=f"{accuracy:.1%} right",
        passed=accuracy > GOAL or steps < JOB.steps,
        text=f"{accuracy:.1%} of {len(y_test)} images the net has not seen are classified right.",
    )


JOB = DemoJob(title="Conv net on digits", short="digits", run=train, steps=200, quick_steps=20)
