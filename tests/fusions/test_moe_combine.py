"""Layers of experts: rows of tokens go to their experts and back, in the spellings of models, with the router's gradient."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  defines transformers::grouped_mm_fallback

import fx_fusion
from fx_fusion.backend import compile_graph
from fx_fusion.kernels import moe_down
from fx_fusion.kernels.moe_dispatch import moe_combine, moe_dispatch
from fx_fusion.kernels.moe_down import Gate, _gate_bwd, _gate_fwd
from fx_fusion.options import parse
from fx_fusion.patterns import moe_combine as patterns_of_combine
from fx_fusion.testing import Run, rewriting_backend, worst_excess
from tests.helpers import by_kernels, reasons, rewritten, statuses

T, H, INNER, E, K = 13, 16, 24, 5, 2


def inputs(dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    made = {
        "x": torch.randn(T, H, generator=draw), "scores": torch.randn(T, E, generator=draw),
        "up": torch.randn(E, 2 * INNER, H, generator=draw) / 4, "down": torch.randn(E, H, INNER, generator=draw) / 5,
        "up_bias": torch.randn(E, 2 * INNER, generator=draw), "down_bias": torch.randn(E, H, generator=draw),
    }  # fmt: skip
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in made.items()}


def routed(scores, k=K):
    weights, ids = scores.float().softmax(-1).topk(k, -1)
    return weights.to(scores.dtype), ids


def groups(ids, experts=E):
    keys, perm = torch.sort(ids.reshape(-1))
    counts = torch.histc(keys.float(), bins=experts, min=0, max=experts - 1)
    return keys, perm, torch.cumsum(counts, 0, dtype=torch.int32)


def back(rows, perm, k=K):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0), device=perm.device)
    return rows[inverse].view(-1, k, rows.shape[1]).sum(dim=1)


def product(x, weight, offs):
    """Torch's own takes bfloat16 only under compile; transformers has an op for the rest."""
    if x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight, offs=offs)
    return torch.ops.transformers.grouped_mm_fallback(x, weight, offs)


def gated(h):
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def plain(x, scores, up, down, **_):
    """As transformers writes it."""
    weights, ids = routed(scores)
    keys, perm, ends = groups(ids)
    h = product(x[perm // K], up.transpose(1, 2), offs=ends)
    y = product(gated(h), down.transpose(1, 2), offs=ends)
    return back(y * weights.reshape(-1)[perm].unsqueeze(-1), perm).to(x.dtype)


def biased(x, scores, up, down, up_bias, down_bias):
    """As gpt-oss: biases, added in place."""
    weights, ids = routed(scores)
    keys, perm, ends = groups(ids)
    h = product(x[perm // K], up.transpose(1, 2), offs=ends)
    h.add_(up_bias[keys])
    y = product(gated(h), down.transpose(1, 2), offs=ends)
    y.add_(down_bias[keys])
    return back(y * weights.reshape(-1)[perm].unsqueeze(-1), perm).to(x.dtype)


def of_this_rank(x, scores, up, down, up_bias, down_bias, local=E - 2):
    """As expert parallelism has it: the last experts are another rank's, and grouped_mm leaves their rows as they are."""
    weights, ids = routed(scores)
    weights, ids = weights.masked_fill(ids >= local, 0.0), ids.clamp(max=local)
    keys, perm, ends = groups(ids, local)
    elsewhere = (keys >= local).unsqueeze(-1)
    keys.clamp_(max=local - 1)
    rows = x[perm // K]
    rows.masked_fill_(elsewhere, 0.0)
    h = product(rows, up[:local].transpose(1, 2), offs=ends)
    h.add_(up_bias[:local][keys])
    h = gated(h.masked_fill(elsewhere, 0.0))
    y = product(h, down[:local].transpose(1, 2), offs=ends)
    y.add_(down_bias[:local][keys])
    y = y.masked_fill(elsewhere, 0.0)
    return back(y * weights.reshape(-1)[perm].unsqueeze(-1), perm).to(x.dtype)


def exact(x, scores, up, down, up_bias=None, down_bias=None, *, local=E):
    """Each token through all experts, in float64."""
    weights, ids = routed(scores)
    h = torch.einsum("th,eih->tei", x, up)
    h = gated(h if up_bias is None else h + up_bias)
    y = torch.einsum("tei,ehi->teh", h, down)
    y = y if down_bias is None else y + down_bias
    chosen = torch.gather(y, 1, ids.unsqueeze(-1).expand(-1, -1, H))
    return (chosen * weights.masked_fill(ids >= local, 0.0).unsqueeze(-1)).sum(1)


def differentiated(function, given):
    """The result and the gradients of what it takes."""
    y = function(**given)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    return Run({"out0": y.detach(), **{f"d{n}": t.grad for n, t in given.items() if t.grad is not None}})


LAYERS = {
    "plain": (plain, exact, ("x", "scores", "up", "down")),
    "biased": (biased, exact, ("x", "scores", "up", "down", "up_bias", "down_bias")),
    "of this rank": (of_this_rank, lambda **t: exact(**t, local=E - 2), ("x", "scores", "up", "down", "up_bias", "down_bias")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_is_as_accurate_as_eager(layer, dtype):
    function, oracle, names = LAYERS[layer]
    given = {n: t for n, t in inputs(dtype).items() if n in names}
    same = {n: t.detach().double().requires_grad_() for n, t in given.items()}
    with fx_fusion.recording() as report:
        ours = differentiated(torch.compile(function, backend=rewriting_backend()), given)
    report.assert_fused(moe_dispatch=1, moe_combine=1)
    again = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
    name, excess = worst_excess(ours, differentiated(function, again), differentiated(oracle, same), dtype)
    assert excess <= 1, f"{name} uses {excess:.2f} times the allowed error"


def products(function, given):
    """The grouped products of a rewritten graph, and what each reads of the rewritten graph."""
    graphs = []

    def keep(gm, *_):
        graphs.append(gm)
        return gm.forward

    options = parse(None, {"select": "always", "strict": True})
    torch.compile(function, backend=functools.partial(compile_graph, options=options, rest=keep))(**given)
    return [node for node in graphs[0].graph.nodes if "grouped_mm" in str(node.target) or "moe_down" in str(node.target)]


@pytest.mark.parametrize("layer", LAYERS)
def test_the_routers_weight_goes_before_the_last_product(layer):
    function, _, names = LAYERS[layer]
    first, last = products(function, {n: t for n, t in inputs().items() if n in names})
    assert last.args[0].target in (torch.mul, operator.mul)
    assert [user.name for user in last.users if "moe_combine" in str(user.target)]
    assert len(last.users) == 1
    assert "moe_dispatch" in str(first.args[0].target)


GATES = {
    "SwiGLU": (gated, Gate()),
    "of gpt-oss": (
        lambda h: (h[..., 1::2].clamp(-2.0, 2.0) + 1) * (g := h[..., ::2].clamp(max=2.0)) * torch.sigmoid(g * 1.702),
        Gate(interleaved=True, limit=2.0, alpha=1.702, shift=1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("count", "columns"), [(0, 8), (1, 1), (7, 24), (5, 300), (3, 1500)])
@pytest.mark.parametrize("name", GATES)
def test_the_kernels_of_gates(name, count, columns, device):
    function, gate = GATES[name]
    h, scale = torch.randn(count, 2 * columns), torch.randn(count, 1)
    da, given = torch.randn(count, columns), (h.requires_grad_(), scale.requires_grad_())
    expected = function(h) * scale
    ours = by_kernels(_gate_fwd, h.detach(), scale.detach(), gate, device=device)
    torch.testing.assert_close(ours, expected.detach())
    dh, dscale, again = by_kernels(_gate_bwd, da, h.detach(), scale.detach(), gate, device=device)
    torch.testing.assert_close(again, expected.detach())
    torch.testing.assert_close((dh, dscale), torch.autograd.grad(expected, given, da), rtol=1e-4, atol=1e-4)


def _of_gpt_oss(h):
    gate, up = h[..., ::2], h[..., 1::2]
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _layer(gate):
    def layer(x, scores, up, down):
        weights, ids = routed(scores)
        keys, perm, ends = groups(ids)
        y = product(gate(product(x[perm // K], up.mT, offs=ends)), down.mT, offs=ends)
        return back(y * weights.reshape(-1)[perm].unsqueeze(-1), perm)

    return layer


@pytest.mark.parametrize(
    ("gate", "fused"),
    [
        (gated, True), (_of_gpt_oss, True), (lambda h: F.silu(h[:, :INNER]) * h[:, INNER:], True),
        (lambda h: h[:, :INNER] * F.silu(h[:, INNER:]), False), (lambda h: F.gelu(h[:, :INNER]) * h[:, INNER:], False),
        (lambda h: F.silu(h[:, :INNER]) * h[:, :INNER], False), (lambda h: (y := gated(h)) * (y > 0), False),
        (lambda h: F.silu(h[:, ::2].clamp(max=3.0)) * h[:, 1::2], False),
        (lambda h: F.silu(h[:, ::2].clamp(max=3.0)) * h[:, 1::2].clamp(-3.0, 4.0), False),
    ],
)  # fmt: skip
def test_gates_in_one_kernel_with_the_weight(gate, fused):
    given = {n: t for n, t in inputs(torch.bfloat16).items() if not n.endswith("bias")}
    again = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
    layer = _layer(gate)
    assert any("moe_down" in str(node.target) for node in products(layer, given)) is fused
    ours = differentiated(torch.compile(layer, backend=rewriting_backend()), given)
    for name, theirs in differentiated(layer, again).values.items():
        torch.testing.assert_close(ours.values[name], theirs, rtol=0.05, atol=0.05)


SPELLINGS = {
    "argsort": lambda rows, ids: rows[torch.argsort(torch.argsort(ids))].view(-1, K, H).sum(1),
    "stable sort": lambda rows, ids: back(rows, torch.sort(ids, stable=True)[1]),
    "method": lambda rows, ids: back(rows, ids.sort().indices),
    "descending": lambda rows, ids: back(rows, torch.sort(ids, descending=True)[1]),
    "index_select": lambda rows, ids: rows.index_select(0, ids.argsort().argsort()).reshape(T, K, H).sum(-2),
    "written to their positions": lambda rows, ids: _put(rows, torch.argsort(ids)),
    "added to zeros": lambda rows, ids: torch.zeros(T, H).index_add(0, torch.argsort(ids) // K, rows),
    "added to zeros in place": lambda rows, ids: rows.new_zeros(T, H).index_add_(0, torch.argsort(ids) // K, rows),
    "weighted behind it": lambda rows, ids: back(rows * ids.float()[:, None], torch.sort(ids)[1]),
}
LEFT = {
    "written to some positions": lambda rows, ids: _put(rows, torch.argsort(ids).clamp(min=1)),
    "written to before": lambda rows, ids: _put(rows, torch.argsort(ids), before=lambda new: new[:1].add_(1.0)),
    "written to behind": lambda rows, ids: _put(rows, torch.argsort(ids), behind=lambda new: new[:1].add_(1.0)),
    "added to ones": lambda rows, ids: torch.ones(T, H).index_add(0, torch.argsort(ids) // K, rows),
    "added twice": lambda rows, ids: torch.zeros(T, H).index_add(0, torch.argsort(ids) // K, rows, alpha=2),
    "added to more tokens": lambda rows, ids: torch.zeros(T + 1, H).index_add(0, torch.argsort(ids) // K, rows),
    "added by any integers": lambda rows, ids: torch.zeros(T, H).index_add(0, ids // K, rows),
    "no inverse": lambda rows, ids: rows[torch.argsort(ids)].view(-1, K, H).sum(1),
    "any integers": lambda rows, ids: rows[ids].view(-1, K, H).sum(1),
    "the sum of all": lambda rows, ids: rows[torch.argsort(torch.argsort(ids))].view(-1, K, H).sum(),
    "over columns": lambda rows, ids: rows[torch.argsort(torch.argsort(ids))].view(-1, K, H).sum(2),
    "other rows": lambda rows, ids: rows[torch.argsort(torch.argsort(ids[:6]))].view(-1, K, H).sum(1),
    "halves of rows": lambda rows, ids: rows[torch.argsort(torch.argsort(ids))].view(-1, 2 * K, H // 2).sum(1),
    "another inverse": lambda rows, ids: _another(rows, torch.argsort(ids)),
    "written twice": lambda rows, ids: _twice(rows, torch.argsort(ids)),
    "the inverse of descending": lambda rows, ids: rows[torch.argsort(torch.argsort(ids), descending=True)].view(-1, K, H).sum(1),
}


def _put(rows, positions, before=lambda new: None, behind=lambda new: None):
    """As torchtitan writes it."""
    unsorted = torch.zeros(T * K, H)
    before(unsorted)
    unsorted[positions] = rows
    behind(unsorted)
    return unsorted.reshape(-1, K, H).sum(dim=1)


def _another(rows, perm):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0)).flip(0)
    return rows[inverse].view(-1, K, H).sum(1)


def _twice(rows, perm):
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    inverse[0] = 0
    return rows[inverse].view(-1, K, H).sum(1)


rows, ids = torch.randn(T * K, H), torch.randint(0, T * K, (T * K,))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fires(spelling):
    y, report = rewritten(SPELLINGS[spelling], rows, ids)
    report.assert_fused(moe_combine=1)
    torch.testing.assert_close(y, SPELLINGS[spelling](rows, ids))


@pytest.mark.parametrize("spelling", LEFT)
def test_is_left_alone(spelling):
    y, report = rewritten(LEFT[spelling], rows, ids)
    assert "fused" not in statuses(report, "moe_combine")
    torch.testing.assert_close(y, LEFT[spelling](rows, ids))


def _norm_behind(x, scores, up, down):
    weights, ids = routed(scores)
    keys, perm, ends = groups(ids)
    y = F.rms_norm(product(gated(product(x[perm // K], up.mT, offs=ends)), down.mT, offs=ends), (H,))
    return back(y * weights.reshape(-1)[perm].unsqueeze(-1), perm)


def _read_elsewhere(x, scores, up, down):
    weights, ids = routed(scores)
    keys, perm, ends = groups(ids)
    y = product(gated(product(x[perm // K], up.mT, offs=ends)), down.mT, offs=ends)
    return back(y * weights.reshape(-1)[perm].unsqueeze(-1), perm) + y.square().mean()


@pytest.mark.parametrize("function", [_norm_behind, _read_elsewhere])
def test_a_weight_stays_where_experts_outputs_are_read(function):
    given = {n: t for n, t in inputs().items() if not n.endswith("bias")}
    ours, report = rewritten(function, **given)
    report.assert_fused(moe_combine=1, moe_dispatch=1)
    torch.testing.assert_close(ours, function(**given))
    last = products(function, given)[-1]
    assert "mul" not in str(last.args[0].target) or last.args[0].args[0].target is F.silu


def test_many_experts_a_token_are_declined():
    many = torch.randint(0, 99, (65 * 2,))
    _, report = rewritten(lambda rows: rows[torch.argsort(torch.argsort(many))].view(-1, 65, 4).sum(1), torch.randn(130, 4))
    assert "65 experts a token; the kernel sums up to 64 rows" in reasons(report, "moe_combine")


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    given = {n: (t[:tokens] if n in ("x", "scores") else t) for n, t in inputs().items() if not n.endswith("bias")}
    y, _ = rewritten(plain, **given)
    torch.testing.assert_close(y, plain(**given))


def test_all_tokens_go_to_one_expert_and_ties():
    given = {n: t for n, t in inputs().items() if not n.endswith("bias")}
    given["scores"] = torch.zeros(T, E)
    y, report = rewritten(plain, **given)
    report.assert_fused(moe_dispatch=1, moe_combine=1)
    torch.testing.assert_close(y, plain(**given))


def test_second_derivatives():
    perm = torch.randperm(T * K)
    x = torch.randn(T, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(T * K, 3, dtype=torch.float64, requires_grad=True)
    given = perm, torch.argsort(perm), None, K
    assert torch.autograd.gradgradcheck(lambda x: moe_dispatch(x, *given).square(), (x,))
    assert torch.autograd.gradgradcheck(lambda y: moe_combine(y, *given, None).square(), (y,))


def _in_float32(x, scores, up, down):
    with torch.autocast("cpu", torch.bfloat16):
        return plain(x, scores, up, down)


def test_float32_weights_under_autocast_are_a_near_miss():
    given = {n: t for n, t in inputs().items() if not n.endswith("bias")}
    _, report = rewritten(_in_float32, **given)
    assert 'options={"experts": "autocast"} casts them as autocast does' in reasons(report, "moe_combine")


def test_float32_weights_in_autocasts_dtype_where_asked_for():
    given = {n: t for n, t in inputs().items() if not n.endswith("bias")}
    again = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
    with fx_fusion.recording() as report:
        ours = differentiated(torch.compile(_in_float32, backend=rewriting_backend(experts="autocast")), given)
    report.assert_fused(moe_sort=1, moe_dispatch=1, moe_combine=1)
    assert "2 grouped product(s) of float32 weights are in autocast's dtype, as options ask for" in str(report)
    assert "near" not in statuses(report, "moe_combine")
    for name, exactly in differentiated(_in_float32, again).values.items():
        assert ours.values[name].dtype == exactly.dtype
        unit = exactly.abs().max()
        torch.testing.assert_close(ours.values[name] / unit, exactly / unit, rtol=0, atol=0.02)


# -- what looks alike and is not ---------------------------------------------------------------------------------------
def of_rows(tail):
    """A layer whose last rows, before they go back, are ``tail(y, w, bias, keys, perm)``."""

    def layer(x, scores, up, down, down_bias):
        weights, ids = routed(scores)
        keys, perm, ends = groups(ids)
        y = product(gated(product(x[perm // K], up.mT, offs=ends)), down.mT, offs=ends)
        return back(tail(y, weights.reshape(-1)[perm].unsqueeze(-1), down_bias, keys), perm)

    return layer


def _changed_keys(y, w, b, keys):
    keys[0] = 4
    return (y + b[keys]) * w


def _clamped_through_a_view(y, w, b, keys):
    keys.view(-1).clamp_(max=2)
    return (y + b[keys]) * w


TAILS = {
    "the bias has no weight": lambda y, w, b, keys: y * w + b[keys],
    "one weight for both, one for the product": lambda y, w, b, keys: (y * w + b[keys]) * w,
    "the bias of hidden rows": lambda y, w, b, keys: (y.masked_fill((keys >= 3).unsqueeze(-1), 0.0) + b[keys]) * w,
    "a mask in other words": lambda y, w, b, keys: y.masked_fill((keys <= 1).unsqueeze(-1), 0.0) * w,
    "a mask that is written": lambda y, w, b, keys: y.masked_fill((keys >= 3).logical_not_().unsqueeze(-1), 0.0) * w,
    "two masks": lambda y, w, b, keys: y.masked_fill((keys >= 3)[:, None], 0.0).masked_fill((keys >= 2).unsqueeze(-1), 0.0) * w,
    "written keys": _changed_keys,
    "keys written through a view": _clamped_through_a_view,
    "clamped keys": lambda y, w, b, keys: (y + b[:3][keys.clamp(max=2)]) * w,
    "one weight for all rows": lambda y, w, b, keys: y * w.mean(0, keepdim=True),
    "one weight for all rows, and a bias": lambda y, w, b, keys: (y + b[keys]) * w.mean(0, keepdim=True),
    "a weight of truth": lambda y, w, b, keys: y * (w > 0.3),
    "a weight of integers": lambda y, w, b, keys: y * keys.unsqueeze(-1),
    "twice the bias": lambda y, w, b, keys: torch.add(y, b[keys], alpha=2) * w,
    "changed in place, twice": lambda y, w, b, keys: y.add_(b[keys]).mul_(w),
    "half a bias": lambda y, w, b, keys: (y + b[keys] * 0.5) * w,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TAILS)
def test_rows_are_what_eager_makes_them(name, dtype):
    given = {n: t for n, t in inputs(dtype).items() if n != "up_bias"}
    again = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
    with fx_fusion.recording() as report:
        ours = differentiated(torch.compile(of_rows(TAILS[name]), backend=rewriting_backend()), given)
    report.assert_fused(moe_combine=1)
    for key, theirs in differentiated(of_rows(TAILS[name]), again).values.items():
        unit = theirs.abs().max().clamp(min=1)
        torch.testing.assert_close(ours.values[key] / unit, theirs / unit, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)


def test_a_chain_of_calls_in_place_is_read():
    given = {n: t for n, t in inputs().items() if n != "up_bias"}

    def chain(y, w, b, keys):
        y.add_(b[keys])
        y.mul_(w)
        return y

    last = products(of_rows(chain), given)[-1]
    assert last.args[0].target in (torch.mul, operator.mul)


def test_ids_that_are_written_behind_the_sort():
    def layer(x, ids, weights, up, down, bias):
        keys, perm, ends = groups(ids)
        h = product(x[perm // K], up.mT, offs=ends)
        ids.fill_(0)
        y = product(gated(h), down.mT, offs=ends) + bias[keys]
        return back(y * weights[perm].unsqueeze(-1), perm)

    made = inputs()
    ids, rest = torch.randint(0, E, (T * K,)), (torch.rand(T * K), *(made[n] for n in ("up", "down", "down_bias")))
    expected = layer(made["x"], ids.clone(), *rest)
    y, report = rewritten(layer, made["x"], ids.clone(), *rest)
    report.assert_fused(moe_combine=1)
    torch.testing.assert_close(y, expected)


def test_biases_are_exact_under_autocast():
    given = inputs()

    def layer(**tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return biased(**tensors)

    y, report = rewritten(layer, **given)
    report.assert_fused(moe_combine=1)
    torch.testing.assert_close(y, layer(**given), rtol=1e-5, atol=1e-5)


def test_weights_of_float16_stay_behind():
    """A weight above 1 might overflow in front of the product."""
    given = {n: t for n, t in inputs(torch.float16).items() if not n.endswith("bias")}
    *_, last = products(plain, given)
    assert last.args[0].target not in (torch.mul, operator.mul) or last.args[0].args[0].target is F.silu


@pytest.mark.parametrize("dynamic", [True, None])
def test_numbers_of_tokens_that_change_compile_no_graph_of_their_own(dynamic):
    counts = []

    def layer(x, scores, up, down):
        weights, ids = routed(scores)
        keys, perm = torch.sort(ids.reshape(-1))
        experts = up.shape[0]
        counted = torch.histc(keys.float(), bins=experts, min=0, max=experts - 1)
        ends = torch.cumsum(counted, 0, dtype=torch.int32)
        y = product(gated(product(x[perm // K], up.mT, offs=ends)), down.mT, offs=ends)
        return back(y * weights.reshape(-1)[perm].unsqueeze(-1), perm)

    backend = rewriting_backend()
    compiled = torch.compile(layer, backend=lambda gm, ins: counts.append(1) or backend(gm, ins), dynamic=dynamic)
    for tokens in (13, 14, 15, 40):
        made = inputs()
        given = (torch.randn(tokens, H), torch.randn(tokens, E), made["up"], made["down"])
        torch.testing.assert_close(compiled(*given), layer(*given))
    assert len(counts) == (1 if dynamic else 2)


@pytest.mark.parametrize("layer", LAYERS)
def test_verify_compares_every_site_but_the_sort(layer):
    function, _, names = LAYERS[layer]
    given = {n: t for n, t in inputs(torch.bfloat16).items() if n in names}
    with fx_fusion.recording() as report:
        differentiated(torch.compile(function, backend=rewriting_backend(verify="first")), given)
    checked = 3 if layer == "biased" else 2  # the table of biases, too
    assert f"verified in 1 call(s): {checked} checks of sites" in str(report)
    assert ("it makes integers alone" in str(report)) is (layer != "of this rank")


def test_verify_finds_a_wrong_layer(monkeypatch):
    """Weights that are lost on the way."""
    given = {n: t for n, t in inputs(torch.bfloat16).items() if not n.endswith("bias")}
    monkeypatch.setattr(patterns_of_combine, "_product_of", lambda editor, scaled, root: editor.call(
        torch.ones_like, (scaled.scales[0],), {"requires_grad": False}, like=root))  # fmt: skip
    with pytest.raises(fx_fusion.VerificationError, match="moe_combine"):
        torch.compile(plain, backend=rewriting_backend(verify="first"))(**given)


def test_frozen_experts_cost_no_gradient(monkeypatch):
    """As under LoRA: the products for their gradients are not computed."""
    given = {n: t for n, t in inputs(torch.bfloat16).items() if not n.endswith("bias")}
    frozen = {n: t.detach() if n in ("up", "down") else t for n, t in given.items()}
    again = {n: t.detach().clone().requires_grad_(n not in ("up", "down")) for n, t in given.items()}
    products = []
    monkeypatch.setattr(moe_down, "_weight_gradient", lambda *args: products.append(args[-1]) or args[1].new_empty(0))
    ours = differentiated(torch.compile(plain, backend=rewriting_backend()), frozen)
    assert products == [False]
    for name, theirs in differentiated(plain, again).values.items():
        torch.testing.assert_close(ours.values[name], theirs, rtol=0.05, atol=0.05)
