"""Test what nodes mean: the spellings of one thing are one term, and what is another value is another."""


import pytest
import torch
import torch.nn.functional as F

from fx_fusion.graph.dtypes import roundings
from fx_fusion.graph.terms import Term
from tests.engine.graphs import BF16, F16, F32, F64, capture, no_grad, symbolic_int, tensor
from tests.helpers import rewritten


def read(graph, item=None):
    """A term as ``(op, operand names, attrs)``, terms of terms likewise."""
    term = graph.term if item is None else item
    operands = (read(graph, o) if isinstance(o, Term) else getattr(o, "name", o) for o in term.operands)
    return term.op, tuple(operands), term.attrs


def term(function, **inputs):
    return read(capture(function, **(inputs or {"x": (4, 8), "y": (4, 8)})))


X, XY = {"x": (4, 8)}, {"x": (4, 8), "y": (4, 8)}
ONE_TERM = {
    "square": (X, ("square", ("x",), ()), [
        lambda x: x.pow(2), lambda x: x**2, lambda x: x * x, lambda x: torch.square(x), lambda x: torch.pow(x, exponent=2.0)]),
    "rsqrt": (X, ("rsqrt", ("x",), ()), [
        lambda x: 1 / x.sqrt(), lambda x: x**-0.5, lambda x: torch.rsqrt(x), lambda x: x.sqrt().reciprocal(), lambda x: 1.0 / x**0.5]),
    "sqrt": (X, ("sqrt", ("x",), ()), [lambda x: x.sqrt(), lambda x: x**0.5]),
    "quotient": (XY, ("mul", ("x", ("rsqrt", ("y",), ())), ()), [lambda x, y: x / y.sqrt(), lambda x, y: torch.div(x, y**0.5)]),
    "silu": (X, ("silu", ("x",), ()), [
        lambda x: x * torch.sigmoid(x), lambda x: x.sigmoid() * x, lambda x: F.silu(x)]),
    "quick_gelu": (X, ("quick_gelu", ("x",), ()), [
        lambda x: x * torch.sigmoid(1.702 * x), lambda x: torch.sigmoid(x * 1.702) * x]),
    "first half": (X, ("part", ("x",), (-1, 0, 2)), [
        lambda x: x[..., : 8 // 2], lambda x: x.chunk(2, -1)[0], lambda x: x[:, :4], lambda x: x.narrow(1, 0, 4), lambda x: x.split(4, -1)[0],
        lambda x: x.split([4, 4], 1)[0], lambda x: x[..., : x.size(-1) // 2], lambda x: x.chunk(2, -1)[-2], lambda x: x[..., :-4]]),
    "second half": (X, ("part", ("x",), (-1, 1, 2)), [
        lambda x: x[..., 4:], lambda x: x.chunk(2, 1)[1], lambda x: x[..., -4:], lambda x: x.split((4, 4), -1)[-1], lambda x: x[..., 4:100]]),
    "last row": (X, ("part", ("x",), (-2, 3, 4)), [lambda x: x[3:], lambda x: x.narrow(0, 3, 1), lambda x: x.split(1)[3]]),
    "evens": (X, ("slice", ("x",), (-1, 0, "end", 2)), [lambda x: x[..., ::2], lambda x: x[..., 0::2], lambda x: x[:, 0:8:2]]),
    "without the last": (X, ("slice", ("x",), (-1, 0, 7, 1)), [lambda x: x[..., :-1], lambda x: x[..., :7], lambda x: x.narrow(-1, 0, 7)]),
    "kept mean": (X, ("mean", ("x",), ((-1,), True)), [
        lambda x: x.mean(-1).unsqueeze(-1), lambda x: x.mean(-1, keepdim=True), lambda x: x.sum(-1, True) / 8, lambda x: x.mean([1], True),
        lambda x: (x.sum(-1) / 8).unsqueeze(1)]),
    "mean of all": (X, ("mean", ("x",), ((-2, -1), False)), [lambda x: x.mean(), lambda x: x.mean((0, 1)), lambda x: x.mean((-1, 0))]),
    "new axis": (X, ("unsqueeze", ("x",), (-2,)), [lambda x: x[:, None], lambda x: x.unsqueeze(1), lambda x: x.unsqueeze(-2), lambda x: x[:, None, :]]),
    "variance": (X, ("var", ("x",), ((-1,), False, 0)), [
        lambda x: x.var(-1, unbiased=False), lambda x: x.var(1, correction=0), lambda x: torch.var(x, -1, False)]),
    "variance of all": (X, ("var", ("x",), ((-2, -1), False, 1)), [lambda x: x.var(), lambda x: torch.var(x, True), lambda x: x.var((0, 1))]),
    "swapped": (X, ("transpose", ("x",), (-2, -1)), [lambda x: x.transpose(0, 1), lambda x: x.transpose(-1, -2), lambda x: x.swapaxes(1, 0)]),
    "one of the last": (X, ("select", ("x",), (-1, 2)), [
        lambda x: x.unbind(-1)[2], lambda x: x.unbind(1)[-6], lambda x: x[..., 2], lambda x: x[:, 2], lambda x: x[:, -6], lambda x: x.select(-1, 2),
        lambda x: torch.select(x, dim=1, index=-6), lambda x: x.narrow(-1, 2, 1).squeeze(-1), lambda x: x[:, 2:3].squeeze(1), lambda x: x.split(1, 1)[2].squeeze(-1)]),
    "one row": (X, ("select", ("x",), (-2, 1)), [lambda x: x[1], lambda x: x[-3], lambda x: x[1, ...], lambda x: x.select(0, 1), lambda x: x.unbind()[1]]),
    "even columns": (X, ("slice", ("x",), (-1, 0, "end", 2)), [
        lambda x: x[..., 0::2], lambda x: x.view(4, 4, 2)[..., 0], lambda x: x.reshape(4, -1, 2).unbind(-1)[0], lambda x: x.unflatten(-1, (-1, 2)).select(2, -2)]),
    "one of both dims": (X, ("index", ("x",), (1, 2)), [lambda x: x[1, 2], lambda x: x[-3, -6], lambda x: x[1, ..., 2]]),
    "halves swapped": (X, ("roll", ("x",), (-1, "half")), [
        lambda x: x.roll(4, -1), lambda x: x.roll(-4, 1), lambda x: torch.roll(x, shifts=(12,), dims=(-1,)), lambda x: torch.cat([x[..., 4:], x[..., :4]], -1),
        lambda x: torch.cat([x.chunk(2, -1)[1], x.chunk(2, -1)[0]], 1)]),
    "side by side": (XY, ("cat", ("x", "y"), (-1,)), [lambda x, y: torch.cat((x, y), -1), lambda x, y: torch.cat([x, y], dim=1)]),
    "softmax": (X, ("softmax", ("x",), (-1,)), [lambda x: x.softmax(1), lambda x: F.softmax(x, -1), lambda x: F.softmax(x, dim=-1, dtype=F64)]),
    "reshape": (X, ("view", ("x",), ("shape",)), [lambda x: x.view(4, 2, 4), lambda x: x.reshape(4, 2, -1), lambda x: x.unflatten(-1, (2, 4))]),
    "interleaved": (XY, ("flatten", ("stack",), (-2, -1)), [
        lambda x, y: torch.stack((x, y), -1).flatten(-2), lambda x, y: torch.stack((x, y), -1).view(4, 16), lambda x, y: torch.stack([x, y], 2).reshape(4, -1)]),
    "addcmul": (XY, ("add", ("x", ("mul", ("x", "y"), ())), ()), [lambda x, y: torch.addcmul(x, x, y), lambda x, y: x.addcmul(x, y, value=1.0)]),
    "addcmul of the opposite": (XY, ("sub", ("x", ("mul", ("x", "y"), ())), ()), [lambda x, y: torch.addcmul(x, x, y, value=-1)]),
    "norm squared": (X, ("mean", (("square", ("x",), ()),), ((-1,), True)), [lambda x: x.norm(2, -1, True) ** 2 / 8, lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / 8]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "i"), [(n, i) for n, (_, _, s) in ONE_TERM.items() for i in range(len(s))])
def test_all_spellings_of_one_thing_are_one_term(name, i):
    inputs, expected, spellings = ONE_TERM[name]
    assert term(spellings[i], **inputs) == expected


def test_the_spellings_in_this_table_are_equal_in_torch():
    values = {"x": torch.rand(4, 8) + 0.5, "y": torch.rand(4, 8) + 0.5}
    for inputs, _, spellings in ONE_TERM.values():
        results = [spelling(*(values[n] for n in inputs)).float() for spelling in spellings]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])


def test_narrow_from_the_end():
    assert term(lambda x: x.narrow(-1, -4, 4), **X) == term(lambda x: x[..., 4:], **X)


OTHER = {
    "x * y": (XY, lambda x, y: x * y, "mul"),
    "x ** 3": (X, lambda x: x**3, "pow"),
    "x ** y": (XY, lambda x, y: x**y, "pow"),
    "2 / sqrt": (X, lambda x: 2 / x.sqrt(), "div"),
    "div floor": (XY, lambda x, y: torch.div(x, y, rounding_mode="floor"), "opaque"),
    "x * sigmoid(y)": (XY, lambda x, y: x * y.sigmoid(), "mul"),
    "1.7": (X, lambda x: x * torch.sigmoid(1.7 * x), "mul"),
    "sum / 4": (X, lambda x: x.sum(-1) / 4, "div"),
    "sum of two dims / 8": (X, lambda x: x.sum((0, 1)) / 8, "div"),
    "add alpha": (XY, lambda x, y: torch.add(x, y, alpha=2), "opaque"),
    "narrower softmax": (X, lambda x: F.softmax(x, -1, dtype=F16), "opaque"),
    "other mean": (X, lambda x: x.mean(-1).unsqueeze(0), "unsqueeze"),
    "mean in f64": (X, lambda x: x.mean(-1, dtype=F64), "opaque"),
    "two cuts": (X, lambda x: x[1:, :4], "index"),
    "index and cut": (X, lambda x: x[1, :4], "index"),
    "index and new axis": (X, lambda x: x[None, 1], "index"),
    "index by a list": (X, lambda x: x[[0, 1]], "opaque"),
    "index by a list beside a number": (X, lambda x: x[[0, 1], 0], "opaque"),
    "index by a truth": (X, lambda x: x[True], "opaque"),
    "squeeze of more than one": (X, lambda x: x[:, 2:4].squeeze(-1), "squeeze"),
    "squeeze of another dim": (X, lambda x: x[:, 2:3].squeeze(0), "squeeze"),
    "rounded root": (X, lambda x: 1 / x.sqrt().half(), "div"),
    "rounded gate": (X, lambda x: x * x.sigmoid().half(), "mul"),
    "unknown": (X, lambda x: torch.sin(x), "opaque"),
    "scaled addcmul": (XY, lambda x, y: torch.addcmul(x, x, y, value=2), "opaque"),
    "roll by another number": (X, lambda x: x.roll(3, -1), "roll"),
    "halves in order": (X, lambda x: torch.cat([x.chunk(2, -1)[0], x.chunk(2, -1)[1]], -1), "cat"),
    "halves of two": (XY, lambda x, y: torch.cat([x[..., 4:], y[..., :4]], -1), "cat"),
    "norm of order 1": (X, lambda x: x.norm(1, -1), "opaque"),
    "layer norm of two dims": (X, lambda x: F.layer_norm(x, (4, 8)), "opaque"),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_is_another_thing_is_another_term(name):
    inputs, function, op = OTHER[name]
    assert term(function, **inputs)[0] == op


def test_uneven_chunks():
    graph = capture(lambda x: x.chunk(3, -1), x=(4, 8))  # 3, 3, 2
    pieces = capture(lambda x: tuple(x.chunk(3, -1)[i] for i in range(3)), x=(4, 8))
    assert [read(pieces, pieces.view.term(p))[2] for p in pieces.results] == [(-1, 0, 3, 1), (-1, 3, 6, 1), (-1, 3, 4)]
    assert graph.term.op == "chunk"


def test_torch_norms_by_name():
    assert term(lambda x, w: F.rms_norm(x, (8,), w, 1e-6), x=(4, 8), w=(8,)) == ("rms_norm", ("x", "w", 1e-6), ())
    assert term(lambda x, w: F.layer_norm(x, (8,), w), x=(4, 8), w=(8,)) == ("layer_norm", ("x", "w", 1e-5), ("weight",))
    assert term(lambda x, w: F.layer_norm(x, (8,), None, w), x=(4, 8), w=(8,)) == ("layer_norm", ("x", "w", 1e-5), ("bias",))
    default = capture(lambda x: F.rms_norm(x, (8,)), x=(4, 8)).term.operands[1]
    x = torch.full((1, 8), 1e-4)
    torch.testing.assert_close(F.rms_norm(x, (8,)), F.rms_norm(x, (8,), eps=default)), "the eps that torch takes"


def test_a_view_as_another_dtype_is_no_cast():
    graph = capture(lambda x: x.view(BF16), x=tensor(4, 8, dtype=F16))
    assert graph.view.transparent(graph.result) is None
    graph = capture(lambda x: x.to(BF16), x=tensor(4, 8, dtype=F16))
    assert graph.view.transparent(graph.result) is graph["x"]


# -- edges ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "crosses"),
    [
        (lambda x: x.float(), True), (lambda x: x.to(F64), True), (lambda x: x.half(), True), (lambda x: x.contiguous(), True),
        (lambda x: x.clone(), True), (lambda x: x.view(4, 8), True), (lambda x: x.reshape(-1, 8), True), (lambda x: x.expand(4, 8), True),
        (lambda x: x[:, :], True), (lambda x: x[...], True), (lambda x: x[0:], True), (lambda x: x[:100], True),
        (lambda x: F.dropout(x, 0.0), True), (lambda x: F.dropout(x, 0.1, False), True), (lambda x: x.type_as(x), True), (lambda x: x.squeeze(), True),
        (lambda x: x.view(8, 4), False), (lambda x: x[:2], False), (lambda x: x[None], False), (lambda x: F.dropout(x, 0.1), False),
        (lambda x: x.int(), False), (lambda x: x.bool(), False), (lambda x: x.detach(), False), (lambda x: x + 0, False),
        (lambda x: x.to("meta"), False), (lambda x: x.unsqueeze(0), False), (lambda x: torch.alias_copy(x), False),
    ],
)  # fmt: skip
def test_what_hands_its_operand_on(function, crosses):
    graph = capture(function, x=(4, 8))
    assert (graph.view.transparent(graph.result) is graph["x"]) == crosses


def test_integers_are_rounded_by_narrower_ones():
    graph = capture(lambda x: (x.int(), x.int().bool()), x=tensor(4, dtype=torch.int64))
    assert [graph.view.edge(r).roundings for r in graph.results] == [(torch.int32,), (torch.int32, torch.bool)]


@pytest.mark.parametrize(
    ("function", "dtype", "lost"),
    [
        (lambda x: x.float().bfloat16(), BF16, ()), (lambda x: x.bfloat16().float(), F32, (BF16,)), (lambda x: x.half().bfloat16(), F32, (F16, BF16)),
        (lambda x: x.double().float().half(), F32, (F16,)), (lambda x: x.bfloat16().float().bfloat16(), F32, (BF16,)), (lambda x: x.half(), BF16, (F16,)),
        (lambda x: x.view(4, 8).contiguous(), F32, ()),
    ],
)  # fmt: skip
def test_an_edge_names_the_casts_that_round(function, dtype, lost):
    graph = capture(function, x=tensor(4, 8, dtype=dtype))
    edge = graph.view.edge(graph.result)
    assert edge.base is graph["x"]
    assert edge.roundings == lost
    assert len(edge.crossed) == len(graph.names) - 2, "everything between"


def test_roundings_of_a_chain():
    assert roundings([F32, F32]) == ()
    assert roundings([F32, BF16, F16, F32]) == (BF16, F16)
    assert roundings([BF16, F16, BF16]) == (F16, BF16), "neither has the other's values"


def test_a_source_is_above_casts_that_round_and_copies():
    graph = capture(lambda x: (x.half().float().view(4, 8), x.double(), x.t().contiguous(), x.contiguous()), x=(4, 8))
    sources = [graph.view.source(r).base.name for r in graph.results]
    assert sources == ["half", "x", "contiguous", "x"]
    assert graph.view.source(3).base == 3


# -- the same value ------------------------------------------------------------------------------------------------
def same(function, **inputs):
    graph = capture(function, **(inputs or {"x": (4, 8), "y": (4, 8)}))
    return graph.view.same_value(*graph.results[:2])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: (x, x), True), (lambda x, y: (x, y), False), (lambda x, y: (x[:, None], x.unsqueeze(1)), True),
        (lambda x, y: (x + y, x + y), True), (lambda x, y: (x + y, x - y), False), (lambda x, y: (x.half(), x.half()), True),
        (lambda x, y: (x.half(), x.bfloat16()), False), (lambda x, y: (x.half(), x), False), (lambda x, y: (x.view(2, 16), x.reshape(2, 16)), True),
        (lambda x, y: (x.view(2, 16), x.view(16, 2)), False), (lambda x, y: (torch.sin(x), torch.sin(x)), False),
        (lambda x, y: (F.dropout(x), F.dropout(x)), False), (lambda x, y: (x + 1, x + 2), False), (lambda x, y: (x + 1, x + 1), True),
        (lambda x, y: (x.sum(-1), x.sum(0)), False), (lambda x, y: (x.clone(), x), True),
        (lambda x, y: ((x + y)[:, :4], (x + y).chunk(2, -1)[0]), True), (lambda x, y: (x.mean(-1), x.mean(-1, True)), False),
        (lambda x, y: (torch.stack((x, y)), torch.stack((y, x))), False),
        (lambda x, y: (x[..., 0], x[..., 0]), True), (lambda x, y: (x[..., 0], x.select(1, -8)), True), (lambda x, y: (x[..., 0], x[..., 1]), False),
        (lambda x, y: (x[..., 0], y[..., 0]), False), (lambda x, y: (x[0, :4], x[0, :4]), True), (lambda x, y: (x[0, :4], x[1, :4]), False),
        (lambda x, y: (x[:, :, None, None][0], x[:, :, None, None][0]), True), (lambda x, y: (x[0, 0], x[[0, 0]][0]), False),
    ],
)  # fmt: skip
def test_one_value_written_twice(function, expected):
    assert same(function) == expected


def test_numbers_are_values_too():
    view = capture(lambda x: x, x=(4,)).view
    assert view.same_value(1, 1)
    assert not view.same_value(1, 2)
    assert not view.same_value(1, 1.0)
    assert not view.same_value(1, view.graph.find_nodes(op="placeholder")[0])


WRITES = {
    "the operand": (lambda x, y: (x + y, x.mul_(2), x + y), False),
    "a view of it": (lambda x, y: (x + y, x[:2].mul_(2), x + y), False),
    "another tensor": (lambda x, y: (x + x, y.mul_(2), x + x), True),
    "an inner value": (lambda x, y: ((h := x * y).sin() + 1, h.mul_(2), (x * y).sin() + 1), False),
    "one of both": (lambda x, y: ((a := x + y), a.mul_(2), x + y), False),
    "what is indexed": (lambda x, y: (x[..., 0], x.mul_(2), x[..., 0]), False),
    "what is copied and indexed": (
        lambda x, y: ((c := x.t().reshape(4, 4, 2), w := x.mul_(2), d := x.t().reshape(4, 4, 2)) and (c[..., 0], w, d[..., 0])), False),
    "what two terms are of": (lambda x, y: ((a := x.sqrt(), w := x.mul_(2), b := x.sqrt()) and (1 / a, w, 1 / b)), False),
    "a copy": (lambda x, y: (x, (c := x.clone()).mul_(2), c), False),
    "the source of a copy": (lambda x, y: (x.clone(), x.mul_(2), x + 0), False),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_in_between_make_two_values(name):
    function, expected = WRITES[name]
    graph = capture(function, x=(4, 8), y=(4, 8))
    assert graph.view.same_value(graph.results[0], graph.results[2]) == expected
    assert graph.view.effects.writes


def test_same_value_symbolic_index_is_another_value():
    """The number of one call says nothing of the next."""
    symbol = symbolic_int(0)
    graph = capture(lambda x, n: (x[..., 0], x[..., n], x[..., n + 0]), x=(4, 8), n=symbol)
    zero, n, _ = graph.results
    assert not graph.view.same_value(zero, n)
    assert graph.view.term(n).op == "opaque"


def test_term_index_of_symbolic_dim_counts_from_its_end():
    graph = capture(lambda x: (x[0], x[-1], x[-1], x[1]), dynamic=True, x=(4, 8))
    assert [read(graph, graph.view.term(r)) for r in graph.results[:2]] == [("select", ("x",), (-2, 0)), ("select", ("x",), (-2, -1))]
    first, last, again, second = graph.results
    assert graph.view.same_value(last, again)
    assert not graph.view.same_value(first, last)
    assert not graph.view.same_value(second, last)


@pytest.mark.parametrize("index", [-9, 8])
def test_term_index_out_of_range_is_opaque(index):
    graph = capture(lambda x: x[:, 0], x=(4, 8))
    graph.result.args = (graph["x"], (slice(None), index))
    assert graph.term.op == "opaque"


# -- gradients and names -------------------------------------------------------------------------------------------
def test_a_cast_in_a_no_grad_block_hides_the_gradient():
    def function(x):
        with no_grad(x):
            inside = x.double()
            both = x.double()
            again = both + 1
        return inside + 1, again, x.double()

    for grad in (True, False):
        graph = capture(function, x=tensor(4, 8, grad=grad))
        cast, within, outside = graph["double"], graph["double_1"], graph["double_2"]
        assert graph.view.hides_gradient(cast) == grad
        assert (graph.view.transparent(cast) is None) == grad
        assert graph.view.transparent(within) is graph["x"], "nobody outside reads it"
        assert graph.view.transparent(outside) is graph["x"]


def test_two_nodes_in_a_no_grad_block_hide_the_gradient_as_one_does():
    def function(x):
        with no_grad(x):
            inside = x.double().contiguous()
        return inside + 1

    graph = capture(function, x=tensor(4, 8, grad=True))
    assert not graph["contiguous"].meta["example_value"].requires_grad
    assert graph.view.edge(graph["contiguous"]).base is not graph["x"]
    assert graph.view.source(graph["contiguous"]).base is not graph["x"]


def test_in_place_ops_are_functional_where_nothing_reads_the_old_value():
    assert term(lambda x: (x * 2).sigmoid_(), **X)[0] == "sigmoid"
    assert term(lambda x: F.relu(x * 2, inplace=True), **X)[0] == "relu"
    assert term(lambda x: x.sigmoid_(), **X)[0] == "opaque", "the caller sees it"
    assert term(lambda x: ((h := x * 2).sigmoid_(), h), **X)[0] == "opaque"
    assert term(lambda x: ((h := x * 2)[0], h.sigmoid_())[::-1], **X)[0] == "opaque", "a view of it is returned"


def test_static_sizes_are_numbers():
    graph = capture(lambda x: x * (x.size(-1) // 2), x=(4, 8))
    assert graph.view.folded(graph["floordiv"]) == 4
    assert graph.view.folded((graph["floordiv"], slice(None, graph["size"]))) == (4, slice(None, 8))
    assert graph.view.folded([graph["x"]]) == (graph["x"],)
    assert graph.term.operands == (graph["x"], 4)


def test_what_is_pure():
    graph = capture(lambda x: (x + 1, torch.sin(x), F.dropout(x), (x * 2).mul_(2), x.detach()), x=(4, 8))
    assert [graph.view.is_pure(r) for r in graph.results] == [True, False, False, False, False]


def test_the_last_of_a_long_chain_is_read():
    """One by one from the first, not in one recursion from the last."""

    def function(x):
        for _ in range(900):
            x = x * x + x
        return x

    x = torch.randn(3)
    y, _ = rewritten(function, x, options={"strict": True})
    torch.testing.assert_close(y, function(x))
