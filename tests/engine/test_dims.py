"""The language of dims: what it accepts, what it refuses, what shapes it lets in."""

import pytest
import torch

from fx_fusion.errors import DeclarationError
from fx_fusion.fusion.dims import Dim, mismatch, parse
from tests.engine.graphs import capture


def spec(text):
    return parse("dyt", "x", text)


@pytest.mark.parametrize(
    ("text", "dims", "names"),
    [
        ("n", [Dim("n")], ["n"]),
        ("... n", [Dim("..."), Dim("n")], ["m", "n"]),
        ("b c ...", [Dim("b"), Dim("c"), Dim("...")], ["b", "c", "m"]),
        ("m n", [Dim("m"), Dim("n")], ["m", "n"]),
        ("b|1 s d2", [Dim("b", broadcast=True), Dim("s"), Dim("d2")], ["b", "s", "d2"]),
        ("b? n", [Dim("b", optional=True), Dim("n")], ["b", "n"]),
        ("s t=s", [Dim("s"), Dim("t", like="s")], ["s", "t"]),
        ("t=s|1 n", [Dim("t", broadcast=True, like="s"), Dim("n")], ["t", "n"]),
        ("1 n", [Dim("1"), Dim("n")], ["n"]),
        ("  b   n ", [Dim("b"), Dim("n")], ["b", "n"]),
        ("", [], []),
    ],
    ids=repr,
)
def test_every_form_is_read(text, dims, names):
    read = spec(text)
    assert list(read.dims) == dims
    assert read.names == names
    assert not read.squeezed


def test_parentheses_hold_one_dim():
    read = spec("(c)")
    assert list(read.dims) == [Dim("c")]
    assert read.squeezed


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("N", "'N' is no dim"),
        ("b, n", "'b,' is no dim"),
        ("2 n", "'2' is no dim"),
        ("n|2", "'n|2' is no dim"),
        ("n|1?", "'n|1?' is no dim"),
        ("t= s", "'t=' is no dim"),
        ("..", "'..' is no dim"),
        ("_a", "'_a' is no dim"),
        ("m|1 n", "m stands for any number of dims"),
        ("m? n", "m stands for any number of dims"),
        ("... b ...", "... and ... are both any number of dims; only one may be"),
        ("m ... n", "m and ... are both any number of dims"),
        ("(b c)", "parentheses hold the name of one dim"),
        ("(...)", "parentheses hold the name of one dim"),
        ("(m)", "parentheses hold the name of one dim"),
        ("(c|1)", "parentheses hold the name of one dim"),
        ("(1)", "parentheses hold the name of one dim"),
        ("()", "parentheses hold the name of one dim"),
        ("(c", "'(c' is no dim"),
        ("b (c)", "'(c)' is no dim"),
    ],
)
def test_every_mistake_is_refused(text, sentence):
    with pytest.raises(DeclarationError) as refused:
        spec(text)
    message = str(refused.value)
    assert sentence in message
    assert repr(text) in message, "which dims"
    assert "fusion 'dyt'" in message
    assert "input 'x'" in message
    assert "n|1 (may be broadcast)" in message, "what may be written"


@pytest.mark.parametrize(
    ("text", "rank", "places"),
    [
        ("b n", 2, {"b": (0, 1), "n": (1, 2)}),
        ("... n", 1, {"...": (0, 0), "n": (0, 1)}),
        ("... n", 4, {"...": (0, 3), "n": (3, 4)}),
        ("b c ...", 5, {"b": (0, 1), "c": (1, 2), "...": (2, 5)}),
        ("b c ...", 2, {"b": (0, 1), "c": (1, 2), "...": (2, 2)}),
        ("b ... c", 4, {"b": (0, 1), "...": (1, 3), "c": (3, 4)}),
        ("b|1 h|1 s d", 4, {"b": (0, 1), "h": (1, 2), "s": (2, 3), "d": (3, 4)}),
        ("b|1 h|1 s d", 3, {"h": (0, 1), "s": (1, 2), "d": (2, 3)}),
        ("b|1 h|1 s d", 2, {"s": (0, 1), "d": (1, 2)}),
        ("b? n", 1, {"n": (0, 1)}),
        ("", 0, {}),
    ],
)
def test_entries_stand_for_dims(text, rank, places):
    found = spec(text).align(rank)
    assert {dim.name: (where.start, where.stop) for dim, where in found} == places


@pytest.mark.parametrize(("text", "rank"), [("b n", 1), ("b n", 3), ("b c ...", 1), ("b|1 s d", 1), ("b|1 s d", 4), ("", 1)])
def test_too_few_and_too_many_dims(text, rank):
    assert spec(text).align(rank) is None
    assert spec(text).sizes((2,) * rank) is None
    assert spec(text).why_not("x", (2,) * rank, {}) == f"x has shape {(2,) * rank}; the kernel takes ({text})"


@pytest.mark.parametrize("text", ["b c|1", "b c?"])
def test_a_dim_is_missing_on_the_left_only(text):
    """A tensor (c) is broadcast over b, whatever the declaration calls it."""
    assert spec(text).align(1) is None


@pytest.mark.parametrize(
    ("text", "shape", "reason"),
    [
        ("... n", (2, 3, 8), None),
        ("... n", (2, 3, 7), "x has shape (2, 3, 7); its n must be 8"),
        ("n|1", (8,), None),
        ("n|1", (1,), None),
        ("n|1", (), None),
        ("n|1", (4,), "x has shape (4,); its n must be 8"),
        ("1 n", (1, 8), None),
        ("1 n", (2, 8), "x has shape (2, 8); its 1 must be 1"),
        ("n n", (8, 8), None),
        ("k k", (3, 4), "x has shape (3, 4); its k must be 3"),
        ("t=n", (5,), None),
        ("(n)", (1, 8, 1, 1), None),
        ("(n)", (8,), None),
        ("(n)", (2, 4), "x has shape (2, 4); the kernel takes (n)"),
        ("(n)", (1, 4, 1), "x has shape (4,); its n must be 8"),
        ("(k)", (1, 1), None),
    ],
)
def test_shapes_beside_a_tensor_of_eight(text, shape, reason):
    assert spec(text).why_not("x", shape, {"n": 8}) == reason


def test_a_broadcast_dim_says_nothing_of_the_others():
    sizes = {}
    assert spec("b|1 n").why_not("x", (1, 8), sizes) is None
    assert sizes == {"n": 8}
    assert spec("b n").why_not("x", (4, 8), sizes) is None
    assert sizes == {"n": 8, "b": 4}


def test_one_name_is_one_size_in_all_inputs():
    specs = {"x": parse("f", "x", "... n"), "w": parse("f", "w", "n")}
    shapes = {"x": torch.empty(2, 8), "w": torch.empty(8)}
    assert mismatch(specs, shapes) is None
    assert mismatch(specs, {**shapes, "w": torch.empty(4)}) == "w has shape (4,); its n must be 8"
    assert mismatch(specs, {"x": shapes["x"]}) is None, "a variant without w"


def test_symbolic_sizes_are_compared_without_a_guard():
    graph = capture(lambda x, y: x + y[:, :5], dynamic=True, x=(3, 5), y=(3, 7))
    x, y = (graph[name].meta["example_value"] for name in "xy")
    assert not isinstance(x.shape[0], int), "this tests nothing"
    env = x.fake_mode.shape_env
    guards = len(env.guards)
    sizes = {}
    assert spec("b n").why_not("x", x.shape, sizes) is None
    assert spec("b k").why_not("y", y.shape, sizes) is None, "one symbol for equal sizes"
    assert "its n must be" in spec("b n").why_not("y", y.shape, sizes)
    assert spec("b|1 n").why_not("x", x.shape, {"b": 1, "n": x.shape[1]}) is not None, "nobody knows that it is 1"
    assert len(env.guards) == guards


@pytest.mark.parametrize(
    ("text", "shape", "sizes"),
    [
        ("... n", (2, 3, 8), {"m": 6, "n": 8}),
        ("... n", (8,), {"m": 1, "n": 8}),
        ("b c ...", (2, 3, 4, 5), {"b": 2, "c": 3, "m": 20}),
        ("b|1 n", (4, 8), {"n": 8}),
        ("1 n", (1, 8), {"n": 8}),
        ("(c)", (1, 6, 1), {"c": 6}),
        ("s t=s", (3, 4), {"s": 3, "t": 4}),
    ],
)
def test_sizes_of_a_shape(text, shape, sizes):
    assert spec(text).sizes(shape) == sizes


@pytest.mark.parametrize(
    ("text", "strides", "layout"),
    [
        ("b n", (8, 1), "b n"),
        ("b n", (1, 4), "n b"),
        ("b|1 n", (1,), "n"),
        ("b c ...", (60, 1, 15, 3), "b ... c"),
        ("... n", (1,), "n"),
        ("... n", (1, 2), "n ..."),
    ],
)
def test_layouts(text, strides, layout):
    assert spec(text).layout(strides) == layout
