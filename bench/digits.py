"""A small convolutional network with EvoNorm on scikit-learn's handwritten digits: eager, Inductor and fx_fusion.

    python -m bench.digits [--epochs 40] [--norm s0|b0] [--out bench/results]

Same seeds, same batches: accuracy on the test images has to be the same (98 % and more), the loss curves lie on each other.
Writes the numbers as JSON and the curves as PNG.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tabulate import tabulate
from torch import Tensor, nn

from bench.drawing import Scheme, save
from fx_fusion.patterns.evonorm_b0 import over_larger_deviation
from fx_fusion.patterns.evonorm_s0 import swish_over_group_deviation


class EvoNorm(nn.Module):
    """The paper's EvoNorm-S0 (groups of 4 channels) or B0 (with a running variance)."""

    def __init__(self, channels: int, kind: str):
        super().__init__()
        self.kind, self.groups = kind, channels // 4
        self.weight, self.v = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "s0":
            return swish_over_group_deviation(x, self.groups, self.v, self.weight, self.bias, 1e-5, 0)
        running = None if self.training else self.running_var
        y, var = over_larger_deviation(x, self.v, self.weight, self.bias, running, 1e-3)
        if self.training:
            self.running_var.copy_(self.running_var * 0.9 + var * 0.1)
        return y


def network(kind: str) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), EvoNorm(after, kind)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(variant: str, kind: str, epochs: int, device: str) -> dict:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test = (torch.tensor(t, dtype=torch.float32).view(-1, 1, 8, 8).to(device) / 16 for t in split[:2])
    y_train, y_test = (torch.tensor(t).to(device) for t in split[2:])
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = network(kind).to(device)
    compiled = model
    if variant == "inductor":
        compiled = torch.compile(model)
    elif variant == "fx_fusion":
        compiled = torch.compile(model, backend="fx_fusion", options={"select": "always", "strict": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(1)
    losses, accuracies = [], []
    start = time.perf_counter()
    for _ in track(range(epochs), description=f"{kind} {variant}"):
        model.train()
        for rows in torch.randperm(len(x_train), generator=generator).split(128):
            if len(rows) < 128:
                continue
            loss = F.cross_entropy(compiled(x_train[rows.to(device)]), y_train[rows.to(device)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
        model.eval()
        with torch.no_grad():
            accuracies.append((model(x_test).argmax(1) == y_test).float().mean().item())
    return {
        "variant": variant, "norm": kind, "device": device, "losses": losses, "accuracies": accuracies,
        "accuracy": accuracies[-1], "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def plot(rows: list[dict], scheme: Scheme) -> Figure:
    """Training loss and test accuracy: a color a norm, a style a backend."""
    figure, (losses, accuracies) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    colors = dict(zip(dict.fromkeys(row["norm"] for row in rows), (scheme.ours, scheme.inductor), strict=False))
    for row in rows:
        style = {"eager": "-", "inductor": "--", "fx_fusion": ":"}[row["variant"]]
        look = {"linestyle": style, "color": colors[row["norm"]], "linewidth": 1.2}
        losses.plot(row["losses"], **look)
        accuracies.plot(row["accuracies"], label=f"{row['norm']} {row['variant']}", **look)
    losses.set(xlabel="step", ylabel="training loss", yscale="log")
    accuracies.set(xlabel="epoch", ylabel="test accuracy", ylim=(0.9, 1))
    accuracies.legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--norm", default="s0,b0")
    parser.add_argument("--out", default="bench/results")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [
        train(variant, kind, given.epochs, device)
        for kind in given.norm.split(",")
        for variant in ("eager", "inductor", "fx_fusion")
    ]
    out = Path(given.out)
    (out / "digits.json").write_text(json.dumps(rows))
    save(lambda scheme: plot(rows, scheme), out, "digits")
    print(tabulate([(r["norm"], r["variant"], f"{r['accuracy']:.4f}", r["losses"][-1], r["seconds"]) for r in rows],
                   headers=("norm", "variant", "test accuracy", "last loss", "seconds")))  # fmt: skip


if __name__ == "__main__":
    main()
