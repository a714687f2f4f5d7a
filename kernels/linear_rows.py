"""Linear layer and any loss that treats rows one by one, in chunks of logits.

    z = x · Wᵀ + b, rounded to x's dtype        W = lm_head;  a chunk of rows at a time
    seams = body(z, inputs)                     one or a few numbers a row: ``logits/row_programs``
    dx = dz · W,  dW = Σ dzᵀ · x,  db = Σ_rows dz        dz: the vjp of the body

With ``cotangents`` of the seams the forward computes the gradients beside them, while a chunk of logits exists: three
products. The upstream gradients of the seams are then one factor times the cotangents. Without, the backward makes the
logits again: four products. Rows whose cotangents are all 0 are left out where their seams are not read otherwise
(``skips``), and in the backward: prompts where only answers are trained. Their seams and gradients are 0.

The last inputs of the body may be logits of other heads without a gradient, a teacher's: ``heads`` has what they are made
of, a chunk at a time. Each of them is x (m, k), the weight (v, k), and the bias (v) or an empty tensor.

Shapes     x: (m, h); lm_head: (v, h); bias: (v); inputs: (m, ..) or any, as the program says; seams: (m, ..).
Dtypes     x, lm_head, bias alike: bf16 | fp32, and so are those of a head; inputs and seams any.
           Gradients of inputs that have no rows are added up in
           fp32.
Saved      x, lm_head, bias and the inputs; with cotangents dx, dW, db and the gradients of the inputs.
Source     Liger-Kernel's chunked losses (arXiv:2410.10989), here for any loss.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from fx_fusion.kernels.logits.logit_chunks import each_chunk, padded, rows_to_keep
from fx_fusion.kernels.logits.row_programs import in_an_op, program
from fx_fusion.kernels.logits.scaled import factor_behind, scaled_gradients
from fx_fusion.ops.library import plain_op, register_autograd


def _run(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks, skips):
    """Return the seams, and dx, dW, db and the gradients of the inputs (None where they are not needed)."""
    kept = None
    if cotangents and skips:
        counts = [c != 0 if c.dim() == 1 else (c != 0).flatten(1).any(1) for c in cotangents]
        kept = rows_to_keep(torch.stack(counts).any(0), lm_head.shape[0])
    if kept is None:
        return _run_all(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks)
    per_row = [of.per_row for of in program(key).inputs]
    some = [i[kept] if of_rows else i for i, of_rows in zip(inputs, per_row, strict=False)]
    some_heads = [t if i % 3 else t[kept] for i, t in enumerate(heads)]
    cotangents = [c[kept] for c in cotangents]
    seams, (dx, dw, db, *d_inputs) = _run_all(
        x[kept], lm_head, bias, some, some_heads, cotangents, key, needs, small_chunks, of_rows=x.shape[0]
    )

    def whole(t):
        return None if t is None else t.new_zeros((x.shape[0], *t.shape[1:])).index_copy_(0, kept, t)

    d_inputs = [whole(d) if of_rows else d for d, of_rows in zip(d_inputs, per_row, strict=False)]
    return [whole(seam) for seam in seams], (whole(dx), dw, db, *d_inputs)


def _run_all(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks, of_rows=None):
    """Return what ``_run`` does, of all rows. ``of_rows``: how many rows there were before some were left out."""
    rows = program(key)
    m = x.shape[0]
    x, lm_head = x.contiguous(), lm_head if lm_head.stride(-1) == 1 else lm_head.contiguous()
    inputs = [i.contiguous() for i in inputs]
    cotangents = None if cotangents is None else [c.contiguous() for c in cotangents]
    seams = [torch.empty((m, *shape), dtype=dtype, device=x.device) for shape, dtype in rows.seams]
    wanted = cotangents is not None
    d_inputs = [
        (torch.empty_like(i) if of.per_row else torch.zeros(i.shape, dtype=torch.float32, device=i.device))
        if wanted and want else None
        for i, of, want in zip(inputs, rows.inputs, rows.wants, strict=False)
    ]  # fmt: skip
    heads = [(xs, padded(w), padded(b) if b.numel() else None) for xs, w, b in zip(*[iter(heads)] * 3, strict=True)]

    def fill(logits, v, index, weight, options, loss, upstream, dlogits, *_):
        start = int(index[0])  # on the CPU
        part = slice(start, start + len(index))
        z, given = logits[:, :v], [i[part] if of.per_row else i for i, of in zip(inputs, rows.inputs, strict=False)]
        for (xs, w, b), of in zip(heads, rows.inputs[len(inputs) :], strict=True):
            others = torch.mm(xs[part], w.t()) if b is None else torch.addmm(b, xs[part], w.t())
            others = others[:, : of.shape[0]]
            given.append(others if others.dtype == of.dtype else others.to(of.dtype).contiguous())
        results = in_an_op(rows, z, *(c[part] for c in cotangents), *given) if wanted else rows.values(z, *given)
        found, gradients = results[: len(seams)], iter(results[len(seams) :])
        for whole, some in zip(seams, found, strict=True):
            whole[part] = some
        for d, of in zip(d_inputs, rows.inputs, strict=False):
            if d is not None:
                if of.per_row:
                    d[part] = next(gradients)
                else:
                    d += next(gradients)

    index, nothing = torch.arange(m), torch.empty(m, 0)
    needs = needs if wanted else [False] * 3
    dx, dw, db = each_chunk(
        x, lm_head, bias, index, None, (0, 0.0, 0.0, 1.0), None, needs, nothing, small=small_chunks, fill=fill,
        of_rows=of_rows,
    )  # fmt: skip
    return seams, (dx, dw, db, *d_inputs)


def _given(tensors, like):
    """Return gradients in the dtypes of what they are of, empty ones where there are none."""
    return [
        torch.empty(0, dtype=of.dtype, device=of.device) if t is None else t.to(of.dtype)
        for t, of in zip(tensors, like, strict=True)
    ]


def _fwd(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks=False, skips=False):
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


def _fake(x, lm_head, bias, inputs, heads, cotangents, key, needs, small_chunks=False, skips=False):
    seams = [x.new_empty((x.shape[0], *shape), dtype=dtype) for shape, dtype in program(key).seams]
    return seams if not cotangents else [*seams, *_fake_gradients(x, lm_head, bias, inputs, key, needs)]


def _fake_bwd(cotangents, x, lm_head, bias, inputs, key, needs, small_chunks=False):
    return _fake_gradients(x, lm_head, bias, inputs, key, needs)


_OPERANDS = "Tensor x, Tensor lm_head, Tensor? bias, Tensor[] inputs"
linear_rows = plain_op(
    "linear_rows",
    f"({_OPERANDS}, Tensor[] heads, Tensor[] cotangents, str program, bool[] needs, bool small_chunks=False,"
    " bool skips=False) -> Tensor[]",
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
    ctx.set_materialize_grads(False)
    ctx.cotangents = len(cotangents)
    ctx.now, ctx.count, ctx.of_heads, ctx.has_bias = bool(cotangents), len(given), len(heads), bias is not None
    if ctx.now:
        ctx.save_for_backward(*cotangents, *output[len(cotangents) :])
        ctx.mark_non_differentiable(*output[len(cotangents) :])
    else:
        ctx.save_for_backward(x, lm_head, *(() if bias is None else (bias,)), *given)
        ctx.rows, ctx.device = x.shape[0], x.device


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
        found = linear_rows_bwd(cotangents, x, lm_head, bias, inputs, ctx.key, ctx.needs, ctx.small)
    dx, dw, db, *d_inputs = found
    needed = [g if n else None for g, n in zip((dx, dw, db), ctx.needs, strict=True)]
    return *needed, [d if want else None for d, want in zip(d_inputs, wants, strict=False)], *no_grads


register_autograd("linear_rows", _backward, _setup_context)
