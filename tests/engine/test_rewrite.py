"""Test what a rewritten graph keeps: writes, views, grad modes, results apart."""

import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.options import parse
from fx_fusion.testing import rewriting_backend
from tests.helpers import rewritten, tiny_llama


def silu_mlp(x, w):
    return F.silu(x @ w) * (x @ w.t())


x, w = torch.randn(4, 8), torch.randn(8, 8)


def test_its_own_output_matches_nothing():
    """Rewriting a rewritten graph changes nothing."""
    from fx_fusion.backend import compile_graph

    parsed = parse(None, {"select": "always", "strict": True})
    second = []

    def again(gm, inputs, options):
        with fx_fusion.recording() as inner:
            compiled = compile_graph(gm, inputs, parsed, lambda gm, *_: gm.forward)
        second.append(inner)
        return compiled

    with fx_fusion.recording() as report:
        torch.compile(silu_mlp, backend=lambda gm, inputs: compile_graph(gm, inputs, parsed, again))(x, w)
    assert [s.status for s in report.sites] == ["fused"]
    assert "fx_fusion.swiglu" in second[0].graphs[0].before
    assert second[0].sites == []


def test_user_less_writes_survive():
    """What fx would call dead code: an in-place method whose result nobody uses."""
    buffer = torch.zeros(8)

    def function(x, w):
        buffer.copy_(x.mean(0))
        y = silu_mlp(x, w)
        y.masked_fill_(y > 1, 1.0)
        return y

    result, report = rewritten(function, x, w)
    report.assert_fused(swiglu=1)
    torch.testing.assert_close(buffer, x.mean(0))
    torch.testing.assert_close(result, silu_mlp(x, w).clamp(max=1.0))


def test_a_rewrite_that_does_not_fit_gives_its_nodes_back():
    """The weight comes after the first use of the sum: the op of both can't stand anywhere, one without the weight can."""

    def function(x, residual, weight):
        h = x + residual
        used = h * 2
        w = weight * 1
        return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)), used

    given = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    found, report = rewritten(function, *given)
    for ours, theirs in zip(found, function(*given), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sum(site.status == "fused" for site in report.sites) == 1
    assert "does not exist yet" in next(s.reason for s in report.sites if s.status == "declined")
    with_less, report = rewritten(function, *given, options={"fusions": ["-add_rms_norm"]})
    torch.testing.assert_close(with_less, found)
    report.assert_fused(rms_norm=1)


def test_a_number_that_changes_is_left_to_inductor():
    """An eps that the caller changes: two graphs, as without fx_fusion, not one a value."""
    compiled = torch.compile(lambda x, w, e: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + e)), backend=rewriting_backend())
    with fx_fusion.recording() as report:
        for e in (1e-6, 1e-3, 0.1, 0.2, 0.3, 0.4):
            compiled(torch.randn(3, 8), torch.randn(8), e)
    assert len(report.graphs) == 2
    assert "changes between calls" in next(s.reason for s in report.sites if s.status == "declined")


def test_a_view_in_a_pattern_is_that_view(monkeypatch):
    """Groups of two neighbors are not groups of four: a view matches one that makes the same shape of the same input."""
    from fx_fusion.fusion import registry
    from fx_fusion.fusion.declaration import Fusion, case

    def pairs(x):
        return x.view(x.shape[0], -1, 2).sigmoid().view(x.shape).tanh()

    fusion = Fusion(
        name="pairs", pattern=pairs, inputs={"x": "b n"}, emit=lambda editor, match: None,
        cases=(case("odd", b=3, n=8, bench=False),),
    )  # fmt: skip
    from fx_fusion.fusion.search import Search
    from fx_fusion.pipeline import check, find

    monkeypatch.setattr(registry, "all_fusions", lambda: (fusion,))
    for shape, fits in (((3, 4, 2), True), ((3, 2, 4), False)):
        reasons = []

        def backend(gm, inputs, reasons=reasons):
            from fx_fusion.graph.view import View

            view = View(gm.graph)
            candidates = list(find(Search(view)))
            check(candidates, view)
            reasons.extend(c.match.differs for c in candidates if c.match is not None)
            return gm.forward

        torch._dynamo.reset()
        torch.compile(lambda x, shape=shape: x.view(shape).sigmoid().view(x.shape).tanh(), backend=backend)(torch.randn(3, 8))
        assert [reason is None for reason in reasons] == [fits], reasons


def test_gradients_that_no_grad_hides_stay_hidden():
    def repeated(q, k, v):
        with torch.no_grad():
            k, v = (t.repeat_interleave(3, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    q, (k, v) = torch.randn(1, 6, 5, 16), (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in "kv")
    y, _ = rewritten(repeated, q, k, v)
    assert not y.requires_grad

    def cast(x, w):
        with torch.no_grad():
            x = x.float()
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    y, report = rewritten(cast, torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True), torch.randn(8))
    assert not y.requires_grad
    report.assert_fused(rms_norm=1)


def test_equal_calls_that_are_returned_are_two_tensors():
    def twice(x, w):
        return F.group_norm(x, 2, w, w), F.group_norm(x * 1, 2, w, w), F.group_norm(x * 1, 2, w, w)

    options = {"select": "always", "strict": True}
    with fx_fusion.recording() as report:
        found = torch.compile(twice, backend="fx_fusion", options=options)(torch.randn(2, 4, 3, requires_grad=True), torch.randn(4))
    report.assert_fused(group_norm=3)
    assert len({t.data_ptr() for t in found}) == 3


def test_what_writes_later_counts_without_matched_nodes():
    """repeat_kv takes nodes over from nobody, but saves other tensors than eager does."""

    def function(q, k, v):
        o = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        v.detach().mul_(0.5)
        return o

    gradients = []
    for f in (function, torch.compile(function, backend=rewriting_backend())):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, n, 4, 8, requires_grad=True) for n in (4, 2, 2))
        f(q * 1, k * 1, v * 1).pow(2).sum().backward()
        gradients.append([t.grad for t in (q, k, v)])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tensors_without_values():
    """A model on the meta device, as sizes are planned with."""
    with torch.device("meta"):
        model, ids = tiny_llama().to("meta"), torch.zeros(2, 16, dtype=torch.long)
        with fx_fusion.recording() as report:
            out = torch.compile(model, backend=rewriting_backend())(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
        out.loss.backward()
    report.assert_fused(linear_cross_entropy=1, causal_mask=2, rms_norm=1)
    assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape
