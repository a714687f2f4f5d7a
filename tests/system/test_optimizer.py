"""``torch.compile(optimizer.step, backend="fx_fusion")``: Inductor's step, compiled once more when the learning rate first
changes and never again."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fx_fusion
from tests.helpers import slow_but

RATES = (1e-2, 5e-3, 2.5e-3, 1e-3, 7e-4)
OPTIMIZERS = [
    ("AdamW", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("RMSprop", {}),
    ("NAdam", {}),
]


def train(backend, name="AdamW", dtype=torch.float32, device="cpu", tensor_lr=False, **given):
    """Parameters after a step with each learning rate, and how often the step had been compiled by then."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)).to(device, dtype)
    lr = torch.tensor(RATES[0]) if tensor_lr else RATES[0]
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr, **given)
    counter = CompileCounterWithBackend(backend or "eager")
    step = torch.compile(optimizer.step, backend=counter) if backend else optimizer.step
    x, compiled = torch.randn(8, 16).to(device, dtype), []
    for rate in RATES:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        for group in optimizer.param_groups:
            if tensor_lr:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        step()
        compiled.append(counter.frame_count)
    return [p.detach() for p in model.parameters()], compiled


@pytest.mark.parametrize(("name", "given"), [*OPTIMIZERS[:2], *(pytest.param(*o, marks=pytest.mark.slow) for o in OPTIMIZERS[2:])])
def test_a_foreach_optimizer_is_not_compiled_for_every_learning_rate(name, given):
    """Inductor's is: AOTAutograd has Dynamo specialize on a float that a foreach op takes."""
    exact, _ = train(None, name, foreach=True, **given)
    ours, compiled = train("fx_fusion", name, foreach=True, **given)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    first = compiled[0]
    assert first >= 1
    assert compiled == [first, 2 * first, 2 * first, 2 * first, 2 * first], "once more at the first change, then never"


@pytest.mark.parametrize("given", [{"foreach": False}, {"tensor_lr": True}, {"fused": True}])
def test_the_other_steps_are_inductors(given):
    exact, _ = train(None, weight_decay=0.1, **given)
    ours, compiled = train("fx_fusion", weight_decay=0.1, **given)
    theirs, expected = train("inductor", weight_decay=0.1, **given)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
    assert compiled == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_changing_learning_rate_changes_no_number(dtype):
    """Bit for bit what Inductor makes of a constant one: the scalar is rounded once, to what the op computes in."""
    ours, _ = train("fx_fusion", dtype=dtype, foreach=True)
    theirs, _ = train("inductor", dtype=dtype, foreach=True)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def decayed(s):
    for _ in range(400):
        s = s * 0.999 + 0.001
    return s


EXPRESSIONS = {
    "quotient": lambda s, n: 1.1 / s,
    "negation": lambda s, n: -s - 1,
    "shared": lambda s, n: (lambda a: (a + 1) * (a - 2) / (a + 3))(2 * s + 5),
    "a large integer": lambda s, n: s * 10**20,
    "of a size": lambda s, n: s * n / (n + 1),
    "long": lambda s, n: decayed(s),
    "a power": lambda s, n: s**2 + s,
}


@pytest.mark.parametrize("name", slow_but([name for name in EXPRESSIONS if name != "long"], EXPRESSIONS))
def test_what_is_computed_of_a_changing_float(name):
    """To the last bit what Python makes of it."""
    torch._dynamo.reset()

    def function(tensors, s):
        return torch._foreach_mul(tensors, EXPRESSIONS[name](s, tensors[0].shape[0]))

    counter = CompileCounterWithBackend("fx_fusion")
    compiled = torch.compile(function, backend=counter)
    with fx_fusion.recording() as report:
        for i, s in enumerate((0.5, 0.21, 0.7, 3.3 if name == "a power" else -3.3, 1e-3)):  # Dynamo takes no power of -3.3
            tensors = [torch.rand(4 + (name == "of a size") * i, dtype=torch.float64)]
            assert torch.equal(compiled(tensors, s)[0], function(tensors, s)[0])
    assert "1 foreach call(s) take a changing float as a tensor" in str(report)
    assert name == "a power" or counter.frame_count == 2  # torch 2.11 keeps no float behind a power


def all_ops(tensors, others, s, in_place):
    """Every foreach op that takes a changing float, some tensors empty or without dims."""
    s, end = 1 - 0.3 * s, "_" if in_place else ""
    made = []
    for op, taken, given in (
        ("mul", (s,), {}), ("div", (s,), {}), ("add", (others,), {"alpha": s}), ("sub", (others,), {"alpha": s}),
        ("addcmul", (others, others), {"value": s}), ("addcdiv", (others, others), {"value": s}),
    ):  # fmt: skip
        mine = [t.clone() for t in tensors]
        results = getattr(torch, f"_foreach_{op}{end}")(mine, *taken, **given)
        made += mine if in_place else results
    return made


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_foreach_ops_take_a_changing_float(dtype, in_place):
    """Values and dtypes of eager, for any expression of the float."""
    torch._dynamo.reset()
    shapes = [(5, 3), (0, 4), (7,)] + ([()] if in_place or dtype == torch.float32 else [])
    tensors, others = ([torch.rand(s).add(0.5).to(dtype) for s in shapes] for _ in range(2))
    counter = CompileCounterWithBackend("fx_fusion")
    compiled = torch.compile(all_ops, backend=counter)
    with fx_fusion.recording() as report:
        for s in (0.5, 0.25, 0.7, -3.0, 1e-3):
            found, wanted = (f(tensors, others, s, in_place) for f in (compiled, all_ops))
            if s == 0.5 and torch.__version__ < "2.13":  # a constant: 2.11's Inductor drops the alpha of _foreach_sub
                continue
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    assert counter.frame_count == 2
    assert "6 foreach call(s) take a changing float as a tensor" in str(report)


@pytest.mark.parametrize("what", ["integers", "would widen", "fuel"])
def test_foreach_ops_that_keep_their_number(what, monkeypatch):
    """Integers have no such overload; a tensor would widen bf16 without dims; without fuel nothing is rewritten."""
    torch._dynamo.reset()
    if what == "fuel":
        monkeypatch.setenv("FX_FUSION_FUEL", "0")
    tensors = {"integers": torch.arange(3), "would widen": torch.rand(()).bfloat16(), "fuel": torch.rand(3)}
    compiled = torch.compile(lambda t, s: torch._foreach_mul([t], s)[0], backend="fx_fusion")
    with fx_fusion.recording() as report:
        for s in (0.5, 0.25, 0.7):
            t = tensors[what]
            torch.testing.assert_close(compiled(t, s), torch._foreach_mul([t], s)[0])
    assert "changing float" not in str(report)
