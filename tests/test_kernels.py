"""Kernels at the edges of what they accept, and (without a GPU) through the compiler for an H200."""

import contextlib
import functools
import itertools
import re
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import fx_fusion.fusion.registry as registry
from fx_fusion.kernels import embedding, evonorm_b0, gated_rms_norm, log_probs_entropy, rope
from fx_fusion.kernels.add_rms_norm import add_rms_norm
from fx_fusion.kernels.cross_entropy import cross_entropy
from fx_fusion.kernels.group_norm import group_norm
from fx_fusion.kernels.layer_norm import layer_norm
from fx_fusion.kernels.lib import glu, launch
from fx_fusion.kernels.lib import image_tiles as images
from fx_fusion.kernels.lib.launch import NotTraceable, as_rows, row_order, traced
from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.logits import logit_rows
from fx_fusion.kernels.logits.logit_chunks import rows_in_a_chunk
from fx_fusion.kernels.logits.logit_rows import NO_IGNORE, launch_rows
from fx_fusion.kernels.norms import evonorm_b0_by_channel, evonorm_b0_by_tile, norm_by_group, row_norm
from fx_fusion.kernels.norms import group_norm_dispatch as channel_norm
from fx_fusion.kernels.norms import group_norm_math as norm_formulas
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.kernels.swiglu import swiglu
from fx_fusion.kernels.swish import swish
from fx_fusion.ops.fused_op import interpreting
from fx_fusion.patterns.evonorm_b0 import over_larger_deviation
from fx_fusion.testing import Run, eager_nearby, run_oracle, worst_excess, zipf

registry.all_fusions()  # declares the references that the ops run on CPU


def reference_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


LAYOUTS = {
    "transposed": lambda d: torch.randn(2, 5, 3, 24, device=d).transpose(1, 2),
    "sliced": lambda d: torch.randn(4, 6, 48, device=d)[..., 3:27],
    "columns_first": lambda d: torch.randn(24, 5, device=d).t(),
    "columns_in_the_middle": lambda d: torch.randn(3, 24, 4, device=d).transpose(1, 2),
    "rows_apart": lambda d: torch.randn(8, 24, device=d)[::2],
    "expanded": lambda d: torch.randn(1, 24, device=d).expand(5, 24),
    "one_row": lambda d: torch.randn(24, device=d),
    "strided_columns": lambda d: torch.randn(4, 48, device=d)[:, ::2],
    "empty": lambda d: torch.randn(0, 24, device=d),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_inputs_and_gradients(name, device):
    x = LAYOUTS[name](device).requires_grad_()
    weight = torch.randn(24, device=device, requires_grad=True)
    y = rms_norm(x, weight, 1e-6, 0.0, False)
    expected = reference_norm(x, weight)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for upstream in (
        torch.ones((), device=device).expand(y.shape),
        torch.randn(*y.shape[:-1], 48, device=device)[..., ::2],
    ):
        ours = torch.autograd.grad(y, (x, weight), upstream, retain_graph=True)
        theirs = torch.autograd.grad(expected, (x, weight), upstream, retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    gated = swiglu(x, x * 2)
    torch.testing.assert_close(gated, torch.nn.functional.silu(x) * x * 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(swish(x), torch.nn.functional.silu(x), rtol=1e-5, atol=1e-5)


def test_only_one_gradient_comes_back(device):
    x, r = torch.randn(5, 24, device=device, requires_grad=True), torch.randn(5, 24, device=device, requires_grad=True)
    weight = torch.randn(24, device=device, requires_grad=True)
    y, h = add_rms_norm(x, r, weight, 1e-6, 0.0, False)
    (only_h,) = torch.autograd.grad(h.sum(), (x,), retain_graph=True)
    torch.testing.assert_close(only_h, torch.ones_like(x))
    only_y = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    expected = torch.autograd.grad(reference_norm(x + r, weight).sum(), (x, weight))
    for a, b in zip(only_y, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_frozen_weight_costs_no_gradient(device):
    x, weight = torch.randn(5, 24, device=device, requires_grad=True), torch.randn(24, device=device)
    rms_norm(x, weight, 1e-6, 0.0, True).sum().backward()
    assert weight.grad is None
    _, dweight = torch.ops.fx_fusion.rms_norm_bwd(
        x.detach(), x.detach(), weight, torch.ones(5, device=device), 1e-6, 0.0, True, [True, False]
    )
    assert dweight.numel() == 0


def test_saved_tensors_are_not_written_to(device):
    x, weight = (
        torch.randn(5, 24, device=device, requires_grad=True),
        torch.randn(24, device=device, requires_grad=True),
    )
    y = rms_norm(x, weight, 1e-6, 0.0, False)
    first = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


SECOND = {
    "rms_norm": lambda x, t: rms_norm(x, x[0].detach(), 1e-6, 0.0, False),
    "cross_entropy": lambda x, t: cross_entropy(x, t, None, -100, 0.0, 0.0, 1.0),
    "head_mean": lambda x, t: linear_cross_entropy(x, x.detach()[:4], None, t, None, "mean", -100, 0.0, 0.0, 1.0, [True, False, False])[0],
    "head_none": lambda x, t: linear_cross_entropy(x, x.detach()[:4], None, t, None, "none", -100, 0.0, 0.0, 1.0, [True, False, False])[0],
    "embedding": lambda x, t: embedding.embedding(t, x, -1),
    "rope": lambda x, t: rope.rope(x.view(1, 1, 5, 24), None, x.detach().view(1, 1, 5, 24), x.detach().view(1, 1, 5, 24), "rotate_half", "input", False)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_refused_not_wrong(name, device):
    """As of a gradient penalty, alone or beside a term that has its own."""
    x, t = torch.randn(5, 24, device=device, requires_grad=True), torch.tensor([0, 1, 2, 3, 0], device=device)
    torch.autograd.grad(SECOND[name](x, t).square().sum(), x)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(SECOND[name](x, t).square().sum(), x, create_graph=True)


def test_a_target_out_of_range_is_never_a_number(device):
    logits, target = torch.randn(3, 9, device=device, requires_grad=True), torch.tensor([1, 9, 2], device=device)
    if logits.is_cuda or interpreting():
        loss = cross_entropy(logits, target, None, -100, 0.0, 0.0, 1.0)
        assert loss.isnan().tolist() == [False, True, False]
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert gradient.isnan().all(1).tolist() == [False, True, False], "no step is made with it"
        assert gradient.isnan().any(1).tolist() == [False, True, False]
    else:
        with pytest.raises((IndexError, RuntimeError)):
            cross_entropy(logits, target, None, -100, 0.0, 0.0, 1.0)


def test_rows_of_infinities(device):
    logits = torch.randn(3, 9, device=device)
    logits[1, :] = float("-inf")
    logits[2, 4:] = float("-inf")
    target = torch.tensor([1, 0, 2], device=device)
    loss = cross_entropy(logits, target, None, -100, 0.0, 0.0, 1.0)
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v", [1, 3, 7, 9, 15, 17, 31, 4099])
def test_rows_that_start_anywhere(v, dtype, device):
    """Rows of odd length: each starts at another offset from a multiple of 16 bytes; targets at both ends of them."""
    m = 18
    logits = torch.randn(m, v, device=device).to(dtype).requires_grad_()
    target = torch.tensor([0, v - 1, v // 2] * (m // 3), device=device)
    target[4] = -100
    weight = torch.rand(v, device=device)
    dloss = torch.randn(m, device=device)
    loss = cross_entropy(logits, target, weight, -100, 0.1, 0.0, 1.0)
    (dlogits,) = torch.autograd.grad(loss, logits, dloss)
    exact = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, target, weight.double(), label_smoothing=0.1, reduction="none")
    (gradient,) = torch.autograd.grad(expected, exact, dloss.double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(dlogits.double(), gradient, rtol=eps, atol=1e-6)


def test_chunks_are_few_and_equal():
    assert rows_in_a_chunk(16384, 128256, 2, "cuda") == 4096, "a fourth of all rows"
    assert rows_in_a_chunk(8192, 128256, 2, "cuda") == 2048
    assert rows_in_a_chunk(32768, 151936, 2, "cuda") == 4096, "1.16 GiB"
    assert rows_in_a_chunk(16384, 32000, 2, "cuda") == 8192, "0.5 GiB"
    assert rows_in_a_chunk(4096, 32000, 2, "cuda") == 4096
    for m, v in ((16383, 128256), (12285, 128256), (8190, 151936), (8191, 262144)):
        assert -(-m // rows_in_a_chunk(m, v, 2, "cuda")) == 4, "more would be summed in float32"
    assert rows_in_a_chunk(20481, 151936, 2, "cuda") == 4352, "no chunk of one row behind five of 4096"
    assert rows_in_a_chunk(2048, 128256, 4, "cuda") == 2048, "products in float32 are not cut below that"
    assert rows_in_a_chunk(3, 10, 4, "cpu") == 3
    assert rows_in_a_chunk(0, 10, 4, "cpu") == 1
    for m in (1, 255, 1000, 5000, 16383):
        rows = rows_in_a_chunk(m, 151936, 2, "cuda")
        assert rows * 151936 * 2 <= (5 << 28) + 256 * 151936 * 2


@pytest.mark.skipif(not (interpreting() or torch.cuda.is_available()), reason="runs the kernels themselves")
@pytest.mark.parametrize("stages", [None, 1, 3])
@pytest.mark.parametrize("columns", [1, 300, 4104])
@pytest.mark.parametrize(("smoothing", "softcap", "padded"), [(0.0, 0.0, False), (0.1, 5.0, False), (0.0, 0.0, True)])
def test_loss_and_gradient_in_one_launch(columns, stages, smoothing, softcap, padded, device, monkeypatch):
    """Over the logits themselves, which are walked back in ``stages``; entropies too; a row is ignored, classes may be
    padded."""
    if stages:
        monkeypatch.setattr(logit_rows, "_plan", lambda *_: (512, 4, 2, stages))
    logits = torch.randn(5, (columns + 7) // 8 * 8 + 8 if padded else columns, device=device) * 3
    target = torch.randint(0, columns, (5,), device=device)
    target[2] = -100
    upstream, of_entropy = torch.randn(5, device=device), torch.randn(5, device=device)
    of_entropy[2] = 0  # an ignored row is not read
    exact = logits[:, :columns].double().requires_grad_()
    z = softcap * torch.tanh(exact * 0.5 / softcap) if softcap else exact * 0.5
    expected = F.cross_entropy(z, target, ignore_index=-100, reduction="none", label_smoothing=smoothing)
    log_p = z.log_softmax(-1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    ((expected * upstream).sum() + (expected_entropy * of_entropy).sum()).backward()
    loss, entropy, stats = torch.empty(5, device=device), torch.zeros(5, device=device), torch.empty(2, 5, device=device)
    launch_rows(
        logits, target, None, -100, smoothing, softcap, 0.5, classes=columns, loss=loss, stats=stats, dloss=upstream,
        dlogits=logits, entropy=entropy, dentropy=of_entropy,
    )  # fmt: skip
    live = target != -100
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy[live].double(), expected_entropy.detach()[live], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :columns].double(), exact.grad, rtol=1e-5, atol=1e-5)
    assert not logits[:, columns:].any()


def test_grids_of_any_number_of_images(monkeypatch):
    """CUDA takes 2^31 - 1 programs in the first dim and 65535 in the others."""
    grids = []
    monkeypatch.setattr(images, "launch", lambda kernel, grid, *args, **options: grids.append(grid))
    images.Tiles(torch.empty(70000, 4, 3, 3)).moments(torch.empty(70000, 4, 3, 3))
    assert all(n <= 65535 for grid in grids for n in grid[1:])
    assert grids[0][0] >= 70000


def test_integers_that_inductor_can_pass(monkeypatch):
    """Its launcher has 32 bits for an integer unless that is too large: one that is too small overflows there."""
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append([a for a in args if isinstance(a, int)])

    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: Recorder())
    logits, target = torch.randn(4, 9000), torch.zeros(4, dtype=torch.int64)
    with traced():
        log_probs_entropy._fwd(logits, target, 0.0, 1.0)
        launch_rows(logits, target, None, NO_IGNORE, 0.0, 0.0, 1.0, loss=torch.empty(4), stats=torch.empty(2, 4))
        with pytest.raises(NotTraceable):
            launch_rows(logits, target, None, -(2**63), 0.0, 0.0, 1.0, loss=torch.empty(4), stats=torch.empty(2, 4))
    assert len(launched) == 2
    assert min(n for args in launched for n in args) >= -(2**31)


def test_row_order_follows_memory():
    x = torch.randn(2, 5, 3, 24).transpose(1, 2)
    assert row_order(x) == [0, 2, 1, 3]
    assert as_rows(x.permute(row_order(x))).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "swiglu", "geglu", "swish", "cross_entropy"])
def test_ops_keep_the_contract_of_torch_library(name):
    x, w, t = torch.randn(4, 24, requires_grad=True), torch.randn(24, requires_grad=True), torch.tensor([1, 2, -100, 3])
    arguments = {
        "rms_norm": (x, w, 1e-6, 0.0, True), "add_rms_norm": (x, x.detach() + 1, w, 1e-6, 0.0, True), "swiglu": (x, x.detach() + 1),
        "geglu": (x, x.detach() + 1, "gelu_tanh"), "swish": (x,), "cross_entropy": (x, t, None, -100, 0.0, 0.0, 1.0),
    }[name]  # fmt: skip
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(getattr(torch.ops.fx_fusion, name).default, arguments, test_utils=checks)


@pytest.mark.parametrize("needs", [[True, True, True], [True, False, False], [False, True, False]], ids=str)
def test_gradients_that_nobody_wants_are_as_the_fake_says(needs):
    """A frozen weight: the fake promises nothing, and nothing comes."""
    x, w = torch.randn(2, 6, 5), torch.randn(6)
    backwards = torch.ops.fx_fusion.group_norm_bwd.default, torch.ops.fx_fusion.gated_rms_norm_bwd.default
    _, stats = torch.ops.fx_fusion.group_norm(x, 2, w, w, 1e-5)
    opcheck(backwards[0], (x, x, 2, w, w, stats, 1e-5, needs), test_utils="test_faketensor")
    rows = torch.randn(4, 6)
    _, rstd = torch.ops.fx_fusion.gated_rms_norm(rows, rows, w, 1e-6, True, True, True, 1)
    opcheck(backwards[1], (rows, rows, rows, w, rstd, 1e-6, True, True, True, 1, needs), test_utils="test_faketensor")


def test_linear_cross_entropy_keeps_the_contract():
    x, w, t = (
        torch.randn(4, 8, requires_grad=True),
        torch.randn(12, 8, requires_grad=True),
        torch.tensor([1, 2, -100, 3]),
    )
    for reduction in ("mean", "none"):
        arguments = (x, w, None, t, None, reduction, -100, 0.0, 0.0, 1.0, [True, True, False])
        opcheck(linear_cross_entropy, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


B0_WAYS = ("as chosen", "channels", "tiles that merge", "tiles")


def by(way):
    """EvoNorm-B0 in one of its ways, wherever that can take the images."""

    def in_small_tiles(x, *others, backward):
        if way.startswith("tiles") or not all(t.is_contiguous() for t in (x, *others)):
            return None
        return evonorm_b0_by_channel.tile_of(x, max(64, 2 * launch.next_power_of_2(x[0, 0].numel())), 512)

    patched = contextlib.ExitStack()
    if way != "as chosen":
        patched.enter_context(patch.object(evonorm_b0_by_channel, "options", in_small_tiles))
    if way == "tiles":
        patched.enter_context(patch.object(evonorm_b0_by_tile, "_FEW", 0))
    return patched


@pytest.mark.skipif(not (interpreting() or torch.cuda.is_available()), reason="runs the kernels")
@pytest.mark.parametrize("way", B0_WAYS)
@pytest.mark.parametrize("shape", [(5, 6, 14, 14), (9, 5, 7, 7), (2, 3, 40, 40), (2, 9, 1, 1)])
def test_evonorm_b0_by_channel_and_by_tile(shape, way, device):
    for last, dtype, running in itertools.product((False, True), (torch.float32, torch.bfloat16), (False, True)):
        form = torch.channels_last if last else torch.contiguous_format
        x, dy = (torch.randn(shape, device=device).to(dtype, memory_format=form) for _ in range(2))
        inputs = {"x": x} | {n: torch.randn(shape[1], device=device).to(dtype) for n in ("v", "weight", "bias")}
        running_var = torch.rand(shape[1], device=device) + 0.1 if running else None
        name, used = b0_excess(inputs, dy, running_var, way)
        assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


def b0_excess(inputs, dy, running_var, way):
    leaves = {n: t.clone(memory_format=torch.preserve_format).requires_grad_() for n, t in inputs.items()}
    with by(way):
        y, var, *_ = evonorm_b0.evonorm_b0(*leaves.values(), running_var, 1e-3)
        y.backward(dy)
    found = Run({"out0": y.detach(), "out1": var, **{f"d{n}": t.grad for n, t in leaves.items()}})
    reference = functools.partial(over_larger_deviation, running_var=running_var, eps=1e-3)
    upstream = (dy, torch.zeros_like(var))
    exact = run_oracle(reference, inputs, upstream)
    return worst_excess(found, eager_nearby(reference, inputs, exact, upstream), exact, dy.dtype)


@pytest.mark.skipif(not (interpreting() or torch.cuda.is_available()), reason="runs the kernels")
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, v) for v in (100.1, 985.9, 4148.5, 1e6 + 0.3)] + [(torch.float16, 1785), (torch.bfloat16, 4080)],
)
def test_equal_values_have_no_variance(dtype, value, device):
    """Their float32 sum is rounded, so is their mean: 1 / sqrt(eps) makes 0.005 of that at 100, 0.6 at 10^6; eager has 0.
    Sums of 11 bits are exact up to 2^13 values, of 8 bits up to 2^16."""
    least = 2 * torch.finfo(torch.float32).eps
    for n in (96, 781, 9409, 20001, *([65537 + 2**13] if dtype == torch.bfloat16 else [])):
        w, x = torch.ones(n, device=device, dtype=dtype), torch.full((3, n), value, device=device, dtype=dtype)
        assert layer_norm(x, w, w * 0, 1e-5, False).abs().max() <= least
    for shape in ((2, 8, 7, 7), (2, 4, 45, 45), (1, 2, 97, 97), (1, 2, 130, 131)):
        for form in (torch.contiguous_format, torch.channels_last):
            x = torch.full(shape, value, device=device, dtype=dtype).to(memory_format=form)
            assert group_norm(x, 2, None, None, 1e-5).abs().max() <= least
            p = torch.ones(shape[1], device=device, dtype=dtype)
            for way in B0_WAYS:
                with by(way):
                    _, var, deviations, _ = evonorm_b0._fwd(x, p, p, p, None, 1e-3)
                assert var.max() <= least
                torch.testing.assert_close(deviations[1], torch.full_like(deviations[1], 1e-3).sqrt())


def compiling(monkeypatch):
    """From now on a launch is compiled for an H200 instead of run; each kernel once for each way it is called. The compiled
    kernels, by name and how they are called."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16"}
    compiled = {}

    def compile_only(kernel, *args, grid, warmup, **keywords):
        bound = dict(zip(kernel.arg_names, args, strict=False))
        options = {}
        for key, item in keywords.items():
            (bound if key in kernel.arg_names else options)[key] = item
        fixed = {p.name for p in kernel.params if p.is_constexpr}
        signature = {
            n: "constexpr" if n in fixed else f"*{types[v.dtype]}" if isinstance(v, torch.Tensor) else "fp32" if isinstance(v, float) else "i32"
            for n, v in ((n, bound[n]) for n in kernel.arg_names)
        }  # fmt: skip
        constants = {(kernel.arg_names.index(n),): bound[n] for n in fixed}
        # As the launcher says it: what is not known to be aligned is not loaded ahead, and takes no shared memory.
        wide = [
            n
            for n, v in bound.items()
            if n not in fixed and (isinstance(v, torch.Tensor) or (isinstance(v, int) and v % 16 == 0))
        ]
        attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in wide}
        if (key := (kernel.__name__, str(signature), str(constants), str(wide))) not in compiled:
            source = ASTSource(kernel, signature, constants, attributes)
            compiled[key] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert compiled[key].metadata.shared <= 227 << 10, kernel.__name__

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    return compiled


def norms(n):
    x, w = torch.randn(8, n).bfloat16(), torch.randn(n).bfloat16()
    *_, stats = row_norm.norm_fwd(x, None, w, None, 1e-6, 0.0, True, center=False)
    row_norm.norm_bwd(x, None, x, w, None, stats, 0.0, True, [True, True, False], center=False)


def gated_norms(n):
    x, options = torch.randn(8, n).bfloat16(), (True, True, True, 1)
    gated_rms_norm._fwd(x, x, x[0], 1e-6, *options)
    gated_rms_norm._bwd(x, x, x, x[0], torch.empty(8), 1e-6, *options, [True] * 3)


def gates(n):
    x = torch.randn(8, n).bfloat16()
    glu.glu_fwd(x, x, "silu")
    glu.glu_bwd(x, x, x, "silu")


def losses(v):
    logits, target, loss, stats = torch.randn(8, v).bfloat16(), torch.zeros(8, dtype=torch.long), torch.empty(8), torch.empty(2, 8)
    launch_rows(logits, target, None, -100, 0.0, 0.0, 1.0, loss=loss, stats=stats, dlogits=logits)
    launch_rows(logits, target, None, -100, 0.0, 0.0, 1.0, stats=stats, dloss=loss, dlogits=logits)


@pytest.mark.skipif(interpreting() or torch.cuda.is_available(), reason="compiles without running")
@pytest.mark.parametrize(
    ("launches", "eights", "sixteens"),
    [(norms, 776, 768), (gated_norms, 776, 768), (gates, 11000, 11008), (losses, 51864, 51840), (losses, 50280, 50304)],
    ids=["norms", "gated_norms", "gates", "whisper", "mamba"],
)
def test_sizes_that_8_divides_are_read_as_wide_as_those_of_16(launches, eights, sixteens, monkeypatch):
    """16 bytes at once: a vocabulary of Whisper or Mamba, anything of pad_to_multiple_of=8."""
    compiled = compiling(monkeypatch)

    def narrow(size):
        compiled.clear()
        launches(size)
        found = {}
        for (name, *_), made in compiled.items():
            reads = made.asm["ptx"].replace("ld.global.L1", "ld.global").splitlines()
            one_by_one = [line for line in reads if re.search(r"(ld|st)\.global[.\w:]*\.b16\b", line) and ".v" not in line]
            found[name] = len(one_by_one) + found.get(name, 0)
        return found

    assert narrow(eights) == narrow(sixteens)


@pytest.mark.skipif(interpreting() or torch.cuda.is_available(), reason="compiles without running")
def test_every_kernel_compiles_for_an_h200(monkeypatch):
    """Triton's compiler needs no GPU: every launch of the launchers below goes through it, down to machine code."""
    compiled = compiling(monkeypatch)
    widths = (
        (4096, torch.bfloat16),
        (20001, torch.bfloat16),
        (8192, torch.float32),
        (5000, torch.float32),
        (1024, torch.bfloat16),
    )
    for n, dtype in widths:
        x, w = torch.randn(8, n, dtype=dtype), torch.randn(n)
        for weight, first, center in ((w, True, False), (None, False, False), (w, False, True)):
            bias = weight if center else None
            *_, stats = row_norm.norm_fwd(x, None, weight, bias, 1e-6, 0.0, first, center=center)
            row_norm.norm_fwd(x, x, weight, bias, 1e-6, 0.0, first, center=center)
            for dh, needs in ((x, [True, True, True]), (None, [True, False, False])):
                row_norm.norm_bwd(x, dh, x, weight, bias, stats, 0.0, first, needs, center=center)
    x, stats = torch.randn(8, 20001).bfloat16(), torch.empty(16)
    for options in ((True, True, True, 2), (False, False, False, 1)):
        gated_rms_norm._fwd(x[:, :4096], x[:, :4096], w[:4096], 1e-6, *options)
        gated_rms_norm._bwd(x[:, :4096], x[:, :4096], x[:, :4096], w[:4096], stats, 1e-6, *options, [True] * 3)
    for shape, groups in (((4, 12, 28, 28), 4), ((1, 8, 90, 95), 2), ((2, 40, 16, 16), 1)):
        images = torch.randn(shape).bfloat16()
        for image in (images, images.to(memory_format=torch.channels_last)):
            p = torch.randn(shape[1])
            for kind in (norm_formulas.GROUP_NORM, norm_formulas.GROUP_NORM_SWISH, norm_formulas.EVONORM_S0):
                kept = channel_norm.norm_fwd(image, torch.empty_like(image), groups, p, p, p, 1e-5, kind)
                channel_norm.norm_bwd(image, image, groups, p, p, p, kept, kind)
            for running, way in itertools.product((None, p), B0_WAYS):
                with by(way):
                    _, _, per_image, batch = evonorm_b0._fwd(image, p, p, p, running, 1e-3)
                    evonorm_b0._bwd(image, image, p, p, p, running, per_image, batch, 1e-3, [True] * 4)
    for n in (3000, 20000):
        embedding._bwd(torch.randn(n, 8), torch.randint(0, 9, (n,)), 9, -1)
    logits, target, loss, stats = (
        torch.randn(4, 9001).bfloat16(),
        torch.zeros(4, dtype=torch.long),
        torch.empty(4),
        torch.empty(2, 4),
    )
    for weight, smoothing, softcap in ((None, 0.0, 0.0), (torch.rand(9001), 0.1, 30.0)):
        launch_rows(logits, target, weight, -100, smoothing, softcap, 1.0, loss=loss, stats=stats)
        launch_rows(logits, target, weight, -100, smoothing, softcap, 1.0, loss=loss, stats=stats, dlogits=logits)
        launch_rows(logits, target, weight, -100, smoothing, softcap, 1.0, stats=stats, dloss=loss, dlogits=logits)
    for kind in glu.ACTIVATIONS:
        glu.glu_fwd(x, x, kind)
        glu.glu_bwd(x, x, x, kind)
    q = torch.randn(2, 5, 8, 64).bfloat16()
    for style in rope.STYLES:
        table = torch.randn(1, 1, 8, 32 if style == "even_odd_to_halves" else 64)
        for backward in (False, True):
            rope._launch(q, q, table, table, q.clone(), q.clone(), style, backward)
    assert len(compiled) > 40


@pytest.mark.skipif(not (interpreting() or torch.cuda.is_available()), reason="runs the kernels themselves")
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("resident", [norm_by_group._RESIDENT, 1], ids=["resident", "in_steps"])
@pytest.mark.parametrize(("channels", "groups"), [(6, 2), (64, 32), (40, 1), (5, 5)])
def test_norms_of_images(channels, groups, resident, last, device, monkeypatch):
    """Groups in registers, in steps, or in tiles with sums between: the same numbers."""
    monkeypatch.setattr(norm_by_group, "_RESIDENT", resident)
    memory = torch.channels_last if last else torch.contiguous_format
    x = (torch.randn(2, channels, 9, 7, device=device) + 3).to(memory_format=memory).requires_grad_()
    w, b = (torch.randn(channels, device=device).requires_grad_() for _ in range(2))
    dy = torch.randn(2, channels, 9, 7, device=device).to(memory_format=memory)
    with torch.no_grad():
        y = torch.empty_like(x)
        stats = channel_norm.norm_fwd(x, y, groups, w, b, None, 1e-5, norm_formulas.GROUP_NORM_SWISH)
        dx, (dw, db) = channel_norm.norm_bwd(dy, x, groups, w, b, None, stats, norm_formulas.GROUP_NORM_SWISH)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = torch.nn.functional.silu(torch.nn.functional.group_norm(exact[0], groups, *exact[1:], 1e-5))
    gradients = torch.autograd.grad(expected, exact, dy.double())
    for ours, theirs in zip((y, dx, dw, db), (expected, *gradients), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4)
    assert y.stride() == dx.stride() == x.stride()


@pytest.mark.skipif(not (interpreting() or torch.cuda.is_available()), reason="runs the kernels themselves")
@pytest.mark.parametrize("kind", [norm_formulas.GROUP_NORM, norm_formulas.GROUP_NORM_SWISH, norm_formulas.EVONORM_S0])
@pytest.mark.parametrize(("channels", "groups", "tiles"), [(6, 2, (2, 1)), (40, 1, (32, 8))])
def test_groups_in_two_tiles(channels, groups, tiles, kind, device, monkeypatch):
    """As in one, but for how sums are rounded."""
    x, dy = (torch.randn(2, channels, 9, 7, device=device) + 3 for _ in range(2))
    w, b, v = (torch.randn(channels, device=device) for _ in range(3))
    found = []
    for first, rest in (tiles, (2 * tiles[0], 0)):
        given = {"RESIDENT": True, "BC": first, "REST": rest, "BS": 64, "LANES": 1024, "num_warps": 4}
        monkeypatch.setattr(norm_by_group, "options", lambda *_, given=given, **__: given)
        y = torch.empty_like(x)
        stats = channel_norm.norm_fwd(x, y, groups, w, b, v, 1e-5, kind)
        dx, sums = channel_norm.norm_bwd(dy, x, groups, w, b, v, stats, kind)
        found.append((y, stats, dx, *sums))
    for two, one in zip(*found, strict=True):
        assert (two - one).abs().max() <= 1e-5 * one.abs().max()


@pytest.mark.skipif(not (interpreting() or torch.cuda.is_available()), reason="runs the kernels themselves")
@pytest.mark.parametrize("way", ["by_group", "by_tile"])
def test_images_that_begin_unlike_the_rest(way, device, monkeypatch):
    """A border of zeros: every lane begins with one, and sees hundreds of other values."""
    steps = {"RESIDENT": False, "BC": 1, "REST": 0, "BS": 16, "LANES": 16, "num_warps": 1}
    monkeypatch.setattr(norm_by_group, "_RESIDENT", 1)
    monkeypatch.setattr(norm_by_group, "_steps", lambda *_: steps)
    x = torch.full((4, 1, 128, 128) if way == "by_group" else (4, 1, 512, 256), 255.0, device=device)
    x[:, :, 0] = 0
    if way == "by_tile":
        monkeypatch.setattr(norm_by_group, "options", lambda *_, **__: None)
        monkeypatch.setattr(images, "multiprocessors", lambda x: 0)
    stats = channel_norm.norm_fwd(x, torch.empty_like(x), 1, None, None, None, 1e-5, norm_formulas.GROUP_NORM)
    flat = x.double().flatten(1)
    torch.testing.assert_close(stats[0].double(), flat.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(stats[1].double(), (flat.var(1, unbiased=False) + 1e-5).rsqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", [128, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("loaded", [6, 8, 10, 12])
def test_warps_are_powers_of_two(n, loaded):
    """Of mixed dtypes too: x, gate and dy may have 2 or 4 bytes each."""
    *_, warps, _ = gated_rms_norm._plan(n, loaded, torch.empty(()))
    assert warps in (4, 8, 16, 32)


@pytest.mark.parametrize(("kib", "stages"), [(227, (3, 3)), (163, (3, 2)), (99, (2, 1)), (48, (1, 1))])
def test_loads_run_ahead_as_far_as_the_device_has_room(kib, stages, monkeypatch):
    """Hopper, Ampere, Ada, and one that says nothing: 4096 columns of gated_rms_norm, of add_rms_norm, in float32."""
    monkeypatch.setattr(launch, "shared_memory", lambda x: kib << 10)
    x = torch.empty(())
    assert gated_rms_norm._plan(4096, 12, x)[-1] == stages[0]
    assert row_norm._bwd_tile(4096, 12, False, x)[-1] == stages[1]


def test_results_may_be_written_to_in_place(device):
    """What an op returns is no view: ``y = op(x); y *= 2`` is common."""
    x, w = torch.randn(3, 5, 24, device=device, requires_grad=True), torch.randn(24, device=device, requires_grad=True)
    image = torch.randn(2, 8, 3, 4, device=device, requires_grad=True)
    table = torch.randn(9, 24, device=device, requires_grad=True)
    results = {
        "swiglu": swiglu(x, x), "swish": swish(x), "rms_norm": rms_norm(x, w, 1e-6, 0.0, False),
        "layer_norm": torch.ops.fx_fusion.layer_norm(x, w, w, 1e-5, False)[0],
        "gated": torch.ops.fx_fusion.gated_rms_norm(x, x, w, 1e-5, True, True, False, 1)[0],
        "group_norm": torch.ops.fx_fusion.group_norm(image, 2, None, None, 1e-5)[0],
        "embedding": torch.ops.fx_fusion.embedding(torch.tensor([[1, 2], [3, 4]], device=device), table, -1),
    }  # fmt: skip
    for name, y in results.items():
        assert not y._is_view(), name
        y.mul_(2).sum().backward()


@pytest.mark.skipif(not (interpreting() or torch.cuda.is_available()), reason="runs the kernels themselves")
@pytest.mark.parametrize("style", rope.STYLES)
def test_one_tensor_whose_positions_stand_before_its_heads(style, device):
    """As Llama 4 has its queries when complex numbers rotate them."""
    q = torch.randn(2, 5, 3, 8, device=device, requires_grad=True)
    cos, sin = torch.randn(2, 2, 5, 1, 4 if style == "even_odd_to_halves" else 8, device=device)
    turned, _ = rope.rope(q, None, cos, sin, style, "input", False)
    swapped, cos, sin = (t.transpose(1, 2).detach().contiguous() for t in (q, cos, sin))
    expected, _ = rope.rope(swapped.requires_grad_(), None, cos, sin, style, "input", False)
    torch.testing.assert_close(turned, expected.transpose(1, 2))
    (dq,), (dswapped,) = torch.autograd.grad(turned.sum(), q), torch.autograd.grad(expected.sum(), swapped)
    torch.testing.assert_close(dq, dswapped.transpose(1, 2))


@pytest.mark.parametrize("v", [1, 2**15, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1, 2**31 - 1, 2**31, 2**33])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ranked", [embedding._RANKED, 0], ids=["ranked", "sorted"])
def test_ids_in_order(ranked, dtype, v, device, monkeypatch):
    """In keys of 16, 32 and 64 bits, the least and the greatest id among them; equal ones as they come."""
    if ranked and not (interpreting() or device == "cuda"):
        pytest.skip("runs the kernel")
    if v > torch.iinfo(dtype).max:
        pytest.skip("no such ids")
    monkeypatch.setattr(embedding, "_RANKED", ranked)
    some = [torch.randint(0, v, (40,)), torch.tensor([0, v - 1, v // 2, 0, v - 1])]
    ids = torch.cat([*some, *some]).to(device, dtype)
    found, order, lowest = embedding._sorted(ids, v)
    expected, positions = torch.sort(ids.long(), stable=True)
    assert torch.equal(found.long() - lowest, expected)
    assert torch.equal(order.long(), positions)
    assert lowest + v <= torch.iinfo(found.dtype).max, "one more than the greatest id is looked up too"


@pytest.mark.parametrize("ranked", [embedding._RANKED, 0], ids=["ranked", "sorted"])
@pytest.mark.parametrize("grouped", [embedding._GROUPED, 0], ids=["pieces", "groups of pieces"])
@pytest.mark.parametrize("ids", ["uniform", "zipf", "one", "half", "strided"])
def test_gradients_of_tables_by_how_ids_repeat(ids, grouped, ranked, device, monkeypatch):
    """Each row is the sum of its gradients, whether a few ids have most of them or all are one; the same in every run."""
    monkeypatch.setattr(embedding, "_RANKED", ranked)
    monkeypatch.setattr(embedding, "_GROUPED", grouped)
    empty = torch.empty  # what is not written is not read
    monkeypatch.setattr(torch, "empty", lambda *size, **given: empty(*size, **given).fill_(-7))
    monkeypatch.setattr(embedding, "_shape", lambda n, h: {"PIECE": 8, "ROWS": 4, "BLOCK": 64, "STAGES": 1, "num_warps": 4})
    n = 700
    made = {
        "uniform": torch.randint(0, 40, (n,)), "one": torch.full((n,), 7), "zipf": zipf(n, 40, "cpu"),
        "half": torch.randint(0, 40, (n,)).where(torch.rand(n) < 0.5, 7),
        "strided": torch.randint(0, 40, (n, 2))[:, 1],
    }[ids].to(device)  # fmt: skip
    table, dy = torch.randn(40, 33, device=device, requires_grad=True), torch.randn(n, 33, device=device)
    first, again = (torch.autograd.grad(embedding.embedding(made, table, -1), table, dy)[0] for _ in range(2))
    assert torch.equal(first, again)
    exact = torch.zeros(40, 33, dtype=torch.float64, device=device).index_add_(0, made, dy.double())
    eager = torch.autograd.grad(F.embedding(made, table), table, dy)[0]
    assert (first - exact).abs().max() <= 2 * (eager - exact).abs().max() + 2 * torch.finfo(
        torch.float32
    ).eps * exact.abs().max()


def test_no_classes_are_an_error(device):
    """As in PyTorch, not whatever lies in the memory of the loss."""
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        cross_entropy(torch.randn(3, 0, device=device), torch.zeros(3, dtype=torch.long, device=device), None, -100, 0.0, 0.0, 1.0)
    assert cross_entropy(torch.randn(0, 0, device=device), torch.zeros(0, dtype=torch.long, device=device), None, -100, 0.0, 0.0, 1.0).shape == (0,)


@pytest.mark.skipif(not (interpreting() or torch.cuda.is_available()), reason="runs the kernels themselves")
@pytest.mark.parametrize(("weights", "scale", "smoothing"), [(1e5, 1.0, 0.0), (1e5, 1.0, 0.1), (1.0, 1e5, 0.0), (None, 1e5, 0.1), (1e-3, 1.0, 0.0)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_and_large_weights_of_classes_or_scales(weights, scale, smoothing, reduction, device):
    """Inverse frequencies as weights: the chunk of dl would overflow, dx and dW of eager are finite for a mean."""
    torch.manual_seed(0)
    x, w = torch.randn(20, 16, device=device) * 1e-2, torch.randn(40, 16, device=device) * 1e-2
    t = torch.randint(0, 40, (20,), device=device)
    of_classes = None if weights is None else (torch.rand(40, device=device) + 0.5) * weights
    if reduction == "sum":
        of_classes = None if of_classes is None else of_classes / weights * 1e-4  # the sum itself has to fit
        scale = min(scale, 1.0)
    grads = []
    for dtype in (torch.float16, torch.float64):
        a, b = (p.half().to(dtype).requires_grad_() for p in (x, w))
        if dtype == torch.float16:
            loss = linear_cross_entropy(a, b, None, t, of_classes, reduction, -100, smoothing, 0.0, scale, [True, True, False])[0]
        else:
            logits = torch.nn.functional.linear(a, b).half().double() * scale
            loss = F.cross_entropy(logits, t, None if of_classes is None else of_classes.double(), reduction=reduction, label_smoothing=smoothing)
        grads.append(torch.autograd.grad(loss, [a, b]))
    for ours, exact in zip(*grads, strict=True):
        assert ours.isfinite().all() == exact.half().isfinite().all()
        keep = exact.half().isfinite()
        assert ((ours.double() - exact).abs()[keep] <= 4e-3 * exact.abs().max().clamp(max=65504) + 1e-7).all()


def test_another_thread_launches_for_real_while_one_traces(device):
    import threading

    from fx_fusion.kernels.lib.launch import refuse_tracing

    seen = []

    def launch_there():
        try:
            refuse_tracing()
            seen.append("real")
        except NotTraceable:
            seen.append("traced")

    with traced():
        thread = threading.Thread(target=launch_there)
        thread.start()
        thread.join()
    assert seen == ["real"]
