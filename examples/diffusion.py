"""Training steps of diffusers' UNet: it learns to tell the noise that was added."""

import torch
from diffusers import DDPMScheduler, UNet2DModel

import fx_fusion

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
schedule = DDPMScheduler()
compiled = torch.compile(model, backend="fx_fusion", options={"select": "always"})  # on CPU Inductor is as good by itself
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with fx_fusion.recording() as report:
    for _ in range(3):
        images = torch.rand(4, 3, 16, 16) * 2 - 1
        noise, times = torch.randn_like(images), torch.randint(0, len(schedule), (4,))
        loss = torch.nn.functional.mse_loss(compiled(schedule.add_noise(images, noise, times), times).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
print(report)
