"""A mask that one graph makes for another is read behind the graph that makes it, and is taken for what it is."""

import pytest
import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.runtime import mask_values, masks_ahead
from fx_fusion.testing import rewriting_backend

S = 16


@pytest.fixture
def read(monkeypatch):
    """The kinds that masks are read for, on a device where the host would wait; each with where the program is then."""
    found, where = [], [""]
    holds = mask_values.holds

    def noted(mask, kind):
        found.append((where[0], kind))
        return holds(mask, kind)

    for module in (mask_values, masks_ahead):
        monkeypatch.setattr(module, "reading_waits", lambda mask: True)
        monkeypatch.setattr(module, "holds", noted)
    return found, where


def build(allowed):
    """A mask as transformers builds it, whose values no graph can know."""
    q = torch.arange(S)
    return ((q[None, :] <= q[:, None]) & allowed)[None, None]


def attend(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def compiled():
    torch._dynamo.reset()
    return [torch.compile(f, backend=rewriting_backend()) for f in (build, attend)]


def step(functions, where, allowed, between=None):
    make, use = functions
    q, k, v = torch.randn(3, 2, 4, S, 8, generator=torch.Generator().manual_seed(0))
    where[0] = "made"
    mask = make(allowed)
    if between is not None:
        between(mask)
    where[0] = "used"
    out = use(q, k, v, mask)
    torch.testing.assert_close(out, attend(q, k, v, mask), rtol=1e-5, atol=1e-5)


def test_it_is_read_where_it_is_made_once_somebody_has_asked(read):
    found, where = read
    functions = compiled()
    everything = torch.ones(S, S, dtype=torch.bool)
    with fx_fusion.recording() as report:
        for _ in range(3):
            step(functions, where, everything)
    assert [s.fusion for s in report.sites if s.status == "fused"] == ["causal_mask"]
    assert {at for at, _ in found[:-2]} <= {"used", "made"}
    assert found[-2:] == [("made", "causal"), ("made", "causal")], "the second and the third step"


def test_one_that_is_something_else_then_is_seen(read):
    """Causal, then with a hole, then causal again: the numbers are right each time."""
    found, where = read
    functions = compiled()
    everything = torch.ones(S, S, dtype=torch.bool)
    hole = everything.clone()
    hole[:, 3] = False
    for allowed in (everything, everything, hole, hole, everything, everything):
        step(functions, where, allowed)
    assert ("made", "causal") in found


def test_one_that_is_written_to_before_it_is_used_is_read_again(read):
    found, where = read
    functions = compiled()
    everything = torch.ones(S, S, dtype=torch.bool)
    for _ in range(2):
        step(functions, where, everything)

    def write(mask):
        mask[..., 5] = False

    del found[:]
    step(functions, where, everything, between=write)
    assert ("used", "causal") in found, "what was read ahead is of what it was"


def test_what_nobody_asks_for_is_not_read(read):
    found, where = read
    make, _ = compiled()
    where[0] = "made"
    for _ in range(3):
        make(torch.ones(S, S, dtype=torch.bool))
    assert not found
