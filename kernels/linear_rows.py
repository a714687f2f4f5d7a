"""Linear layer and any loss that treats rows one by one, in chunks of logits.

    z = x · Wᵀ + b, rounded to x's dtype        W = lm_head;  a chunk of rows at a time
    seams = body(z, inputs)                     one or a few numbers a row: ``logits/row_programs``
    dx = dz · W,  dW = Σ dzᵀ · x,  db = Σ_rows dz        dz: the vjp of the body

With ``cotangents`` of the seams the forward computes the gradients beside them, while a chunk of logits exists: three
products. The upstream gradients of the seams are then one factor times the cotangents. Without, the backward makes the
logits again: four products. Rows whose cotangents are all 0 are left out where their seams are not read otherwise
(``skips``), and in the backward: prompts where only answers are trained. Their seams and gradients are 0. So are rows that a
mask among the inputs hides (``rows_of_logits.hidden``); their seams are computed of the inputs.

``keep``, for code that runs op by op: without cotangents the logits are kept, and the backward writes their gradient over
them. Three products, for m·v logits: not where these are more than an eighth of the memory, nor under hooks on what is saved
(a checkpoint's), which would not see them. In a compiled graph Inductor plans the memory of logits that stay.

The last inputs of the body may be logits of other heads without a gradient, a teacher's: ``heads`` has what they are made
of, a chunk at a time. Each of them is x (m, k), the weight (v, k), and the bias (v) or an empty tensor.

Shapes     x: (m, h); lm_head: (v, h); bias: (v); inputs: (m, ..) or any, as the program says; seams: (m, ..).
Dtypes     x, lm_head, bias alike: bf16 | fp32, fp16 without cotangents, whose gradient would not be scaled; so are those of
           a head; inputs and seams any.
           Gradients of inputs that have no rows are added up in
           fp32.
Saved      x, lm_head, bias and the inputs, perhaps the logits; with cotangents dx, dW, db and the gradients of the inputs.
Source     Liger-Kernel's chunked losses (arXiv:2410.10989), here for any loss.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from fx_fusion.kernels.lib.device import memory_of_device
from fx_fusion.kernels.logits.logit_chunks import chunk_plan, each_chunk, padded, rows_to_keep
from fx_fusion.kernels.logits.row_programs import in_an_op, program
from fx_fusion.kernels.logits.scaled import factor_behind, scaled_gradients
from fx_fusion.ops.library import plain_op, register_autograd
from fx_fusion.torch_internals.dispatch import has_saved_tensor_hooks

_MOST_KEPT = 8  # kept logits have this part of the device's memory at most


def _run(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks, skips):
    """Return the seams, and dx, dW, db and the gradients of the inputs (None where they are not needed)."""
    kept = _rows_that_count(inputs, cotangents, key, lm_head.shape[0], skips)
    if kept is None:
        return _run_all(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks)
    some, some_heads = _inputs_of(kept, inputs, key), _heads_of(kept, heads)
    cotangents = None if cotangents is None else [c[kept] for c in cotangents]
    given = (lm_head, bias, some, some_heads, cotangents, key, needs, small_chunks)
    m = x.shape[0]
    seams, (dx, dw, db, *d_inputs) = _run_all(x[kept], *given, of_rows=m)
    d_inputs = [_whole(d, kept, m) if of.per_row else d for d, of in zip(d_inputs, program(key).inputs, strict=False)]
    return _seams_of_all(seams, kept, inputs, key, m), (_whole(dx, kept, m), dw, db, *d_inputs)


def _rows_that_count(inputs, cotangents, key, v, skips):
    """Return the indices of the rows whose logits are needed; None for all of them."""
    rows, count = program(key), None
    if rows.hiding is not None:
        count = ~rows.hidden(inputs)
    if cotangents and skips:
        counts = [c != 0 if c.dim() == 1 else (c != 0).flatten(1).any(1) for c in cotangents]
        some = torch.stack(counts).any(0)
        count = some if count is None else count & some
    return None if count is None else rows_to_keep(count, v)


def _inputs_of(kept, inputs, key):
    """Return the inputs of some rows."""
    return [i[kept] if of.per_row else i for i, of in zip(inputs, program(key).inputs, strict=False)]


def _heads_of(kept, heads):
    """Return the operands of other heads for some rows."""
    return [t if i % 3 else t[kept] for i, t in enumerate(heads)]


def _whole(t, kept, m):
    """Return what some rows have for all of them: 0 for the others."""
    return None if t is None else t.new_zeros((m, *t.shape[1:])).index_copy_(0, kept, t)


def _seams_of_all(seams, kept, inputs, key, m):
    """Return the seams of all rows. Those of hidden rows are computed of the inputs; what nobody reads is 0."""
    rows = program(key)
    whole = [_whole(seam, kept, m) for seam in seams]
    if rows.hiding is None:
        return whole
    hidden, values = rows.hidden(inputs), rows.hidden_values(inputs, m)  # of all rows: which are hidden takes no wait
    return [
        torch.where(hidden.view(m, *[1] * (s.dim() - 1)), of_hidden.to(s.dtype), s)
        for s, of_hidden in zip(whole, values, strict=True)
    ]


class _Chunks:
    """Runs the program on chunks of logits, and gathers what it returns.

    Attributes:
        seams: of all rows.
        d_inputs: gradients of the inputs; None where there is none.
    """

    def __init__(self, x, inputs, heads, cotangents, key):
        self.rows, m = program(key), x.shape[0]
        self.inputs = [i.contiguous() for i in inputs]
        self.cotangents = None if cotangents is None else [c.contiguous() for c in cotangents]
        self.seams = [torch.empty((m, *shape), dtype=dtype, device=x.device) for shape, dtype in self.rows.seams]
        self.d_inputs = [
            (torch.empty_like(i) if of.per_row else torch.zeros(i.shape, dtype=torch.float32, device=i.device))
            if cotangents is not None and want else None
            for i, of, want in zip(self.inputs, self.rows.inputs, self.rows.wants, strict=False)
        ]  # fmt: skip
        threes = zip(*[iter(heads)] * 3, strict=True)
        self.heads = [(xs, padded(w), padded(b) if b.numel() else None) for xs, w, b in threes]

    def fill(self, logits, v, index, *_):
        """Take a chunk of logits; with cotangents write their gradient over them. ``index``: of its rows, on the CPU."""
        start, rows, inputs = int(index[0]), self.rows, self.inputs
        part = slice(start, start + len(index))
        z, given = logits[:, :v], [i[part] if of.per_row else i for i, of in zip(inputs, rows.inputs, strict=False)]
        for (xs, w, b), of in zip(self.heads, rows.inputs[len(inputs) :], strict=True):
            others = torch.mm(xs[part], w.t()) if b is None else torch.addmm(b, xs[part], w.t())
            others = others[:, : of.shape[0]]
            given.append(others if others.dtype == of.dtype else others.to(of.dtype).contiguous())
        if self.cotangents is None:
            results = rows.values(z, *given)
        else:
            results = in_an_op(rows, z, *(c[part] for c in self.cotangents), *given)
        found, gradients = results[: len(self.seams)], iter(results[len(self.seams) :])
        for whole, some in zip(self.seams, found, strict=True):
            whole[part] = some
        for d, of in zip(self.d_inputs, rows.inputs, strict=False):
            if d is not None:
                if of.per_row:
                    d[part] = next(gradients)
                else:
                    d += next(gradients)

    def fill_all(self, logits, v):
        """Take logits that are there, a chunk at a time."""
        m, itemsize, device = len(logits), logits.element_size(), logits.device.type
        step = chunk_plan(m, v, itemsize, device).rows
        for start in range(0, m, max(step, 1)):
            rows = slice(start, min(m, start + step))
            self.fill(logits[rows], v, torch.arange(rows.start, rows.stop))


def _run_all(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks, of_rows=None):
    """Return what ``_run`` does, of all rows. ``of_rows``: how many rows there were before some were left out."""
    m = x.shape[0]
    x, lm_head = x.contiguous(), lm_head if lm_head.stride(-1) == 1 else lm_head.contiguous()
    chunks = _Chunks(x, inputs, heads, cotangents, key)
    needs = needs if cotangents is not None else [False] * 3
    index, nothing = torch.arange(m), torch.empty(m, 0)
    dx, dw, db = each_chunk(
        x, lm_head, bias, index, None, (0, 0.0, 0.0, 1.0), None, needs, nothing, small=small_chunks, fill=chunks.fill,
        of_rows=of_rows,
    )  # fmt: skip
    return chunks.seams, (dx, dw, db, *chunks.d_inputs)


def _given(tensors, like):
    """Return gradients in the dtypes of what they are of, empty ones where there are none."""
    return [
        torch.empty(0, dtype=of.dtype, device=of.device) if t is None else t.to(of.dtype)
        for t, of in zip(tensors, like, strict=True)
    ]


def _kept(x, lm_head, bias, inputs, heads, key):
    """Return the seams, and the logits of the rows that count; padding for unaligned classes is behind them."""
    m, kept, given = x.shape[0], _rows_that_count(inputs, None, key, lm_head.shape[0], False), inputs
    if kept is not None:
        x, given, heads = x[kept], _inputs_of(kept, inputs, key), _heads_of(kept, heads)
    lm_head, bias = padded(lm_head), None if bias is None else padded(bias)
    logits, chunks = torch.nn.functional.linear(x, lm_head, bias), _Chunks(x, given, heads, None, key)
    chunks.fill_all(logits, program(key).logits.shape[0])
    return [*(chunks.seams if kept is None else _seams_of_all(chunks.seams, kept, inputs, key, m)), logits]


def _gradients_of_kept(logits, cotangents, x, lm_head, bias, inputs, key, needs):
    """Return dx, dW, db and the gradients of the inputs; write over the logits."""
    m, v, kept = x.shape[0], lm_head.shape[0], None
    if len(logits) < m:
        kept = (~program(key).hidden(inputs)).nonzero()[:, 0]
        x, inputs = x[kept], _inputs_of(kept, inputs, key)
        cotangents = [c[kept] for c in cotangents]
    chunks = _Chunks(x, inputs, [], cotangents, key)
    chunks.fill_all(logits, v)
    needs_dx, needs_dw, needs_db = needs
    dx = logits @ padded(lm_head) if needs_dx else None
    dx = dx if kept is None else _whole(dx, kept, m)
    dw = (logits.t() @ x)[:v] if needs_dw else None
    db = logits[:, :v].sum(0) if needs_db else None
    return _given((dx, dw, db, *chunks.d_inputs), (x, lm_head, x if bias is None else bias, *inputs))


def _may_keep(x, lm_head):
    kept = x.shape[0] * lm_head.shape[0] * x.element_size()
    return not has_saved_tensor_hooks() and kept * _MOST_KEPT <= memory_of_device(x)


def _fwd(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks=False, skips=False, keep=False):
    if keep and not cotangents:
        return _kept(x, lm_head, bias, inputs, heads, key) if _may_keep(x, lm_head) else [
            *_run(x, lm_head, bias, inputs, heads, None, key, needs, small_chunks, skips)[0], x.new_empty(0)
        ]  # fmt: skip
    seams, gradients = _run(x, lm_head, bias, inputs, heads, cotangents or None, key, needs, small_chunks, skips)
    if not cotangents:
        return seams
    return [*seams, *_given(gradients, (x, lm_head, x if bias is None else bias, *inputs))]


def _bwd(cotangents, x, lm_head, bias, inputs, key, needs, small_chunks=False):
    _, gradients = _run(x, lm_head, bias, inputs, [], cotangents, key, needs, small_chunks, skips=True)
    return _given(gradients, (x, lm_head, x if bias is None else bias, *inputs))


def _fake_gradients(x, lm_head, bias, inputs, key, needs):
    like = (x, lm_head, x if bias is None else bias)
    found = [t.new_empty(t.shape if n else (0,)) for t, n in zip(like, needs, strict=True)]
    return [*found, *(i.new_empty(i.shape if w else (0,)) for i, w in zip(inputs, program(key).wants, strict=False))]


def _fake(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks=False, skips=False, keep=False):
    seams = [x.new_empty((x.shape[0], *shape), dtype=dtype) for shape, dtype in program(key).seams]
    if keep and not cotangents:
        return [*seams, x.new_empty((x.shape[0], lm_head.shape[0]))]
    return seams if not cotangents else [*seams, *_fake_gradients(x, lm_head, bias, inputs, key, needs)]


def _fake_bwd(cotangents, x, lm_head, bias, inputs, key, needs, small_chunks=False):
    return _fake_gradients(x, lm_head, bias, inputs, key, needs)


_OPERANDS = "Tensor x, Tensor lm_head, Tensor? bias, Tensor[] inputs"
linear_rows = plain_op(
    "linear_rows",
    f"({_OPERANDS}, Tensor[] heads, Tensor[] cotangents, str program, bool[] needs, bool small_chunks=False,"
    " bool skips=False, bool keep=False) -> Tensor[]",
    _fwd,
    _fake,
)
linear_rows_bwd = plain_op(
    "linear_rows_bwd",
    f"(Tensor[] cotangents, {_OPERANDS}, str program, bool[] needs, bool small_chunks=False) -> Tensor[]",
    _bwd,
    _fake_bwd,
)


@register_flop_formula(torch.ops.fx_fusion.linear_rows)
def _flops(x_shape, lm_head_shape, bias_shape, inputs, heads, cotangents, *_, **__):
    """Returns the FLOPs of the products, for ``torch.utils.flop_counter``."""
    columns = (3 if cotangents else 1) * x_shape[1] + sum(shape[1] for shape in heads[::3])
    return 2 * x_shape[0] * columns * lm_head_shape[0]


@register_flop_formula(torch.ops.fx_fusion.linear_rows_bwd)
def _flops_bwd(cotangents, x_shape, lm_head_shape, *_, **__):
    return 6 * x_shape[0] * x_shape[1] * lm_head_shape[0]


def _setup_context(ctx, inputs, output):
    x, lm_head, bias, given, heads, cotangents, ctx.key, ctx.needs = inputs[:8]
    ctx.small = inputs[8] if len(inputs) > 8 else False
    ctx.logits = None
    ctx.set_materialize_grads(False)
    ctx.cotangents = len(cotangents)
    ctx.now, ctx.count, ctx.of_heads, ctx.has_bias = bool(cotangents), len(given), len(heads), bias is not None
    if ctx.now:
        ctx.save_for_backward(*cotangents, *output[len(cotangents) :])
        ctx.mark_non_differentiable(*output[len(cotangents) :])
    else:
        ctx.save_for_backward(x, lm_head, *(() if bias is None else (bias,)), *given)
        ctx.rows, ctx.device = x.shape[0], x.device
        for logits in output[len(program(ctx.key).seams) :]:  # kept: hooks on what is saved don't see them
            ctx.logits = logits if logits.numel() else None
            ctx.mark_non_differentiable(logits)


def _backward(ctx, upstream):
    seams, wants = program(ctx.key).seams, program(ctx.key).wants
    upstream = list(upstream)[: len(seams)]
    of_lists = [None] * ctx.of_heads, [None] * ctx.cotangents
    no_grads = *of_lists, *(None for _ in ctx.needs_input_grad[6:])  # an argument left out has none
    if all(u is None for u in upstream):
        return None, None, None, [None] * ctx.count, *no_grads
    if ctx.now:
        saved = ctx.saved_tensors
        cotangents, gradients = saved[: len(seams)], saved[len(seams) :]
        known = [(u.float(), c.float()) for u, c in zip(upstream, cotangents, strict=True) if u is not None]
        factor = factor_behind(*zip(*known, strict=True))
        dx, dw, db, *d_inputs = gradients
        dx, dw, db = scaled_gradients(dx, dw, db, factor, factor)
        found = [dx, dw, db, *(d * factor.to(d.dtype) for d in d_inputs)]
    else:
        x, lm_head, *rest = ctx.saved_tensors
        bias, inputs = (rest[0], rest[1:]) if ctx.has_bias else (None, rest)
        cotangents = [
            torch.zeros((ctx.rows, *shape), dtype=dtype, device=ctx.device) if u is None else u
            for u, (shape, dtype) in zip(upstream, seams, strict=True)
        ]
        logits, ctx.logits = ctx.logits, None
        if logits is None:  # not kept, or a backward before this one has written over them
            found = linear_rows_bwd(cotangents, x, lm_head, bias, inputs, ctx.key, ctx.needs, ctx.small)
        else:
            found = _gradients_of_kept(logits, cotangents, x, lm_head, bias, inputs, ctx.key, ctx.needs)
    dx, dw, db, *d_inputs = found
    needed = [g if n else None for g, n in zip((dx, dw, db), ctx.needs, strict=True)]
    given = {i for i, u in enumerate(upstream) if u is not None}
    of_inputs = zip(d_inputs, wants, program(ctx.key).seams_of_inputs, strict=False)
    return *needed, [d if want and given & seams_of else None for d, want, seams_of in of_inputs], *no_grads


register_autograd("linear_rows", _backward, _setup_context)
