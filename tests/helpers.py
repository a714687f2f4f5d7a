"""Define what several test files need: compile without Inductor, tiny models."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_fusion
from fx_fusion import pipeline
from fx_fusion.testing import kernels_on_cpu, rewriting_backend
from fx_fusion.torch_internals.nodes import take_name

OF_INDUCTOR = ("biased_attention", "block_sparse_attention", "flex_attention")  # fusions whose kernels are Inductor's own


def rewritten(function, *args, dynamic=False, options=None, **kwargs):
    """Call ``function`` through the backend (rewritten graphs run eagerly): the result and the report."""
    compiled = torch.compile(function, backend=rewriting_backend(**(options or {})), dynamic=dynamic)
    with fx_fusion.recording() as report:
        result = compiled(*args, **kwargs)
    return result, report


def check_rewritten(function, *args, rtol=None, atol=None, **fused):
    """Assert that so many sites of each fusion are fused, and that the values are eager's."""
    result, report = rewritten(function, *args)
    report.assert_fused(**fused)
    torch.testing.assert_close(result, function(*args), rtol=rtol, atol=atol)


def as_eager(function, *args):
    """The report of a function whose first operand is differentiated: values and that gradient are eager's."""
    y, report = rewritten(function, *args)
    expected = function(*args)
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(t.square().sum(), args[0])[0] for t in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return report


def by_kernels(function, *args, device):
    """Return what an op returns that runs its kernels, on a GPU or in Triton's interpreter; results on the CPU."""
    if device == "cpu":
        with kernels_on_cpu(True):
            return function(*args)
    moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, function(*moved))


def worst_of(errors):
    """The largest; NaN if one of them is, which Python's ``max`` steps over."""
    return torch.tensor(list(errors), dtype=torch.float64).max().item()


def slow_but(fast, values):
    """Parameters of which only those in ``fast`` run under ``make test``; the others under ``make test-all``."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def covering(*factors):
    """Return few cases, one value of each factor in each, that contain every pair of values of two factors.

    Greedy, in the order of the full product: the same factors give the same cases.
    """
    left = list(itertools.product(*(range(len(factor)) for factor in factors)))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in left}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(left, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(tuple(factor[at] for factor, at in zip(factors, best, strict=True)))
    return chosen


def pairwise(**factors):
    """Parametrize a test by the cases of ``covering``; a factor that is a dict gives its keys."""
    cases = covering(*(list(factor) for factor in factors.values()))
    ids = ["-".join(getattr(value, "__name__", str(value)) for value in case) for case in cases]
    return pytest.mark.parametrize(tuple(factors), cases, ids=ids)


def statuses(report, fusion):
    return [s.status for s in report.sites if s.fusion == fusion]


def reasons(report, fusion):
    return " | ".join(s.reason for s in report.sites if s.fusion == fusion)


class CountsCalls(nn.Module):
    """Writes to a buffer in every call, and multiplies by it."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.out(x) * self.calls


def tiny_llama(dtype=torch.float32, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
        **changes,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config)).to(dtype)


@dataclass
class Output:
    """The loss and the logits, as a model of transformers returns them."""

    loss: torch.Tensor
    logits: torch.Tensor


class SmallModel(nn.Module):
    """A language model without attention: an embedding, a layer, an lm_head and a loss.

    Dynamo traces it in a tenth of the time of ``tiny_llama``. The loss shifts the labels as transformers does.
    """

    def __init__(self, vocabulary=256, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, labels):
        logits = self.lm_head(torch.tanh(self.layer(self.table(input_ids))))
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return Output(F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten()), logits)


def tokens(batch=2, length=16, vocabulary=256):
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


@contextlib.contextmanager
def sabotaged(monkeypatch, fusion, nth, change):
    """The nth replacement by this fusion is wrong."""
    real, seen = pipeline.replace, []

    def replace(declared, match, editor):
        known = len(editor.made)
        reason = real(declared, match, editor)
        if declared.name == fusion and reason is None:
            seen.append(match)
            if len(seen) % 100 == nth:
                node = editor.made[-1]
                with editor.graph.inserting_after(node):
                    wrong = editor.graph.call_function(change, (node,))
                wrong.meta = dict(node.meta)
                node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
                take_name(wrong, node)
        assert len(editor.made) >= known
        return reason

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "replace", replace)
        patched.setattr(pipeline, "rewrite", counting(pipeline.rewrite, seen))
        yield


def counting(rewrite, seen):
    def run(*args):
        seen.clear()  # a graph starts anew
        return rewrite(*args)

    return run


def a_little_more(x):
    return x * 1.01


def detached(x):
    return x.detach()


def printed_without_interpreter(module, *arguments, flags=()):
    """The last line, JSON, that a module of the tests prints in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, *flags, "-m", module, *arguments],
        capture_output=True, text=True, check=False, env=environment, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])
