"""A small residual net with EvoNorm-S0 (Liu et al. 2020, arXiv:2004.02967), written out, channels last."""

import torch
from torch import nn

import fx_fusion


class EvoNormS0(nn.Module):
    def __init__(self, channels, groups=8, eps=1e-5):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight, self.v = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        n, c, h, w = x.shape
        weight, bias, v = (p.view(1, c, 1, 1) for p in (self.weight, self.bias, self.v))
        grouped = x.view(n, self.groups, c // self.groups, h, w)
        std = (grouped.var((2, 3, 4), unbiased=False, keepdim=True) + self.eps).sqrt().expand_as(grouped).reshape(n, c, h, w)
        return x * torch.sigmoid(v * x) / std * weight + bias


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = EvoNormS0(channels)

    def forward(self, x):
        return x + self.two(self.norm(self.one(x)))


device = "cuda" if torch.cuda.is_available() else "cpu"
body = [nn.Conv2d(3, 32, 3, padding=1), Block(32), Block(32)]
model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
model = model.to(device, memory_format=torch.channels_last)
compiled = torch.compile(model, backend="fx_fusion", options={"select": "always"})  # on CPU Inductor is as good by itself
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with fx_fusion.recording() as report:
    for _ in range(4):
        images, labels = torch.randn(8, 3, 32, 32, device=device), torch.randint(0, 10, (8,), device=device)
        loss = nn.functional.cross_entropy(compiled(images.to(memory_format=torch.channels_last)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
print(report)
