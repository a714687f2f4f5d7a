"""The scan of Mamba-2: transformers' own code, what only looks like it, how results lie, and how exact the kernels are."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fx_fusion
from fx_fusion.fusion.match import Match
from fx_fusion.fusion.search import Search
from fx_fusion.graph.view import View
from fx_fusion.kernels import mamba2_scan as kernels
from fx_fusion.kernels.mamba2_scan import mamba2_scan
from fx_fusion.ops.on_cpu import kernels_on_cpu
from fx_fusion.patterns import mamba2_scan as pattern
from fx_fusion.testing import rewriting_backend
from tests.helpers import reasons, rewritten, statuses

modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
if not hasattr(modeling, "mamba2_chunk_scan"):
    pytest.skip("this transformers writes the scan otherwise", allow_module_level=True)
scan = modeling.mamba2_chunk_scan


def operands(b=2, t=21, heads=4, p=8, groups=2, n=16, dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(seed)
    x, B, C = (torch.randn(b, t, k, w, generator=made).to(dtype) for k, w in ((heads, p), (groups, n), (groups, n)))
    dt = torch.randn(b, t, heads, generator=made).to(dtype)
    return x, dt, -torch.rand(heads, generator=made) * 3, B, C, torch.randn(heads, generator=made)


def scanned(x, dt, A, B, C, D, q=8, skip=True, **changes):
    return scan(x, dt.sigmoid() * 0.2, A, B, C, q, D=D if skip else None, **changes)


FIRES = {
    "with D": scanned,
    "without D": lambda *of: scanned(*of, skip=False),
    "one chunk": lambda *of: scanned(*of, q=32),
    "whole chunks": lambda *of: scanned(*of, q=7),
    "bias and softplus": lambda x, dt, A, B, C, D: scan(x, dt, A, B, C, 8, D=D, dt_bias=D, dt_softplus=True),
    "limits of a step": lambda *of: scanned(*of, dt_limit=(0.01, 0.1)),
    "then a product": lambda *of: scanned(*of).reshape(2, 21, -1) @ torch.ones(32, 3),
}
LEFT = {
    "the last state is returned": lambda *of: scanned(*of, return_final_states=True)[0],
    "a first state is given": lambda *of: scanned(*of, initial_states=torch.ones(2, 4, 8, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", FIRES)
def test_fires(how, dtype):
    of = operands(dtype=dtype)
    y, report = rewritten(FIRES[how], *of)
    report.assert_fused(mamba2_scan=1)
    torch.testing.assert_close(y, FIRES[how](*of))


def test_a_last_state_that_is_read_is_declined():
    _, report = rewritten(lambda *of: scanned(*of, return_final_states=True), *operands())
    assert "is also" in reasons(report, "mamba2_scan")
    assert "fused" not in statuses(report, "mamba2_scan")


def test_a_first_state_is_a_near_miss():
    y, report = rewritten(LEFT["a first state is given"], *operands())
    assert statuses(report, "mamba2_scan") == ["near"]
    torch.testing.assert_close(y, LEFT["a first state is given"](*operands()))


def test_more_channels_are_declined():
    _, report = rewritten(scanned, *operands(p=72))
    assert "72 channels a head; the kernels take up to 64" in reasons(report, "mamba2_scan")


def captured(function, *of):
    """The graph that Dynamo captures."""
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return gm

    torch.compile(function, backend=keep)(*of)
    return graphs[0].graph


@pytest.mark.parametrize("how", ["with D", "whole chunks"])
def test_a_change_to_any_call_is_seen(how):
    """One call after another: negated, or given another number. None of these graphs ends with the scan."""
    graph = captured(FIRES[how], *operands())
    (match,) = pattern.find(Search(View(graph)))
    of_site, taken = sorted(match.nodes, key=list(graph.nodes).index), []

    def still_fits():
        return any(isinstance(f, Match) and f.root is match.root for f in pattern.find(Search(View(graph))))

    for node in of_site:
        users = [user for user in node.users if user in match.nodes]
        if users and "example_value" in node.meta and node.meta["example_value"].dtype != torch.bool:
            with graph.inserting_after(node):
                negated = graph.call_function(torch.neg, (node,))
            negated.meta = dict(node.meta)
            users[0].replace_input_with(node, negated)
            taken += [node.name] if still_fits() else []
            users[0].replace_input_with(negated, node)
            graph.erase_node(negated)
        before = node.args
        for i, item in enumerate(before):
            if isinstance(item, int) and not isinstance(item, bool):
                node.args = (*before[:i], item + 1, *before[i + 1 :])
                taken += [f"{node.name}[{i}]"] if still_fits() else []
                node.args = before
    assert len(of_site) > 50
    assert not taken


def test_a_difference_is_named():
    graph = captured(scanned, *operands())
    (match,) = pattern.find(Search(View(graph)))
    states = next(n for n in graph.nodes if n.target is torch.cat)
    states.args = (states.args[0][::-1],)  # the last state first
    (found,) = pattern.find(Search(View(graph)))
    assert (found.node, found.reason) == (states.args[0][0], "expected zeros_like, found einsum")


@pytest.mark.parametrize(
    "read", [lambda y: y, lambda y: y[:, 1:], lambda y: y.reshape(2, -1), lambda y: (y.reshape(-1), y.reshape(-1))]
)
def test_how_the_result_lies(read):
    """The last chunk is cut off: eager returns a part of a longer tensor, and copies it where it is reshaped."""
    of = operands()
    y, report = rewritten(lambda *of: read(scanned(*of)), *of)
    report.assert_fused(mamba2_scan=1)
    expected = read(scanned(*of))
    torch.testing.assert_close(y, expected)
    if isinstance(y, torch.Tensor):
        assert y.stride() == expected.stride()
    else:
        assert y[0].data_ptr() != y[1].data_ptr()


def test_under_activation_checkpointing():
    """Dynamo leaves what nobody reads in the body of a checkpoint: the last state."""
    of = [v.requires_grad_() for v in operands()]
    function = lambda *of: checkpoint(scanned, *of, use_reentrant=False).sin()  # noqa: E731
    found, report = rewritten(function, *of)
    report.assert_fused(mamba2_scan=1)
    expected = function(*of)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(y.square().sum(), of) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Layer(nn.Module):
    """Projection, convolution and scan, as a mixer has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(24, 32 + 64 + 4)
        self.conv = nn.Conv1d(96, 96, 4, groups=96, padding=3)
        self.A, self.D = nn.Parameter(torch.rand(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        rows, dt = self.inner(x).split([96, 4], -1)
        rows = nn.functional.silu(self.conv(rows.mT)[..., : x.shape[1]]).mT
        x, B, C = rows.split([32, 32, 32], -1)
        x, B, C = x.view(*x.shape[:2], 4, 8), B.view(*B.shape[:2], 2, 16), C.view(*C.shape[:2], 2, 16)
        return scan(x, dt, -self.A.exp(), B, C, 8, D=self.D, dt_softplus=True).reshape(*x.shape[:2], -1).tanh()


def test_lengths_that_change():
    """Batches of other lengths: from the second one on, sizes are symbols."""
    layer = Layer()
    compiled = torch.compile(layer, backend=rewriting_backend())
    with fx_fusion.recording() as report:
        for t in (21, 37, 9, 63):
            x = torch.randn(2, t, 24)
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    assert len(report.graphs) == 2
    report.assert_fused(mamba2_scan=2, causal_conv1d=2)


@pytest.mark.parametrize("autocast", [False, True])
def test_behind_a_convolution(autocast):
    """The convolution leaves channels innermost, the scan reads them so: nothing is copied in between."""
    layer, x = Layer(), torch.randn(2, 21, 24)
    compiled = torch.compile(layer, backend=rewriting_backend())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), fx_fusion.recording() as report:
        found = compiled(x)
        expected = layer(x)
    report.assert_fused(mamba2_scan=1, causal_conv1d=1)
    added = [line for line in report.diff().splitlines() if line.startswith("+")]
    assert not [line for line in added if ".contiguous(" in line or "pad(" in line]
    runs = {"ours": (layer, found), "eager": (layer, expected), "exact": (exact := copy.deepcopy(layer).double(), exact(x.double()))}
    of = {how: [y, *torch.autograd.grad(y.double().square().sum(), list(of.parameters()))] for how, (of, y) in runs.items()}
    for ours, eager, right in zip(*of.values(), strict=True):
        error, usual = ((t.double() - right).norm() for t in (ours, eager))
        assert error <= 2 * usual + 2 * torch.finfo(ours.dtype).eps * right.norm()


def test_a_convolution_that_others_read_too_keeps_its_layout():
    layer = Layer()

    def function(x):
        rows = nn.functional.silu(layer.conv(x.mT)[..., : x.shape[1]])
        a, B, C = rows.mT.split([32, 32, 32], -1)
        a, B, C = a.view(2, 21, 4, 8), B.view(2, 21, 2, 16), C.view(2, 21, 2, 16)
        return scan(a, torch.ones(2, 21, 4), -layer.A.exp(), B, C, 8), rows.view(2, -1)

    x = torch.randn(2, 21, 96)
    found, report = rewritten(function, x)
    report.assert_fused(mamba2_scan=1, causal_conv1d=1)
    torch.testing.assert_close(found, function(x))


@pytest.mark.kernel
@pytest.mark.parametrize("t", [1, 63, 130])
def test_small_steps_behind_large_ones(t):
    """Sums of steps reach −1500 where single ones are 1e-3: differences of float32 sums would be off by 1e-4."""
    x, dt, _, B, C, D = operands(b=1, t=t, heads=2, groups=1)
    dt, A = torch.where(torch.arange(t)[None, :, None] % 40 < 20, 1.0, 1e-5) * dt.abs(), torch.tensor([-80.0, -1.0])
    exact = torch.no_grad()(scanned_exactly)(x, dt, A, B, C, D)
    with torch.no_grad(), kernels_on_cpu(True):
        found = mamba2_scan(x, dt, A, B, C, D, 8)
    eager = scan(x, dt, A, B, C, 8, D=D)
    error, usual = ((y.double() - exact).abs().max() for y in (found, eager))
    assert error <= 2 * usual + 2 * torch.finfo(torch.float32).eps * exact.abs().max()


def scanned_exactly(x, dt, A, B, C, D):
    """Token by token, in float64."""
    x, dt, A, B, C, D = (v.double() for v in (x, dt, A, B, C, D))
    B, C = (v.repeat_interleave(x.shape[2] // v.shape[2], 2) for v in (B, C))
    state, made = x.new_zeros(*x[:, 0].shape, B.shape[3]), []
    for now in range(x.shape[1]):
        step = dt[:, now, :, None, None]
        state = torch.exp(A[:, None, None] * step) * state + step * x[:, now, ..., None] * B[:, now, :, None]
        made.append((state * C[:, now, :, None]).sum(-1) + D[:, None] * x[:, now])
    return torch.stack(made, 1)


@pytest.mark.kernel
def test_tiles_of_a_gpu_with_less_shared_memory(monkeypatch):
    """Chunks of 32 tokens and columns in blocks: the same sums in another order."""
    monkeypatch.setattr(kernels, "shared_memory", lambda x: 48 << 10)
    x, dt, *others = operands(b=1, t=70, heads=2, groups=1, n=40)
    of = [v.requires_grad_() for v in (x, dt.abs() * 0.1, *others)]
    assert kernels.mamba2_scan_plan(8, 40, of[0], True).Q == 32
    runs = []
    for on in (True, False):
        with kernels_on_cpu(on):
            y = mamba2_scan(*of, 8)
            runs.append((y.detach(), *torch.autograd.grad(y.square().sum(), of)))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-3)


@pytest.mark.kernel
@pytest.mark.parametrize("b", [0, 2])
def test_no_tokens(b):
    of = [v.requires_grad_() for v in operands(b=b, t=0 if b else 5)]
    with kernels_on_cpu(True):
        y = mamba2_scan(*of, 8)
        gradients = torch.autograd.grad(y.sum(), of)
    assert [g.shape for g in gradients] == [v.shape for v in of]
    assert not any(g.any() for g in gradients)
