"""Test how the part of a loss that treats rows one by one is traced for Inductor: nothing of the numbers changes."""

import pytest
import torch
import torch.nn.functional as F

from fx_fusion.torch_internals import standalone
from fx_fusion.torch_internals.standalone import Operand, traced_for_rows

ROWS, CLASSES = 7, 300
CPU = torch.device("cpu")
INF = float("inf")
generator = torch.Generator().manual_seed(0)
logits = torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64) * 3
masked = logits.masked_fill(torch.rand(ROWS, CLASSES, generator=generator) < 0.5, -INF)
hopeless = masked.clone()
hopeless[0], hopeless[1, 3], hopeless[2, 5] = -INF, INF, float("nan")
y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
y[3] = 3


def gradient_of(loss):
    def gradient(z, y):
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            rows = loss(leaf, y)
            return rows.detach(), *torch.autograd.grad(rows.sum(), leaf)

    return gradient


FUNCTIONS = {
    "log_softmax": lambda z, y: z.log_softmax(-1),
    "softmax": lambda z, y: z.softmax(-1),
    "logsumexp": lambda z, y: (z.logsumexp(-1), z.logsumexp(1, keepdim=True)),
    "of one class": gradient_of(lambda z, y: z.log_softmax(-1).gather(-1, y[:, None])[:, 0].exp()),
    "classes, ignored": gradient_of(lambda z, y: F.cross_entropy(z / 2, y, reduction="none", ignore_index=3)),
    "smoothed": gradient_of(lambda z, y: F.cross_entropy(z, y, reduction="none", label_smoothing=0.1)),
    "squared logsumexp": gradient_of(lambda z, y: z.logsumexp(-1).square()),
    "entropy": gradient_of(lambda z, y: (z.softmax(-1) * z.log_softmax(-1)).sum(-1)),
    "the best two": gradient_of(lambda z, y: z.gather(-1, z.topk(2, -1).indices).sum(-1)),
    "set to a value": lambda z, y: z.scatter(-1, y[:, None], 1.5),
    "set to another": lambda z, y: z.scatter(-1, y[:, None], z[:, :1]),
    "added twice": lambda z, y: z.scatter_add(-1, torch.stack([y, y], -1), z[:, :2]),
    "fewer rows": lambda z, y: z.scatter_add(-1, y[:3, None], z[:, :1]),
    "along rows": lambda z, y: z.scatter_add(0, y[None] % 2, z[:1, : len(y)]),
    "of integers": lambda z, y: y[:, None].expand(-1, 4).scatter(-1, y[:, None] % 4, 0),
}


@pytest.mark.parametrize("of", ["logits", "masked", "hopeless"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_those_of_eager(name, of):
    function, z = FUNCTIONS[name], globals()[of]
    operands = [Operand((CLASSES,), z.dtype, CPU, per_row=True), Operand((), torch.int64, CPU, per_row=True)]
    if name in ("fewer rows", "along rows"):  # of a number of rows that is known
        operands = [Operand((ROWS, CLASSES), z.dtype, CPU, per_row=False), Operand((ROWS,), torch.int64, CPU, per_row=False)]
    gm, _ = traced_for_rows(function, operands, standalone.decompositions_of_rows())
    torch.testing.assert_close(gm(z, y), function(z, y), rtol=1e-12, atol=1e-12, equal_nan=True)


def test_nothing_is_scattered_for_one_class_a_row():
    operands = [Operand((CLASSES,), torch.float32, CPU, per_row=True), Operand((), torch.int64, CPU, per_row=True)]
    for name in ("of one class", "classes, ignored", "set to a value"):
        gm, _ = traced_for_rows(FUNCTIONS[name], operands, standalone.decompositions_of_rows())
        ops = {str(node.target) for node in gm.graph.nodes}
        assert not [op for op in ops if "scatter" in op], ops
        assert name == "set to a value" or [op for op in ops if "prepare_softmax_online" in op], ops


@pytest.mark.parametrize(("levels", "again"), [(3, True), (12, False)])
def test_long_chains_of_values_that_are_read_twice_are_stored_where_inductor_says_so(levels, again, monkeypatch):
    """Written out at each use, 12 of them have 2^12 ops and more, which Inductor would visit one by one."""

    def chain(z):
        for _ in range(levels):
            z = z * z + z / 2
        return z.sum(-1)

    limits = []
    monkeypatch.setattr(
        torch._inductor, "standalone_compile", lambda *_, **__: limits.append(torch._inductor.config.realize_reads_threshold)
    )
    before = torch._inductor.config.realize_reads_threshold
    standalone.compiled_for_rows(chain, [Operand((CLASSES,), torch.float32, CPU, per_row=True)])
    assert (limits[0] > before) is again
    assert torch._inductor.config.realize_reads_threshold == before
