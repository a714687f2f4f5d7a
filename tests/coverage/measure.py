"""One model class: built, trained a step in eager and through the backend, compared, its sites counted two ways."""

from __future__ import annotations

import collections
from typing import Any

import torch

import fx_fusion
from fx_fusion.testing import rewriting_backend
from tests.coverage.configs import shrunk
from tests.coverage.inputs import inputs_of

NORMS = {
    "rms_norm": ("rms_norm", "add_rms_norm", "gated_rms_norm"), "layer_norm": ("layer_norm", "add_layer_norm"),
    "group_norm": ("group_norm", "group_norm_swish"), "embedding": ("embedding",),
}  # fmt: skip


def kind_of(module: torch.nn.Module) -> str | None:
    """What a module is, by its type or by what its class is called: nothing that the matcher looks at."""
    name = type(module).__name__
    if isinstance(module, torch.nn.LayerNorm):
        return "layer_norm"
    if isinstance(module, torch.nn.GroupNorm):
        return "group_norm"
    if type(module) is torch.nn.Embedding:
        return "embedding"
    if "RMSNorm" in name or name in ("T5LayerNorm", "MT5LayerNorm", "LlamaNorm"):
        return "rms_norm"
    return None


def step(model: torch.nn.Module, call: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    out = call(**inputs)
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach() + 0}
    found.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


def measure(class_name: str, kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The row of one class: status, differences, ground truth and what the report says."""
    import transformers

    model_class = getattr(transformers, class_name)
    row: dict[str, Any] = {"class": class_name, "kind": kind, "dtype": str(dtype)[6:]}
    try:
        torch.manual_seed(0)
        model = model_class(shrunk(model_class.config_class, kind)).to(dtype).train()
        inputs = inputs_of(model, kind)
        seen: collections.Counter[str] = collections.Counter()
        hooks = [
            m.register_forward_hook(lambda *_, k=k: seen.update([k])) for m in model.modules() if (k := kind_of(m))
        ]  # fmt: skip
        eager = step(model, model, inputs)
        for hook in hooks:
            hook.remove()
    except Exception as error:  # the class can't be built or trained so small: not our subject, and reported as such
        return {**row, "status": "not built", "error": f"{type(error).__name__}: {error}"[:300]}
    row["modules"] = dict(seen)
    torch._dynamo.reset()
    try:
        with fx_fusion.recording() as report:
            ours = step(model, torch.compile(model, backend=rewriting_backend(), dynamic=False), inputs)
    except Exception as error:  # a crash of ours is what the suite looks for
        return {**row, "status": "crash", "error": f"{type(error).__name__}: {error}"[:1500]}
    worst = max(
        ((_difference(ours.get(n), truth), n) for n, truth in eager.items()), default=(0.0, "")
    )  # fmt: skip
    row["sites"] = dict(collections.Counter(f"{s.fusion}/{s.status}" for s in report.sites))
    row["reasons"] = sorted({f"{s.fusion}/{s.status}: {s.reason}"[:200] for s in report.sites if s.status != "fused"})
    covered = {
        k: sum(n for site, n in row["sites"].items() if site.split("/")[0] in names and not site.endswith("/near"))
        for k, names in NORMS.items()
    }
    row["missing"] = {k: n - covered[k] for k, n in seen.items() if covered[k] < n}
    row["worst"] = [worst[0], worst[1]]
    row["status"] = "wrong" if worst[0] > 1e-3 else "ok"
    return row


def _difference(ours: torch.Tensor | None, eager: torch.Tensor) -> float:
    if ours is None:
        return float("inf")
    unit = max(eager.abs().max().item(), 1e-3) if eager.numel() else 1.0
    return (ours.double() - eager.double()).abs().max().item() / unit if eager.numel() else 0.0
