"""Test what an index does to each dim."""

import pytest
import torch
from torch import fx

from fx_fusion.graph.indices import WHOLE, index_of

NODE = fx.Graph().placeholder("ids")
CUT = slice(None, 2, None)


@pytest.mark.parametrize(
    ("index", "items"),
    [
        (CUT, (CUT, WHOLE, WHOLE)),
        ((CUT,), (CUT, WHOLE, WHOLE)),
        ((Ellipsis, CUT), (WHOLE, WHOLE, CUT)),
        ((0, Ellipsis, CUT), (0, WHOLE, CUT)),
        ((Ellipsis, None), (WHOLE, WHOLE, WHOLE, None)),
        ((None, CUT), (None, CUT, WHOLE, WHOLE)),
        ((WHOLE, None, Ellipsis, None, 1), (WHOLE, None, WHOLE, None, 1)),
        ((CUT, CUT, CUT), (CUT, CUT, CUT)),
        ((CUT, Ellipsis, CUT, CUT), (CUT, CUT, CUT)),
        (Ellipsis, (WHOLE, WHOLE, WHOLE)),
        (NODE, (NODE, WHOLE, WHOLE)),
    ],
    ids=str,
)
def test_the_ellipsis_is_written_out(index, items):
    read = index_of(index, 3)
    assert read.items == items
    assert read.rank == 3
    assert len(read.dims) == 3
    if not read.tensors:  # as torch reads it
        x = torch.arange(60).view(3, 4, 5)
        assert torch.equal(x[index], x[items])


@pytest.mark.parametrize("index", [(0, 0, 0, 0), (CUT,) * 4, (Ellipsis, Ellipsis), (Ellipsis, 0, Ellipsis)], ids=str)
def test_no_index_of_three_dims(index):
    assert index_of(index, 3) is None


def test_new_axes_take_no_dim():
    read = index_of((None, None, CUT, None, WHOLE), 2)
    assert read.new_axes == [0, 1, 3]
    assert read.dims == [CUT, WHOLE]
    assert read.cuts == [(0, CUT)]
    x = torch.zeros(6, 7)
    assert x[tuple(read.items)].shape == (1, 1, 2, 1, 7)


def test_a_view_keeps_every_dim():
    assert index_of((Ellipsis, None, CUT), 3).only_slices
    assert not index_of((Ellipsis, 0), 3).only_slices
    assert not index_of((Ellipsis, NODE), 3).only_slices
    assert index_of((CUT, NODE), 3).tensors == [NODE]


def test_a_slice_of_everything_cuts_nothing():
    assert index_of((WHOLE, Ellipsis), 3).cuts == []
    assert index_of((slice(0, None), Ellipsis), 3).cuts == [(0, slice(0, None))], "literally another slice"


def test_a_scalar_has_no_dims():
    assert index_of(Ellipsis, 0).items == ()
    assert index_of(None, 0).items == (None,)
    assert index_of(0, 0) is None


def test_index_of_integers_returns_picks():
    read = index_of((None, -1, Ellipsis, 0), 3)
    assert read.picks == [(0, -1), (2, 0)]
    assert read.is_view
    assert not index_of((True, Ellipsis), 3).is_view
    assert index_of((True, Ellipsis), 3).picks == []
    assert not index_of((NODE, 0), 3).is_view
