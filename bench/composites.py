"""Work that several ops of a model make up together and that one fusion has to meet there: measured beside the fusions."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fx_fusion.fusion.declaration import Fusion, case
from fx_fusion.patterns import rope
from fx_fusion.patterns.evonorm_s0 import swish_over_group_deviation


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotated_queries_and_keys(q, k, cos, sin):
    """Return what an attention layer of a Llama does to its queries and keys, laid out as its projections leave them."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotated_attention(q, k, v, cos, sin):
    """The same, and what reads them."""
    q, k = rotated_queries_and_keys(q, k, cos, sin)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def read_by_convolution(y):
    """Images as a convolution reads them: PyTorch returns the result of a norm contiguous, which nothing in a network asks
    for. The convolution is a small one, to 8 channels, the same for all."""
    return F.conv2d(y, y.new_ones(()).expand(8, y.shape[1], 1, 1))


def conv_evonorm(x, kernel, groups, v, weight, bias, eps, correction):
    y = F.conv2d(x, kernel, padding=1)
    return read_by_convolution(swish_over_group_deviation(y, groups, v, weight, bias, eps, correction))


def norm_swish_conv(x, kernel, groups, weight, bias, eps):
    """Half a ResNet block of a diffusion model."""
    return F.conv2d(F.silu(F.group_norm(x, groups, weight, bias, eps)), kernel, padding=1)


_LAST = {"x": "b h w c", "kernel": "k r s c"}
_LAID = {"q": "b s h d", "k": "b s g d"}

# The composite and the fusions that are to meet in it.
COMPOSITES = (
    (
        Fusion(
            name="rope of q and k",
            pattern=rotated_queries_and_keys,
            find=lambda search: (),
            emit=lambda editor, match: None,
            why_keep=lambda q, k, cos, sin: rope.why_keep(q, cos, sin, "rotate_half", "input", False),
            inputs={"q": "b h s d", "k": "b g s d", "cos": "b s d", "sin": "b s d"},
            frozen=("cos", "sin"),
            cases=(
                case("llama_1b", b=8, h=32, g=8, s=2048, d=64, order=_LAID),
                case("llama_8b", b=4, h=32, g=8, s=4096, d=128, order=_LAID),
            ),
            traffic=("4*b*(h + g)*s*d*bytes", "6*b*(h + g)*s*d*bytes"),
        ),
        ("rope",),
    ),
    (
        Fusion(
            name="rope and attention",
            pattern=rotated_attention,
            find=lambda search: (),
            emit=lambda editor, match: None,
            inputs={"q": "b h s d", "k": "b g s d", "v": "b g s d", "cos": "b s d", "sin": "b s d"},
            frozen=("cos", "sin"),
            cases=(
                case("llama_1b", b=8, h=32, g=8, s=2048, d=64, order={**_LAID, "v": "b s g d"}),
                case("llama_8b", b=1, h=32, g=8, s=4096, d=128, order={**_LAID, "v": "b s g d"}),
                case("short", b=64, h=12, g=12, s=128, d=64, order={**_LAID, "v": "b s g d"}),
            ),
        ),
        ("rope",),
    ),
    (
        Fusion(
            name="group_norm_swish + conv2d",
            pattern=norm_swish_conv,
            find=lambda search: (),
            emit=lambda editor, match: None,
            inputs={"x": "b c h w", "kernel": "k c r s", "groups": 32, "weight": "c", "bias": "c", "eps": 1e-5},
            cases=(
                case("unet_64", b=8, c=320, k=320, h=64, w=64, r=3, s=3),
                case("unet_64 nhwc", b=8, c=320, k=320, h=64, w=64, r=3, s=3, order=_LAST),
                case("unet_16 nhwc", b=8, c=1280, k=1280, h=16, w=16, r=3, s=3, order=_LAST),
                case("vae_128 nhwc", b=16, c=512, k=512, h=128, w=128, r=3, s=3, order=_LAST),
            ),
        ),
        ("group_norm_swish",),
    ),
    (
        Fusion(
            name="conv2d + evonorm_s0",
            pattern=conv_evonorm,
            find=lambda search: (),  # not matched as a whole
            emit=lambda editor, match: None,
            inputs={
                "x": "b c h w", "kernel": "k c r s", "groups": 32, "v": "k", "weight": "k", "bias": "k", "eps": 1e-5,
                "correction": 0,
            },
            cases=(
                case("stage_1", b=64, c=256, k=256, h=56, w=56, r=3, s=3),
                case("stage_1 nhwc", b=64, c=256, k=256, h=56, w=56, r=3, s=3, order=_LAST),
                case("stage_2", b=128, c=512, k=512, h=28, w=28, r=3, s=3),
                case("small_64", b=64, c=64, k=64, h=28, w=28, r=3, s=3),
            ),
        ),
        ("evonorm_s0",),
    ),
)  # fmt: skip
