"""Norms of queries and keys that their rotation takes in, and those that it must not."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend

B, S, H, D = 2, 6, 4, 8
angles = torch.outer(torch.arange(S).float(), 1.0 / 100 ** (torch.arange(0, D, 2) / D))
cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
w, w_all = torch.randn(D, requires_grad=True), torch.randn(H * D, requires_grad=True)
projection = torch.randn(H * D, H * D, requires_grad=True)


def rotate(q, cos=cos, sin=sin):
    return q * cos + torch.cat((-q[..., D // 2 :], q[..., : D // 2]), dim=-1) * sin


def norm(x, w):
    """As Qwen3 writes it."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def each_head(x):
    return rotate(norm(F.linear(x, projection).view(-1, S, H, D), w).transpose(1, 2))


def as_gemma(x):
    q = F.linear(x, projection).view(-1, S, H, D).transpose(1, 2)
    wide = q.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return rotate((normed * (1.0 + w.float())).type_as(q))


def across_heads(x):
    """As OLMo 2."""
    return rotate(norm(F.linear(x, projection), w_all).view(-1, S, H, D).transpose(1, 2))


def text_and_image(x):
    """As Flux: normalized apart, rotated together."""
    q = F.linear(x, projection).unflatten(-1, (-1, D))
    q = torch.cat([F.rms_norm(q[:, :2], (D,), w), F.rms_norm(q[:, 2:], (D,), w)], dim=1)
    pairs = q.reshape(*q.shape[:-1], -1, 2)
    turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(3)
    return (q.float() * cos[None, :, None] + turned.float() * sin[None, :, None]).to(q.dtype)


def written_in_halves(x):
    """As Wan, across heads."""
    q = F.rms_norm(F.linear(x, projection), (H * D,), w_all, 1e-6).unflatten(2, (H, -1))
    a, b = q.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[None, :, None, 0::2], sin[None, :, None, 1::2]
    out = torch.empty_like(q)
    out[..., 0::2] = a * c - b * s
    out[..., 1::2] = a * s + b * c
    return out.type_as(q)


def as_complex(x):
    q = F.rms_norm(F.linear(x, projection).view(-1, S, H, D), (D,), w)
    table = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(q.float().reshape(*q.shape[:3], -1, 2)) * table[:, None]).flatten(3).type_as(q)


TAKEN = {f.__name__: (f, 1) for f in (each_head, as_gemma, across_heads, written_in_halves, as_complex)}
TAKEN["text_and_image"] = text_and_image, 2


def read_twice(x):
    q = norm(F.linear(x, projection).view(-1, S, H, D), w).transpose(1, 2)
    return rotate(q) + q


def normed_without_gradient(x):
    with torch.no_grad():
        q = norm(F.linear(x, projection).view(-1, S, H, D), w)
    return rotate(q.transpose(1, 2)) + w.sum()


def written_behind_the_norm(x):
    q = x.clone().view(-1, S, H, D)
    normed = norm(q, w)
    q.mul_(2)
    return rotate(normed.transpose(1, 2)) + q.transpose(1, 2)


def of_other_rows(x):
    """A row of the norm is half a head."""
    q = norm(F.linear(x, projection).view(-1, S, 2 * H, D // 2), w[: D // 2]).view(-1, S, H, D)
    return rotate(q.transpose(1, 2))


def in_another_order(x):
    """The norm is across the tokens of a head."""
    q = norm(F.linear(x, projection).view(-1, S, H, D).permute(0, 2, 3, 1), w[:S])
    return rotate(q.transpose(2, 3))


def scaled_in_place(x):
    """Nothing is normed."""
    q = F.linear(x, projection).view(-1, S, H, D).transpose(1, 2)
    q.mul_(0.5)
    return rotate(q)


LEFT = {
    f.__name__: f for f in (read_twice, normed_without_gradient, written_behind_the_norm, of_other_rows, in_another_order)
}


def steps(function, batches=(B,)):
    """Result and gradients as rewritten and in eager, and the report."""
    trained = [w, w_all, projection]
    compiled = torch.compile(function, backend=rewriting_backend(select="always", verify=True))
    with fx_fusion.recording() as report:
        for batch in batches:
            x = torch.randn(batch, S, H * D)
            if len(batches) > 1:
                torch._dynamo.mark_dynamic(x, 0)
            y, expected = compiled(x), function(x)
            dy = torch.randn_like(expected)
            ours, theirs = (torch.autograd.grad(t, trained, dy, allow_unused=True) for t in (y, expected))
            torch.testing.assert_close((y, *ours), (expected, *theirs), rtol=1e-4, atol=1e-5)
    return report


@pytest.mark.parametrize("batches", [(B,), (2, 3)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", TAKEN)
def test_norm_and_rotation_are_one_call(name, batches):
    function, calls = TAKEN[name]
    report = steps(function, batches)
    (graph,) = report.graphs
    assert graph.after.count("rms_norm_rope(") == calls, graph.after
    assert "fx_fusion.rms_norm(" not in graph.after
    assert report.count("rms_norm") == calls
    assert not graph.verified.skipped
    assert "with the norm in front of it" in str(report)


@pytest.mark.parametrize("name", LEFT)
def test_norms_that_something_else_needs(name):
    report = steps(LEFT[name])
    assert "rms_norm_rope" not in report.graphs[0].after
    assert report.count("rms_norm") == 1, str(report)
    assert report.count("rope") == 1


def test_rotation_of_what_is_written_in_place():
    report = steps(scaled_in_place)
    assert report.count("rope") == 1


def test_k_alone_has_a_norm():
    def both(x):
        q = F.linear(x, projection).view(-1, S, H, D).transpose(1, 2)
        k = norm(F.linear(x, projection).view(-1, S, H, D), w).transpose(1, 2)
        return torch.cat([rotate(q), rotate(k)])

    report = steps(both)
    assert report.graphs[0].after.count("rms_norm_rope(") == 1
    assert report.graphs[0].after.count("fx_fusion.rope(") == 1, report.graphs[0].after
