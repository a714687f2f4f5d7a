"""Test what only a GPU can show: offsets beyond 2^31, the device guard, CUDA graphs, real sizes."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._dynamo.utils import ReinplaceCounters

import fx_fusion
import fx_fusion.fusion.registry as registry
from fx_fusion.fusion.declaration import case
from fx_fusion.fusion.pattern import reference_of
from fx_fusion.kernels import linear_rows
from fx_fusion.kernels.cross_entropy import cross_entropy
from fx_fusion.kernels.embedding import embedding
from fx_fusion.kernels.lib.plan import Plan
from fx_fusion.kernels.linear_cross_entropy import linear_cross_entropy
from fx_fusion.kernels.logits.logit_chunks import chunk_plan
from fx_fusion.kernels.rms_norm import rms_norm
from fx_fusion.kernels.swiglu import swiglu
from fx_fusion.rewrite import returned_logits
from fx_fusion.testing import Run, make_inputs, rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import OF_INDUCTOR
from tests.system.test_optimizer import train
from tests.zoo import batch, build

pytestmark = pytest.mark.gpu
LARGE = pytest.mark.xdist_group("most of a GPU's memory")  # one after the other, in one process
registry.all_fusions()


@pytest.mark.parametrize(
    "fusion",
    [f for f in registry.all_fusions() if f.name not in OF_INDUCTOR],
    ids=lambda fusion: fusion.name,
)
def test_every_fusion_through_inductor(fusion):
    """Not the rewritten graph alone: its kernels launched by what Inductor writes."""
    given = next((c for c in fusion.cases if c.name == "odd"), fusion.cases[0])
    statics = {**fusion.variants[0], **given.statics}
    function = reference_of(fusion, statics)
    inputs = make_inputs(fusion, given, statics, torch.bfloat16, "cuda")
    options = {"select": "always", "strict": True, "fusions": [fusion.name]}
    compiled = torch.compile(function, backend="fx_fusion", dynamic=False, options=options)
    ReinplaceCounters.clear()
    frozen = ("cos", "sin", *fusion.frozen)
    with fx_fusion.recording() as report, torch._inductor.config.patch(force_disable_caches=True):  # a hit counts nothing
        fused = run(compiled, inputs, frozen=frozen)
    assert report.count(fusion.name) == 1, str(report)
    assert not ReinplaceCounters.get_total_missed(), "Inductor copies what a kernel writes to"
    eager, oracle = run(function, inputs, frozen=frozen), run_oracle(function, inputs, frozen=frozen)
    name, used = worst_excess(fused, eager, oracle, torch.bfloat16)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


@LARGE
def test_more_than_2_to_the_31_elements():
    rows = 2**31 // 8192 + 64
    x = torch.randn(rows, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(8192, device="cuda", dtype=torch.bfloat16)
    y = rms_norm(x, w, 1e-6, 0.0, True)
    torch.testing.assert_close(y[-2:], F.rms_norm(x[-2:], (8192,), w, 1e-6), rtol=1e-2, atol=1e-2)
    y.backward(torch.ones((), device="cuda", dtype=torch.bfloat16).expand(y.shape))
    tail = x.detach()[-2:].float().requires_grad_()
    F.rms_norm(tail, (8192,), None, 1e-6).sum().backward()
    torch.testing.assert_close(x.grad[-2:].float(), tail.grad, rtol=2e-2, atol=2e-3)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(x, x)[-1], F.silu(x[-1]) * x[-1], rtol=1e-2, atol=1e-2)


ROWS = {"m": 262147, "n": 8192}  # a prime: one dim
IMAGES = {"b": 36, "c": 64}
HUGE = [
    *[(name, ROWS, {}) for name in ("layer_norm", "add_layer_norm", "add_rms_norm", "gated_rms_norm", "swiglu", "geglu", "swish")],
    ("log_probs_entropy", {"m": 16787, "v": 128256}, {}),
    *[(name, {**IMAGES, "m": 10**6}, {"x": order}) for name in ("group_norm", "group_norm_swish") for order in ("b c ...", "b ... c")],
    *[("evonorm_s0", {**IMAGES, "h": 1000, "w": 1000}, {"x": order}) for order in ("b c h w", "b h w c")],
]  # fmt: skip


def last_rows(name, sizes, order, device):
    """Compute everything, both ways, and compare the last two rows (images) with what they are by themselves."""
    fusion = registry.fusion_named(name)
    statics = fusion.variants[0]
    function = reference_of(fusion, statics)
    groups = {"groups": 8} if "groups" in fusion.inputs else {}  # more than there are multiprocessors, in all images
    inputs = make_inputs(fusion, case("huge", order=order, scalars=groups, **sizes), statics, torch.bfloat16, device)
    rows = next(iter(inputs.values())).shape[0]
    cut = [n for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.shape[0] == rows]
    leaves = {
        n: t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in inputs.items()
    }
    compiled = torch.compile(function, backend=rewriting_backend(fusions=[name]), dynamic=False)
    with fx_fusion.recording() as report:
        outs = compiled(**leaves)
    assert report.count(name) == 1, str(report)
    outs = outs if isinstance(outs, tuple) else (outs,)
    assert max(t.numel() for t in (*outs, *leaves.values()) if isinstance(t, torch.Tensor)) > 2**31 or device == "cpu"
    dys = [torch.randn_like(o) for o in outs]
    trained = [n for n in cut if leaves[n].requires_grad]
    found = {f"out{i}": o.detach()[-2:] for i, o in enumerate(outs)}
    for n, gradient in zip(trained, torch.autograd.grad(outs, [leaves[n] for n in trained], dys), strict=True):
        found[f"d{n}"] = gradient[-2:]
    ends, dys = {n: t.detach()[-2:] if n in cut else t for n, t in inputs.items()}, [dy[-2:] for dy in dys]
    exact = run_oracle(function, ends, dys)
    compared = Run({n: exact.values[n] for n in found})  # not the parameters' gradients: they are sums over all rows
    name, used = worst_excess(Run(found), run(function, ends, dys), compared, torch.bfloat16)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


@LARGE
@pytest.mark.parametrize(("name", "sizes", "order"), HUGE, ids=lambda given: given if isinstance(given, str) else "")
def test_the_last_rows_of_more_than_2_to_the_31_elements(name, sizes, order):
    last_rows(name, sizes, order, "cuda")


@LARGE
def test_an_embedding_of_more_than_2_to_the_31_elements():
    ids = torch.randint(0, 1000, (262147,), device="cuda")
    table = torch.randn(1000, 8192, device="cuda", requires_grad=True)
    y = embedding(ids, table, -1)
    assert torch.equal(y[-2:], table[ids[-2:]])
    (gradient,) = torch.autograd.grad(y, table, torch.ones((), device="cuda").expand(y.shape))
    assert torch.equal(gradient, ids.bincount(minlength=1000).float()[:, None].expand_as(gradient))


@LARGE
def test_cross_entropy_of_more_than_2_to_the_31_logits():
    m, v = 17000, 128256
    logits = torch.randn(m, v, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, v, (m,), device="cuda")
    loss = cross_entropy(logits, target, None, -100, 0.0, 0.0, 1.0)
    torch.testing.assert_close(
        loss[-4:], F.cross_entropy(logits[-4:].float(), target[-4:], reduction="none"), rtol=1e-4, atol=1e-4
    )
    loss.sum().backward()
    row = logits.detach()[-1:].float().requires_grad_()
    F.cross_entropy(row, target[-1:], reduction="sum").backward()
    torch.testing.assert_close(logits.grad[-1:].float(), row.grad, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_generation_that_transformers_compiles(family, mode):
    model = build(family).cuda().eval()
    ids = batch()["input_ids"].cuda()
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "cache_implementation": "static"}
    expected = model.generate(ids, **options, disable_compile=True)
    chosen = transformers.CompileConfig(backend="fx_fusion", mode=mode, fullgraph=False)
    with fx_fusion.recording() as report:
        for _ in range(3):
            assert torch.equal(model.generate(ids, **options, compile_config=chosen), expected)
    assert report.graphs


def test_cuda_graphs_through_reduce_overhead():
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def norm(x):
        return w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    options = {"select": "always", "strict": True, "triton.cudagraphs": True}  # what mode="reduce-overhead" stands for
    run = torch.compile(norm, backend="fx_fusion", options=options)
    for _ in range(4):
        x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(run(x).clone(), norm(x), rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_other_device():
    x = torch.randn(8, 64, device="cuda:1", requires_grad=True)
    y = rms_norm(x, None, 1e-6, 0.0, False)
    assert y.device == x.device
    y.sum().backward()
    torch.testing.assert_close(y, F.rms_norm(x, (64,), None, 1e-6))


TRACED = (
    "rms_norm",
    "add_layer_norm",
    "gated_rms_norm",
    "group_norm_swish",
    "evonorm_s0",
    "evonorm_b0",
    "embedding",
    "swiglu",
)


@pytest.mark.parametrize("name", [*TRACED, "evonorm_b0 by tile"])
def test_inductor_sees_the_kernels(name):
    """No call into Python, no clone of an operand: the launches are the only kernels, but for a few of Inductor's."""
    from torch._inductor.utils import run_and_get_code

    from fx_fusion.kernels.norms.evonorm_b0_by_channel import channel_plan

    name, _, by_tile = name.partition(" ")
    fusion = registry.fusion_named(name)
    statics = fusion.variants[0]
    case = next(c for c in fusion.cases if c.name in ("odd", "two_elements"))
    inputs = make_inputs(fusion, case, statics, torch.bfloat16, "cuda")
    function = functools.partial(fusion.pattern, **statics)
    options = {"select": "always", "strict": True, "fusions": [name]}
    compiled = torch.compile(function, backend="fx_fusion", options=options, dynamic=False)
    with channel_plan.instead(None) if by_tile else contextlib.nullcontext():
        _, code = run_and_get_code(run, compiled, inputs)
    assert not any("torch.ops.fx_fusion" in c for c in code)
    assert not any("clone" in c for c in code)


@pytest.mark.parametrize("name", ["group_norm", "group_norm_swish", "evonorm_s0", "evonorm_b0"])
def test_channels_last_images_are_copied_nowhere(name):
    """A kernel that writes to a tensor which Inductor takes to be used elsewhere gets a copy of it."""
    fusion = registry.fusion_named(name)
    sizes, order = ({"m": 1024}, "b ... c") if "m" in fusion.dims else ({"h": 32, "w": 32}, "b h w c")
    images = case(
        "last", b=8, c=320, scalars={"groups": 32} if "groups" in fusion.inputs else {}, order={"x": order}, **sizes
    )
    inputs = make_inputs(fusion, images, fusion.variants[0], torch.bfloat16, "cuda")
    weight = torch.randn(8, 320, 1, 1, device="cuda", dtype=torch.bfloat16)

    def function(**inputs):
        y = fusion.pattern(**inputs, **fusion.variants[0])
        return F.conv2d(y[0] if isinstance(y, tuple) else y, weight)

    options = {"select": "always", "strict": True, "fusions": [name]}
    compiled = torch.compile(function, backend="fx_fusion", options=options, dynamic=False)
    ReinplaceCounters.clear()
    with fx_fusion.recording() as report, torch._inductor.config.patch(force_disable_caches=True):  # a hit counts nothing
        run(compiled, inputs)
    assert report.count(name) == 1, str(report)
    assert not ReinplaceCounters.get_total_missed()


@LARGE
def test_images_of_more_than_2_to_the_31_elements():
    from fx_fusion.kernels.evonorm_b0 import evonorm_b0
    from fx_fusion.kernels.evonorm_s0 import evonorm_s0
    from fx_fusion.kernels.group_norm import group_norm

    n, c, side = 36, 60, 1000
    x = torch.randn(n, c, side, side, device="cuda", dtype=torch.bfloat16)
    w, b, v = (torch.randn(c, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    last, w4, b4, v4 = x[-1:].float(), *(p.float().view(1, -1, 1, 1) for p in (w, b, v))
    with torch.no_grad():
        y = group_norm(x, 4, w, b, 1e-5)
        torch.testing.assert_close(y[-1:].float(), F.group_norm(last, 4, w.float(), b.float()), rtol=2e-2, atol=2e-2)
        y = evonorm_s0(x, 4, v, w, b, 1e-5, 0)
        std = last.reshape(1, 4, -1).var(-1, unbiased=False).add(1e-5).sqrt().repeat_interleave(c // 4, 1).view(1, c, 1, 1)
        expected = last * torch.sigmoid(v4 * last) / std * w4 + b4
        torch.testing.assert_close(y[-1:].float(), expected, rtol=2e-2, atol=2e-2)
        y, var = evonorm_b0(x, v, w, b, None, 1e-3)
        torch.testing.assert_close(var, torch.ones_like(var), rtol=1e-2, atol=1e-2)
    y = group_norm(x.requires_grad_(), 4, w, b, 1e-5)
    (dx,) = torch.autograd.grad(y, x, torch.ones((), device="cuda", dtype=torch.bfloat16).expand(y.shape))
    tail = last.requires_grad_()
    (expected,) = torch.autograd.grad(F.group_norm(tail, 4, w.float(), b.float()).sum(), tail)
    torch.testing.assert_close(dx[-1:].float(), expected, rtol=2e-2, atol=2e-2)


def test_embedding_gradients_are_the_same_in_every_run():
    ids = torch.randint(0, 50, (20000,), device="cuda")
    table = torch.randn(50, 96, device="cuda", requires_grad=True)
    dy = torch.randn(20000, 96, device="cuda")
    first, again = (torch.autograd.grad(embedding(ids, table, -1), table, dy)[0] for _ in range(2))
    assert torch.equal(first, again)
    expected = torch.zeros(50, 96, device="cuda", dtype=torch.float64).index_add_(0, ids, dy.double())
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("v", [50257, 70000])
def test_a_table_whose_ids_are_many(v):
    """Sorted in 16 or 32 bits, by what Inductor writes; half of them are one."""
    ids = torch.randint(0, v, (20000,), device="cuda")
    ids[:10000] = v - 1
    table = torch.randn(v, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(20000, 96, device="cuda", dtype=torch.bfloat16)
    options = {"select": "always", "strict": True, "fusions": ["embedding"]}
    compiled = torch.compile(F.embedding, backend="fx_fusion", options=options, dynamic=False)
    found = torch.autograd.grad(compiled(ids, table), table, dy)[0].double()
    exact = torch.zeros(v, 96, device="cuda", dtype=torch.float64).index_add_(0, ids, dy.double())
    torch.testing.assert_close(found, exact, rtol=2**-8, atol=1e-4)


def test_attention_with_a_causal_mask_is_cudnns():
    fusion = registry.fusion_named("attention")
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    compiled = torch.compile(fusion.pattern, backend="fx_fusion", options={"strict": True, "select": "always"})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = compiled(q, k, v)
    torch.testing.assert_close(out, fusion.pattern(q, k, v), rtol=2e-2, atol=2e-2)
    assert any("cudnn" in e.key.lower() for e in profile.key_averages())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_outside_that_keep_logits_are_as_accurate(dtype, monkeypatch):
    """What a loss outside takes of a wide head: the gradient of each row is not known before its loss."""
    m, h, v = 1000, 1152, 32000
    monkeypatch.setattr(returned_logits, "_FEWEST_LOGITS", {"cuda": 1})
    kept, run_kept = [], linear_rows._kept
    monkeypatch.setattr(linear_rows, "_kept", lambda *given: kept.append(1) or run_kept(*given))
    head = torch.compile(lambda x, weight: F.linear(x, weight), backend="fx_fusion", options={"strict": True})
    inputs = {"x": torch.randn(m, h, device="cuda").to(dtype), "weight": torch.randn(v, h, device="cuda").to(dtype) / 32}
    target = torch.randint(0, v, (m, 1), device="cuda")

    def outside(x, weight):
        return (head(x, weight).float() * 0.7).log_softmax(-1).gather(-1, target)[:, 0].clone()

    def eager(x, weight):
        return torch.log_softmax((x @ weight.t()).to(torch.promote_types(x.dtype, torch.float32)) * 0.7, -1).gather(-1, target)[:, 0]

    name, used = worst_excess(run(outside, inputs), run(eager, inputs), run_oracle(eager, inputs), dtype)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"
    assert kept == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [1, 2, 4, 6])
def test_linear_cross_entropy_in_chunks_is_as_accurate(chunks, dtype):
    """Up to four chunks dW is rounded to 16 bits after each: still twice the error of eager at most."""
    m, h, v = 1536, 256, 4096
    x, weight = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, h), (v, h)))
    inputs = {"x": x / 16, "weight": weight, "target": torch.randint(0, v, (m,), device="cuda")}

    def fused(x, weight, target):
        needs = [True, True, False]
        return linear_cross_entropy(x, weight, None, target, None, "mean", -100, 0.0, 0.0, 1.0, needs, False)[0]

    def eager(x, weight, target):
        return F.cross_entropy((x @ weight.t()).float() if x.dtype != torch.float64 else x @ weight.t(), target)

    with chunk_plan.instead(Plan(rows=m // chunks, rounded_chunks=4)):
        ours = run(fused, inputs)
    name, used = worst_excess(ours, run(eager, inputs), run_oracle(eager, inputs), dtype)
    assert used <= 1, f"{name} uses {used:.2f} times the allowed error"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_foreach_optimizer_under_a_schedule(dtype):
    """Parameters on the GPU, the learning rate a tensor on the CPU: Inductor's numbers, one compile for all rates."""
    ours, compiled = train("fx_fusion", dtype=dtype, device="cuda", weight_decay=0.1)
    theirs, _ = train("inductor", dtype=dtype, device="cuda", weight_decay=0.1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    assert compiled[1:] == [2 * compiled[0]] * 4
