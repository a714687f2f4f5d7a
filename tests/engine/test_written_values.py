"""Tensors that are changed in place and read by their own name: what is read afterwards, and what keeps its name."""

import operator

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import as_eager, rewritten

x, w = torch.randn(4, 8), torch.randn(8)


def _norm(y):
    return F.rms_norm(y, (8,), w, 1e-6)


def behind(y):
    y = y * 2
    y.add_(1.0)
    return _norm(y) + y


def twice(y):
    y = y.sin()
    y.mul_(2.0).add_(1.0)
    y += 0.5
    return _norm(y) * y


def a_view_before(y):
    y = y * 2
    part = y[:2]
    y.mul_(3.0)
    return _norm(y).sum() + part.sum()


def a_view_is_written(y):
    y = y * 2
    y[:2].mul_(3.0)
    y.view(-1).add_(1.0)
    return _norm(y)


def without_gradients(y):
    y = y * 2
    with torch.no_grad():
        y.add_(1.0)
    return _norm(y)


def an_input(y):
    copy = y.detach().clone()
    copy.add_(1.0)
    return _norm(y) + copy


def in_a_loop(y):
    total = torch.zeros_like(y)
    for _ in range(3):
        total.add_(_norm(y))
    return total + y


def another_is_read(y):
    first, second = y * 2, y * 3
    first.copy_(second)
    second.mul_(2.0)
    return _norm(first) + second


PROGRAMS = (behind, twice, a_view_before, a_view_is_written, without_gradients, an_input, in_a_loop, another_is_read)


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_gradients_are_eagers(program):
    report = as_eager(program, x.clone().requires_grad_())
    assert report.count("rms_norm") + report.count("add_rms_norm") >= 1


def test_an_input_that_is_written_is_the_callers():
    given = x.clone()

    def program(y):
        y.add_(1.0)
        return _norm(y) + y

    y, _ = rewritten(program, given)
    torch.testing.assert_close(given, x + 1)
    torch.testing.assert_close(y, _norm(x + 1) + x + 1)


def test_later_readers_read_the_call():
    graphs = []

    def backend(gm, _):
        from fx_fusion.rewrite.written_values import read_what_was_written

        read_what_was_written(gm)
        graphs.append(gm.graph)
        return gm.forward

    torch.compile(behind, backend=backend)(x)
    written = next(node for node in graphs[0].nodes if node.target == "add_")
    assert len(written.args[0].users) == 1
    assert any(user.target in (operator.add, torch.add) for user in written.users)
