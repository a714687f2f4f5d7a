"""Test what a reduction has to know of its targets, in one launch: against formulas in float64."""

import pytest
import torch

from fx_fusion.kernels.logits import targets
from fx_fusion.kernels.logits.targets import totals_of

pytestmark = pytest.mark.kernel

V = 50


def given(kind, m):
    target = torch.randint(0, V, (m,), generator=torch.Generator().manual_seed(m))
    if kind == "some":
        target[::3] = -100
    if kind == "none":
        target[:] = -100
    if kind == "wrong":
        target[::5] = V + 7  # PyTorch's kernels raise; no memory behind the weights is read
    return target


@pytest.mark.parametrize("kind", ["all", "some", "none", "wrong"])
@pytest.mark.parametrize("m", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("how", ["mean", "weighted", "sum", "count", "weighted count"])
def test_sums(kind, m, how, device, monkeypatch):
    monkeypatch.setattr(targets, "_BLOCK", 64)
    target = given(kind, m)
    if kind == "wrong" and device == "cpu" and not targets.interpreting():
        pytest.skip("PyTorch raises")
    weight = torch.rand(2 * V)[::2] if "weighted" in how else None
    count = torch.tensor(17) if "count" in how else None
    found = totals_of(
        target.to(device), None if weight is None else weight.to(device), -100, mean=how in ("mean", "weighted"),
        count=None if count is None else count.to(device),
    )  # fmt: skip
    counts = target != -100
    known = counts & (target < V)
    number = counts.sum().item()
    weights = float(number) if weight is None else weight.double()[target[known]].sum().item()
    divisor = 17.0 if count is not None else 1.0 if how == "sum" else weights if number else float(max(m, 1))
    some = float(number > 0)
    expected = {"any": [some, some], "upstream": some / divisor if divisor else float("inf"), "divisor": divisor, "weights": weights, "number": number}
    for name, value in expected.items():
        made = getattr(found, name)
        torch.testing.assert_close(made.cpu().double(), torch.tensor(value, dtype=torch.float64), rtol=1e-5, atol=1e-6, msg=name)
        assert made.dtype == torch.float32


def test_a_kernel_and_torch_say_the_same(device):
    target, weight = given("some", 200).to(device), torch.rand(V, device=device)
    for of_classes in (None, weight):
        for mean, count in ((True, None), (False, None), (True, torch.tensor([3.5], device=device))):
            ours = totals_of(target, of_classes, -100, mean=mean, count=count)
            theirs = targets._with_torch(target, of_classes, -100, mean, count)
            for name in ("any", "upstream", "divisor", "weights", "number"):
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
