"""Flash-linear-attention's gated delta rule inside a graph, by fla's own kernels: the same bits as outside."""

import pytest
import torch

import fx_fusion

pytestmark = pytest.mark.gpu
fla = pytest.importorskip("fla.ops")

CALLS = {
    "norms in the kernel": {"use_qk_l2norm_in_kernel": True},
    "no norms, a scale": {"scale": 0.3},
    "the last state": {"output_final_state": True, "use_qk_l2norm_in_kernel": True},
    "documents": {"use_qk_l2norm_in_kernel": True, "cu_seqlens": (0, 100, 356, 512)},
}


@pytest.mark.parametrize("rule", ["chunk_gated_delta_rule", "chunk_kda"])
@pytest.mark.parametrize("how", CALLS)
def test_the_same_bits(how, rule):
    torch.manual_seed(0)
    b, t = (1, 512) if "documents" in how else (2, 300)
    made = [torch.randn(b, t, heads, 64, device="cuda") for heads in (4, 4, 8)]
    channels = (64,) if rule == "chunk_kda" else ()
    made += [-torch.rand(b, t, 8, *channels, device="cuda"), torch.rand(b, t, 8, device="cuda")]
    of = [x.bfloat16().requires_grad_() for x in made]
    named = dict(CALLS[how])
    if "cu_seqlens" in named:
        named["cu_seqlens"] = torch.tensor(named["cu_seqlens"], device="cuda")

    def function(q, k, v, g, beta):
        y, state = getattr(fla, rule)(q, k, v, g.float(), beta, **named)
        return y if state is None else (y, state)

    def run(call):
        results = call(*of)
        results = results if isinstance(results, tuple) else (results,)
        return *results, *torch.autograd.grad(sum(y.float().square().sum() for y in results), of)

    expected = run(function)
    with fx_fusion.recording() as report:
        found = run(torch.compile(function, backend="fx_fusion", options={"strict": True}))
    assert len(report.graphs) == 1
    assert report.graphs[0].front_ends == ("flash-linear-attention",)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
