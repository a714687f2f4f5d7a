"""``python -m tests.code_for_gpu CASE [OPTIONS]``: what fx_fusion makes of a model on an H200, and what Inductor makes of it,
without a GPU, as JSON. In a process of its own: see ``bench.absent_gpu``."""

from bench.absent_gpu import Code, bodies_of_rows, code_of, on_gpu  # isort: skip  before torch

import json
import re
import sys
from collections import Counter

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fusion
from bench import code, families

OF_FAMILIES = ("sd3", "flux", "wan")  # their few layers are those of ``bench.models``


class ConvNeXtBlocks(nn.Module):
    """Two blocks of ConvNeXt: convolutions with a bias in front of norms of their channels."""

    def __init__(self, width=512):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(2))

    def forward(self, x):
        for conv, norm, up, down, scale in zip(
            self.convolutions, self.norms, self.ups, self.downs, self.scales, strict=True
        ):
            y = down(nn.functional.gelu(up(norm(conv(x).permute(0, 2, 3, 1)))))
            x = x + (scale * y).permute(0, 3, 1, 2)
        return x.float().square().mean()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, use_cache=False)
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config), tokens(16, 1024)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=128256, use_cache=False, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config), tokens(8, 2048)


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(num_hidden_layers=2, vocab_size=32768, use_cache=False, head_dim=128, **sizes)
    return Qwen3ForCausalLM(config), tokens(8, 2048)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_hidden_layers=2)), {
        "input_ids": torch.empty(64, 512, dtype=torch.int64), "labels": torch.empty(64, dtype=torch.int64),
    }  # fmt: skip


def deep_bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_hidden_layers=4)), {
        "input_ids": torch.empty(64, 512, dtype=torch.int64), "labels": torch.empty(64, dtype=torch.int64),
    }  # fmt: skip


def deep_whisper():
    """Its encoder's values lie as its convolutions leave them; norms are left to Inductor."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"encoder_layers": 4, "decoder_layers": 4, "d_model": 512, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    config = WhisperConfig(use_cache=False, **sizes)
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.empty(8, 80, 3000, dtype=torch.bfloat16), "labels": torch.empty(8, 256, dtype=torch.int64),
    }  # fmt: skip


def convnext():
    return ConvNeXtBlocks(), {"x": torch.empty(64, 512, 14, 14, dtype=torch.bfloat16).to(memory_format=torch.channels_last)}


def tokens(batch, length):
    return dict.fromkeys(("input_ids", "labels"), torch.empty(batch, length, dtype=torch.int64))


def stored_twice(code: Code) -> list[str]:
    """Inductor's kernels that store one value several times."""
    found = []
    for name, body in re.findall(r"def (triton_\w+)\(.*?\):\n(.*?)\n'''", code.text, re.DOTALL):
        stores = Counter(re.findall(r"tl\.store\(\w+ \+ \((.*?)\), (tmp\d+)", body))
        found += [name] * any(count > 1 for count in stores.values())
    return found


def built(case: str) -> tuple[nn.Module, dict[str, torch.Tensor], FakeTensorMode]:
    """Return a model and its inputs on the GPU that is not there."""
    if case in OF_FAMILIES:
        families.DEVICE = "cpu"
        return code.built(case)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model, given = globals()[case]()
    on_gpu(model.bfloat16().train(), mode)
    return model, {name: on_gpu(value, mode) for name, value in given.items()}, mode


class HeadAndLoss(nn.Module):
    """A linear layer to 32768 classes, and a loss of ``LOSSES_OF_ROWS`` behind it."""

    def __init__(self, loss):
        super().__init__()
        self.head, self.loss = nn.Linear(1024, 32768, bias=False), loss

    def forward(self, x, y, advantage, teacher):
        log_p = self.head(x).float().log_softmax(-1)
        return self.loss(log_p, teacher.float().log_softmax(-1), y, advantage).mean()


def mixed(log_p, log_q):
    mixture = torch.logaddexp(log_p, log_q) - 0.6931471805599453
    return (log_p.exp() * (log_p - mixture) + log_q.exp() * (log_q - mixture)).sum(-1) / 2


LOSSES_OF_ROWS = {
    "policy": lambda log_p, log_q, y, a: (log_p.gather(-1, y[:, None])[:, 0] - a).exp() * a,
    "policy and entropy": lambda log_p, log_q, y, a: (
        (log_p.gather(-1, y[:, None])[:, 0] - a).exp() * a - 0.01 * (log_p.exp() * log_p).sum(-1)
    ),
    "reverse KL": lambda log_p, log_q, y, a: (log_p.exp() * (log_p - log_q)).sum(-1),
    "total variation": lambda log_p, log_q, y, a: (log_p.exp() - log_q.exp()).abs().sum(-1),
    "Jensen-Shannon": lambda log_p, log_q, y, a: mixed(log_p, log_q),
}


def moved_by_rows() -> dict[str, list[float]]:
    """Return the bytes a logit that each loss moves: for its values, and for its values and gradient."""
    found, m, v = {}, 4096, 32768
    for name, loss in LOSSES_OF_ROWS.items():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.device("meta"):
            model = HeadAndLoss(loss)
            given = {"x": torch.empty(m, 1024), "teacher": torch.empty(m, v)}
            given = {name: t.bfloat16() for name, t in given.items()}
            given |= {"y": torch.empty(m, dtype=torch.int64), "advantage": torch.empty(m)}
        on_gpu(model.bfloat16().train(), mode)
        given = {name: on_gpu(t, mode) for name, t in given.items()}
        with mode:
            code_of(model, given, "fx_fusion", {"select": "always", "fusions": ["linear_rows"]})
        found[name] = [sum(kernel.bytes for kernel in body.kernels) / 1024 / v for body in bodies_of_rows()]
    return found


def compiled(case: str, options: dict[str, object]) -> dict[str, object]:
    """Return what both backends make of a case; ``options`` are those of fx_fusion."""
    found: dict[str, object] = {}
    model, given, mode = built(case)
    for backend in ("inductor", "fx_fusion"):
        with mode, fx_fusion.recording() as report:
            codes = code_of(model, given, backend, options if backend == "fx_fusion" else None)
        found[backend] = {
            "graphs": len(codes),
            "moved": sum(kernel.bytes for code in codes for kernel in code.kernels if kernel.kind != "library"),
            "kernels": sum(len(code.kernels) for code in codes),
            "ours": Counter(kernel.name for code in codes for kernel in code.kernels if kernel.kind == "ours"),
            "stored twice": [name for code in codes for name in stored_twice(code)],
        }
    found["fallbacks"] = [graph.fallback for graph in report.graphs if graph.fallback]
    found["fused"] = Counter(site.fusion for site in report.sites if site.status == "fused")
    found["report"] = str(report)
    return found


if __name__ == "__main__":
    print(json.dumps(moved_by_rows() if sys.argv[1] == "rows" else compiled(sys.argv[1], json.loads(sys.argv[2]) if sys.argv[2:] else {})))
