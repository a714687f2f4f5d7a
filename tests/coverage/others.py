"""Define what is not transformers: timm's and diffusers' models, small, with the call and the loss that trains them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# Group norms, EvoNorms, gated units, layer norms of both layouts, attention with and without a bias.
TIMM = (
    "test_efficientnet_evos", "test_efficientnet_gn", "test_efficientnet_ln", "test_resnet", "test_vit", "test_convnext",
    "efficientnet_b0_gn", "efficientnet_b0_g8_gn", "ese_vovnet39b_evos", "regnetz_b16_evos",
    "resnetv2_50d_evos", "resnetv2_50d_gn", "resnet50_gn", "resnetv2_50", "poolformer_s12", "convnext_atto", "convnextv2_atto",
    "vit_tiny_patch16_224", "eva02_tiny_patch14_224", "deit3_small_patch16_224", "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_224", "mixer_s32_224", "gmlp_ti16_224", "levit_128s", "xcit_nano_12_p16_224", "maxvit_rmlp_pico_rw_256",
    "mobilevitv2_050", "edgenext_xx_small", "caformer_s18", "beit_base_patch16_224", "vit_pwee_patch16_reg1_gap_256",
    "hiera_tiny_224", "nfnet_l0", "vit_wee_patch16_reg1_gap_256",
)  # fmt: skip

_UNET = {
    "sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
}  # fmt: skip
_DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8}
DIFFUSERS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        **_UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "UNet2DConditionModel": {
        **_UNET, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 32,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4,
    },
    "AutoencoderKL": {
        "block_out_channels": (32, 64), "norm_num_groups": 8, "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "VQModel": {
        "block_out_channels": (32, 64), "norm_num_groups": 8, "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "DiTTransformer2DModel": {**_DIT, "in_channels": 4, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
    "PixArtTransformer2DModel": {**_DIT, "cross_attention_dim": 32, "caption_channels": 24, "norm_num_groups": 4},
    "SD3Transformer2DModel": {
        **_DIT, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 24, "pooled_projection_dim": 16,
        "caption_projection_dim": 32, "pos_embed_max_size": 16,
    },
    "FluxTransformer2DModel": {
        "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 24, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6),
    },
}  # fmt: skip


class Trained(nn.Module):
    """A model and its loss in one call, as a model of transformers has it: ``.loss`` and ``.logits``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *, labels: torch.Tensor, **given: Any) -> Any:
        from transformers.modeling_outputs import ImageClassifierOutput

        x = given.pop("x", None)
        out = self.model(**given) if x is None else self.model(x)
        out = out if isinstance(out, torch.Tensor) else out[0]
        loss = F.mse_loss(out, labels) if labels.is_floating_point() else F.cross_entropy(out, labels)
        return ImageClassifierOutput(loss=loss, logits=out)


def timm_model(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import timm

    model = timm.create_model(name, num_classes=10)
    size = model.default_cfg["input_size"][-1]
    fixed = model.default_cfg.get("fixed_input_size", False) or any("attn" in n for n, _ in model.named_modules())
    size = size if fixed else 64
    return Trained(model), {"x": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 7])}


def diffusers_model(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import diffusers

    model = getattr(diffusers, name)(**DIFFUSERS[name])
    time = torch.tensor([3, 7])
    image = torch.randn(2, 3 if name in ("AutoencoderKL", "VQModel", "UNet2DModel") else 4, 16, 16)
    latent = torch.randn(2, 4, 8, 8)
    inputs: dict[str, Any] = {
        "UNet2DModel": {"sample": image, "timestep": time},
        "UNet2DConditionModel": {"sample": image, "timestep": time, "encoder_hidden_states": torch.randn(2, 5, 32)},
        "AutoencoderKL": {"sample": image},
        "VQModel": {"sample": image},
        "DiTTransformer2DModel": {"hidden_states": latent, "timestep": time, "class_labels": torch.tensor([1, 2])},
        "PixArtTransformer2DModel": {
            "hidden_states": latent, "timestep": time, "encoder_hidden_states": torch.randn(2, 5, 24),
        },
        "SD3Transformer2DModel": {
            "hidden_states": latent, "timestep": time, "encoder_hidden_states": torch.randn(2, 5, 24),
            "pooled_projections": torch.randn(2, 16),
        },
        "FluxTransformer2DModel": {
            "hidden_states": torch.randn(2, 16, 8), "timestep": torch.tensor([0.3, 0.7]), "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(5, 3), "encoder_hidden_states": torch.randn(2, 5, 24),
            "pooled_projections": torch.randn(2, 16),
        },
    }[name]  # fmt: skip
    with torch.no_grad():
        out = model(**inputs)[0]
    return Trained(model), {**inputs, "labels": torch.randn(out.shape)}
