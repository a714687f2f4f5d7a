"""Bounds of a tensor's elements: they hold, and nothing is said of what is not known."""

import math

import pytest
import torch

from fx_fusion.graph.ranges import bounds_of
from fx_fusion.graph.view import View

BF16, F16, I64, BOOL = torch.bfloat16, torch.float16, torch.int64, torch.bool


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(shape).to(dtype)


def found(function, *inputs):
    """Of what a function returns, as Dynamo captures it."""
    seen = []

    def backend(gm, examples):
        (result,) = gm.graph.output_node().args[0]
        seen.append(bounds_of(View(gm.graph), result))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return seen[0]


KNOWN = {
    "arange": (lambda: torch.arange(10), (0, 10)),
    "arange down": (lambda: torch.arange(1 - 8, 1, dtype=torch.int32), (-7, 1)),
    "arange by steps": (lambda: torch.arange(3, 20, 4), (3, 20)),
    "ones and zeros": (lambda: torch.cat([torch.ones(3), torch.zeros(2)]), (0, 1)),
    "a filled one": (lambda: torch.full((2,), -3.5), (-3.5, -3.5)),
    "slopes of bloom": (lambda: torch.pow(torch.full((), 0.5), torch.arange(1, 9, dtype=torch.int32)), (0.5**9, 0.5)),
    "slopes of mpt": (lambda: 1.0 / torch.pow(2, torch.arange(1, 9).float() * (8 / 8)), (2.0**-9, 0.5)),
    "distances": (lambda: torch.arange(8)[None] - torch.arange(8)[:, None], (-8, 8)),
    "alibi": (lambda: -0.5 * (torch.arange(8)[None] - torch.arange(8)[:, None]).abs().view(1, 8, 8), (-4, 0)),
    "a product of both signs": (lambda: (torch.arange(8) - 4) * torch.arange(-3, 3)[:, None], (-12, 12)),
    "a mask of numbers": (lambda m: (1.0 - m.float()) * -1e4, (-1e4, 0), tensor(2, 8, dtype=BOOL)),
    "what a where chooses": (lambda m: torch.where(m, 2.0, torch.zeros(8)), (0, 2), tensor(8, dtype=BOOL)),
    "what is filled": (lambda m: torch.zeros(8).masked_fill(m, -7.0), (-7, 0), tensor(8, dtype=BOOL)),
    "an integer of the user's": (lambda m: m[:, None].expand(2, 3, 8).float(), (-(2.0**63), 2.0**63), tensor(2, 8, dtype=I64)),
    "arange with an end by name": (lambda: torch.arange(-5, end=0), (-5, 0)),
    "a number that is cut": (lambda: torch.full((4,), 0.5).long(), (0, 1)),
    "integers of a power below 1": (lambda: torch.pow(torch.full((3,), 2), torch.arange(-3, 0)), (0, 1)),
    "a running sum": (lambda: torch.cumsum(torch.ones(2, 8), -1), (1, 8)),
    "a running sum of booleans": (lambda m: m.cumsum(-1) - 1, (-1, 7), tensor(2, 8, dtype=BOOL)),
    "a triangle": (lambda: torch.full((4, 4), 2.0).triu(1), (0, 2)),
}
UNKNOWN = {
    "a float of the user's": (lambda x: x * 2, tensor(8)),
    "infinity": (lambda: torch.zeros(4).masked_fill(torch.ones(4, dtype=BOOL), -math.inf),),
    "the lowest number": (lambda: torch.full((4,), torch.finfo(torch.float32).min),),
    "a quotient by a range with 0": (lambda: 1 / torch.arange(-2, 3).float(),),
    "a root of negative numbers": (lambda: torch.arange(-2, 3).float() ** 0.5,),
    "a power beyond all numbers": (lambda: torch.pow(2.0, torch.arange(1000)),),
    "an integer in float16": (lambda m: m.to(F16), tensor(2, 8, dtype=I64)),
    "the lowest number in bfloat16": (lambda m: (1 - m.float()) * torch.finfo(BF16).min, tensor(8, dtype=BOOL)),
    "a quotient by what is cut to 0": (lambda: 1.0 / torch.full((4,), 0.5).long(),),
    "a quotient by what is rounded to 0": (lambda: 1 / torch.full((4,), 1e-25, dtype=F16).float(),),
    "a quotient by a power that is rounded to 0": (
        lambda: 1 / torch.pow(torch.full((), 0.5, dtype=F16), torch.arange(1, 64)).float(),
    ),
    "a quotient by what is left of a sum": (lambda: 1 / (torch.full((4,), 1e8) + 1 - 1e8),),
    "a root of the least integer": (lambda m: (m.abs() + 1).float() ** 0.5, tensor(8, dtype=I64)),
    "integers beyond float16 times a small number": (lambda: torch.arange(100000) * torch.full((1,), 0.01, dtype=F16),),
    "a quotient of the same": (lambda: torch.arange(100000) / torch.full((1,), 10.0, dtype=F16),),
    "uninitialized memory": (lambda: torch.empty(8),),
    "bits of another dtype": (lambda m: m.view(torch.float32), tensor(8, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known(name):
    function, wanted, *inputs = KNOWN[name]
    assert found(function, *inputs) == pytest.approx(wanted)


@pytest.mark.parametrize("name", KNOWN)
def test_they_hold(name):
    function, (least, most), *inputs = KNOWN[name]
    values = function(*(torch.randint(0, 2, i.shape).to(i.dtype) for i in inputs)).double()
    assert least - 1e-6 * abs(least) <= values.min()
    assert values.max() <= most + 1e-6 * abs(most)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name):
    function, *inputs = UNKNOWN[name]
    assert found(function, *inputs) is None


def test_what_is_written_to():
    """Finite when it is made, and not when it is read."""

    def function(m):
        bias = torch.zeros(8)
        bias[m] = -math.inf
        return bias + 1

    assert found(function, tensor(8, dtype=BOOL)) is None


@pytest.mark.parametrize("write", [
    lambda bias, m: bias.view(2, 4).masked_fill_(m.view(2, 4), -math.inf),
    lambda bias, m: bias[:4].fill_(-math.inf),
    lambda bias, m: bias.add_(bias.log()),
], ids=["a view", "a part", "itself"])  # fmt: skip
def test_what_is_written_by_way_of_something_else(write):
    def function(m):
        bias = torch.zeros(8)
        read = bias[None]
        write(bias, m)
        return read + 1

    assert found(function, tensor(8, dtype=BOOL)) is None


@pytest.mark.parametrize(("steps", "known"), [(20, True), (500, False)])
def test_a_deep_graph_is_read_once_and_not_to_its_end(steps, known):
    """Each step has two operands that are the same: 2 ** 20 ways to its beginning."""

    def function():
        x = torch.full((4,), 0.5)
        for _ in range(steps):
            x = (x + x) * 0.5 + x * 0.0
        return x

    assert (found(function) is not None) == known
