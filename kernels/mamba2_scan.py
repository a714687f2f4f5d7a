"""The scan of Mamba-2, forward and backward: a state of each head that decays, chunk by chunk.

    s[l]  = A · (dt[0] + ... + dt[l])                        of one head; A, dt: numbers
    h[l]  = exp(A · dt[l]) · h[l − 1] + dt[l] · x[l] ⊗ B[l]   (p, n), 0 before the first token
    y[l]  = h[l] · C[l] + D · x[l]

Within a chunk of Q tokens it is a product with a masked square, between chunks a recurrence (h: the state before it):

    M[l, k] = (C[l] · B[k]) · exp(s[l] − s[k])  for k ≤ l     w[k] = exp(s[Q − 1] − s[k])
    y[l]    = Σ_k M[l, k] · dt[k] · x[k] + exp(s[l]) · h · C[l] + D · x[l]
    next h  = exp(s[Q − 1]) · h + Σ_k w[k] · dt[k] · x[k] ⊗ B[k]

    g       = the gradient of the next h:  previous g = exp(s[Q − 1]) · g + Σ_l exp(s[l]) · dy[l] ⊗ C[l]
    u[k]    = Σ_l M[l, k] · dy[l] + w[k] · g · B[k]          dx = dt · u + D · dy
    S[l, k] = (dy[l] · x[k]) · exp(s[l] − s[k]) · dt[k]      summed over the heads of a group, for
    dC[l]   = Σ_k S[l, k] · B[k] + Σ_heads exp(s[l]) · dy[l] · h
    dB[k]   = Σ_l S[l, k] · C[l] + Σ_heads w[k] · dt[k] · x[k] · g
    da[j]   = Σ_{k < j ≤ l} (C[l] · B[k]) · S[l, k]
              + Σ_{l ≥ j} exp(s[l]) · dy[l] · h · C[l] + Σ_{k < j} w[k] · dt[k] · x[k] · g · B[k] + exp(s[Q − 1]) · g · h
    ddt     = x · u + A · da                                 dA = Σ dt · da          dD = Σ dy · x

Forward: the end of each chunk's state, the states one after another, y. Backward: both states so, then dx, ddt, dA and dD
by head, then dB and dC by group, whose heads are summed by one program. No atomics. Exponents are differences of sums in
float64, because differences of sums in float32 lose the small steps behind large ones.

Shapes     x, y: (b, t, heads, p); dt: (b, t, heads); A, D: (heads); B, C: (b, t, groups, n). p at most 64.
Dtypes     bf16 | fp16 | fp32, mixed; y fp32. Products in TF32 three times over, as exact as fp32; C · B of 16 bits at once;
           in TF32 once where torch.backends.cuda.matmul.allow_tf32 says so.
Saved      the inputs. States are computed again.
Traffic    forward 2·b·t·heads·p elements and three times the states, (b, t / Q, heads, p, n) fp32; backward 4·b·t·heads·p
           and eight times the states.
Source     Dao and Gu 2024, arXiv:2405.21060 (Mamba-2).
"""

import torch
import triton
import triton.language as tl

from fx_fusion.kernels.lib.device import multiprocessors, shared_memory
from fx_fusion.kernels.lib.integers import cdiv, next_power_of_2
from fx_fusion.kernels.lib.plan import Plan, planner
from fx_fusion.ops.fused_op import fused_op
from fx_fusion.ops.launch import launch

MOST_CHANNELS = 64  # of a head: with more the backward spills its registers


@triton.jit
def _place(parts, chunks, Q: tl.constexpr):
    """Return the part (a head, or a group) and the sequence of program_id(0), and its chunk's Q tokens: from 0, and from the
    first of the sequence."""
    place = tl.program_id(0) // parts
    at = tl.arange(0, Q)
    return tl.program_id(0) % parts, (place // chunks).to(tl.int64), at, place % chunks * Q + at


@triton.jit
def _decays(dt_ptr, A_ptr, head, tokens, live, stride):
    """Return dt, 0 behind the last token, and the sums s as two float32 numbers each, high and low."""
    dt = tl.load(dt_ptr + tokens * stride, live, 0.0).to(tl.float32)
    s = tl.cumsum(dt.to(tl.float64) * tl.load(A_ptr + head).to(tl.float64), 0)
    high = s.to(tl.float32)
    return dt, high, (s - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _last(value, at, Q: tl.constexpr):
    """Return the last of Q numbers."""
    return tl.sum(tl.where(at == Q - 1, value, 0.0), 0)


@triton.jit
def _tile(ptr, rows, cols, live, columns, stride):
    """Return (rows, columns) from memory, 0 outside; unit stride along columns."""
    at = ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(at, live[:, None] & (cols < columns)[None, :], 0.0)


@triton.jit
def _state(ptr, p, n, channels, size):
    """Return a block of a state, (p, n) float32, 0 outside."""
    there = (p < channels)[:, None] & (n < size)[None, :]
    return tl.load(ptr + p[:, None] * size + n[None, :], there, 0.0)


@triton.jit
def _parts(a):
    """Return three numbers of 8 bits whose sum is a, each."""
    high = a.to(tl.bfloat16)
    rest = a - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    """Return a · b + total. A product of bfloat16 and float32 is three of bfloat16, and loses nothing."""
    if PRECISION == "ieee":  # Triton's interpreter takes the bits of bfloat16 for integers
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    elif a.dtype == b.dtype and a.dtype != tl.float32:
        total = tl.dot(a, b, total)
    elif a.dtype == tl.bfloat16 and b.dtype == tl.float32 and PRECISION == "tf32x3":
        high, middle, low = _parts(b)
        total = tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low, total)))
    elif b.dtype == tl.bfloat16 and a.dtype == tl.float32 and PRECISION == "tf32x3":
        high, middle, low = _parts(a)
        total = tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b, total)))
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    return total


@triton.jit
def _between(high, low, at):
    """Return exp(s[l] − s[k]) for k ≤ l, else 0."""
    apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.exp(tl.where(at[:, None] >= at[None, :], apart, float("-inf")))


@triton.jit
def _same_products(
    C_ptr, B_ptr, tokens, live, size, C_token, B_token, Q: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr
):
    """Return C[l] · B[k]: (Q, Q). Products of 16 bits are exact as they are."""
    total = tl.zeros((Q, Q), tl.float32)
    for first in range(0, size, N):
        n = first + tl.arange(0, N)
        C, B = _tile(C_ptr, tokens, n, live, size, C_token), _tile(B_ptr, tokens, n, live, size, B_token)
        total = _dot(C, tl.trans(B), total, PRECISION)
    return total


@triton.jit
def _mamba2_states_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, states_ptr, totals_ptr, t, heads, groups, channels, size, chunks,
    x_batch, x_token, x_head, dt_batch, dt_token, B_batch, B_token, B_group,
    FROM_START: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store what a chunk adds to the state behind it, Σ w[k] · dt[k] · x[k] ⊗ B[k], and exp of its sum of steps. FROM_START:
    what it adds to the gradient of the state before it, Σ exp(s[l]) · x[l] ⊗ B[l], where x is dy, and B is C."""
    head, batch, at, tokens = _place(heads, chunks, Q)
    group, live = head // (heads // groups), tokens < t
    dt, high, low = _decays(dt_ptr + batch * dt_batch + head, A_ptr, head, tokens, live, dt_token)
    last_high, last_low = _last(high, at, Q), _last(low, at, Q)
    weight = tl.exp(high + low) if FROM_START else dt * tl.exp((last_high - high) + (last_low - low))
    p, n = tl.arange(0, P), tl.program_id(1) * N + tl.arange(0, N)
    x = _tile(x_ptr + batch * x_batch + head * x_head, tokens, p, live, channels, x_token).to(tl.float32)
    B = _tile(B_ptr + batch * B_batch + group * B_group, tokens, n, live, size, B_token)
    added = _dot(tl.trans(x * weight[:, None]), B, tl.zeros((P, N), tl.float32), PRECISION)
    states_ptr += tl.program_id(0).to(tl.int64) * channels * size
    there = (p < channels)[:, None] & (n < size)[None, :]
    tl.store(states_ptr + p[:, None] * size + n[None, :], added, there)
    if tl.program_id(1) == 0:
        tl.store(totals_ptr + tl.program_id(0), tl.exp(last_high + last_low))


@triton.jit
def _mamba2_passing_kernel(
    states_ptr, totals_ptr, heads, chunks, elements, BACKWARD: tl.constexpr, BLOCK: tl.constexpr
):
    """Store, in place of what each chunk adds, the state before it; BACKWARD: the gradient of the state behind it."""
    head, batch = tl.program_id(0) % heads, tl.program_id(0) // heads
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < elements
    state = tl.zeros((BLOCK,), tl.float32)
    for i in range(chunks):
        chunk = chunks - 1 - i if BACKWARD else i
        place = (batch.to(tl.int64) * chunks + chunk) * heads + head
        added = tl.load(states_ptr + place * elements + cols, live, 0.0)
        total = tl.load(totals_ptr + place)
        tl.store(states_ptr + place * elements + cols, state, live)
        state = state * total + added


@triton.jit
def _mamba2_scan_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, states_ptr, y_ptr, t, heads, groups, channels, size, chunks,
    x_batch, x_token, x_head, dt_batch, dt_token, B_batch, B_token, B_group, C_batch, C_token, C_group,
    SKIP: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store y of a chunk of one head, given the state before it."""
    head, batch, at, tokens = _place(heads, chunks, Q)
    group, live = head // (heads // groups), tokens < t
    p = tl.arange(0, P)
    B_ptr += batch * B_batch + group * B_group
    C_ptr += batch * C_batch + group * C_group
    states_ptr += tl.program_id(0).to(tl.int64) * channels * size
    dt, high, low = _decays(dt_ptr + batch * dt_batch + head, A_ptr, head, tokens, live, dt_token)
    y = tl.zeros((Q, P), tl.float32)
    for first in range(0, size, N):
        n = first + tl.arange(0, N)
        C = _tile(C_ptr, tokens, n, live, size, C_token)
        y = _dot(C, tl.trans(_state(states_ptr, p, n, channels, size)), y, PRECISION)
    y *= tl.exp(high + low)[:, None]
    M = _same_products(C_ptr, B_ptr, tokens, live, size, C_token, B_token, Q, N, PRECISION)
    M *= _between(high, low, at) * dt[None, :]
    x = _tile(x_ptr + batch * x_batch + head * x_head, tokens, p, live, channels, x_token)
    y = _dot(M, x, y, PRECISION)
    if SKIP:
        y += tl.load(D_ptr + head).to(tl.float32) * x.to(tl.float32)
    y_ptr += ((batch * t + tokens) * heads + head)[:, None] * channels + p[None, :]
    tl.store(y_ptr, y, live[:, None] & (p < channels)[None, :])


@triton.jit
def _mamba2_by_head_kernel(
    dy_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, states_ptr, slopes_ptr, dx_ptr, ddt_ptr, dA_ptr, dD_ptr,
    t, heads, groups, channels, size, chunks, dy_batch, dy_token, dy_head,
    x_batch, x_token, x_head, dt_batch, dt_token, B_batch, B_token, B_group, C_batch, C_token, C_group,
    SKIP: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dx and ddt of a chunk of one head, and its parts of dA and dD, given the state before it and the gradient of the
    one behind it, ``slopes``."""
    head, batch, at, tokens = _place(heads, chunks, Q)
    group, live = head // (heads // groups), tokens < t
    p = tl.arange(0, P)
    B_ptr += batch * B_batch + group * B_group
    C_ptr += batch * C_batch + group * C_group
    of_states = tl.program_id(0).to(tl.int64) * channels * size
    dt, high, low = _decays(dt_ptr + batch * dt_batch + head, A_ptr, head, tokens, live, dt_token)
    last_high, last_low = _last(high, at, Q), _last(low, at, Q)
    weight = tl.exp((last_high - high) + (last_low - low))
    Bg, Ch, both = tl.zeros((Q, P), tl.float32), tl.zeros((Q, P), tl.float32), tl.zeros((P,), tl.float32)
    for first in range(0, size, N):
        n = first + tl.arange(0, N)
        h, g = _state(states_ptr + of_states, p, n, channels, size), _state(slopes_ptr + of_states, p, n, channels, size)
        both += tl.sum(h * g, 1)
        B = _tile(B_ptr, tokens, n, live, size, B_token)
        Bg = _dot(B, tl.trans(g), Bg, PRECISION)
        C = _tile(C_ptr, tokens, n, live, size, C_token)
        Ch = _dot(C, tl.trans(h), Ch, PRECISION)
    x = _tile(x_ptr + batch * x_batch + head * x_head, tokens, p, live, channels, x_token)
    dy = _tile(dy_ptr + batch * dy_batch + head * dy_head, tokens, p, live, channels, dy_token).to(tl.float32)
    M = _same_products(C_ptr, B_ptr, tokens, live, size, C_token, B_token, Q, N, PRECISION) * _between(high, low, at)
    Bg *= weight[:, None]
    u = _dot(tl.trans(M), dy, Bg, PRECISION)
    of_x = tl.sum(x.to(tl.float32) * u, 1)
    # The gradient of each step's decay: by pairs of tokens with the step between them, and by both states.
    none = tl.zeros((Q, Q), tl.float32)
    pairs = _dot(dy, tl.trans(x), none, PRECISION) * M * dt[None, :]
    upto = (at[:, None] <= at[None, :]).to(tl.float32).to(tl.bfloat16)
    behind = _dot(upto, pairs, none, PRECISION)
    da = tl.sum(tl.where(at[None, :] < at[:, None], behind, 0.0), 1)
    before = tl.exp(high + low) * tl.sum(dy * Ch, 1)
    ahead = dt * tl.sum(x.to(tl.float32) * Bg, 1)
    da += tl.cumsum(before, 0, reverse=True) + tl.cumsum(ahead, 0) - ahead
    da += tl.exp(last_high + last_low) * tl.sum(both, 0)
    dx = dt[:, None] * u
    if SKIP:
        dx += tl.load(D_ptr + head).to(tl.float32) * dy
        tl.store(dD_ptr + tl.program_id(0), tl.sum(tl.sum(dy * x.to(tl.float32), 1), 0))
    row = (batch * t + tokens) * heads + head
    there = live[:, None] & (p < channels)[None, :]
    tl.store(dx_ptr + row[:, None] * channels + p[None, :], dx.to(dx_ptr.dtype.element_ty), there)
    A = tl.load(A_ptr + head).to(tl.float32)
    tl.store(ddt_ptr + row, (of_x + A * da).to(ddt_ptr.dtype.element_ty), live)
    tl.store(dA_ptr + tl.program_id(0), tl.sum(dt * da, 0))


@triton.jit
def _mamba2_by_group_kernel(
    dy_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, states_ptr, slopes_ptr, dB_ptr, dC_ptr,
    b, t, heads, groups, channels, size, chunks, several, dy_batch, dy_token, dy_head,
    x_batch, x_token, x_head, dt_batch, dt_token, B_batch, B_token, B_group, C_batch, C_token, C_group,
    Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dB and dC of a chunk of one group, of its heads number ``several`` · program_id(2) and on."""
    group, batch, at, tokens = _place(groups, chunks, Q)
    live = tokens < t
    p, n = tl.arange(0, P), tl.program_id(1) * N + tl.arange(0, N)
    S = tl.zeros((Q, Q), tl.float32)
    dB, dC = tl.zeros((Q, N), tl.float32), tl.zeros((Q, N), tl.float32)
    of_group = heads // groups
    first = tl.program_id(2) * several
    for head in range(group * of_group + first, group * of_group + tl.minimum(first + several, of_group)):
        dt, high, low = _decays(dt_ptr + batch * dt_batch + head, A_ptr, head, tokens, live, dt_token)
        weight = dt * tl.exp((_last(high, at, Q) - high) + (_last(low, at, Q) - low))
        x = _tile(x_ptr + batch * x_batch + head * x_head, tokens, p, live, channels, x_token)
        dy = _tile(dy_ptr + batch * dy_batch + head * dy_head, tokens, p, live, channels, dy_token).to(tl.float32)
        S += _dot(dy, tl.trans(x), tl.zeros((Q, Q), tl.float32), PRECISION) * _between(high, low, at) * dt[None, :]
        of_states = ((tl.program_id(0) // groups).to(tl.int64) * heads + head) * channels * size
        g = _state(slopes_ptr + of_states, p, n, channels, size)
        dB += weight[:, None] * _dot(x, g, tl.zeros((Q, N), tl.float32), PRECISION)
        h = _state(states_ptr + of_states, p, n, channels, size)
        dC = _dot(dy * tl.exp(high + low)[:, None], h, dC, PRECISION)
    B = _tile(B_ptr + batch * B_batch + group * B_group, tokens, n, live, size, B_token)
    C = _tile(C_ptr + batch * C_batch + group * C_group, tokens, n, live, size, C_token)
    dB = _dot(tl.trans(S), C, dB, PRECISION)
    dC = _dot(S, B, dC, PRECISION)
    row = ((tl.program_id(2).to(tl.int64) * b + batch) * t + tokens) * groups + group
    there = live[:, None] & (n < size)[None, :]
    tl.store(dB_ptr + row[:, None] * size + n[None, :], dB.to(dB_ptr.dtype.element_ty), there)
    tl.store(dC_ptr + row[:, None] * size + n[None, :], dC.to(dC_ptr.dtype.element_ty), there)


@planner
def mamba2_scan_plan(channels: int, size: int, x, backward: bool) -> Plan:
    """Choose by the ``channels`` of a head, the ``size`` of a row of its state, x's dtype and the shared memory of its
    device. Numbers: the largest tiles that stay below 99 KiB (of an RTX 4090), compiled for an H200; not timed.

    Returns Q tokens of a chunk, blocks of P channels and N columns of a state, ``num_warps`` and ``num_stages``."""
    rows, columns = (max(16, next_power_of_2(n)) for n in (channels, size))
    fits = shared_memory(x) >= 99 << 10
    most = 64 if x.dtype == torch.bfloat16 and fits else 32
    return Plan(Q=64 if fits else 32, P=rows, N=min(most, columns), num_warps=8 if backward else 4, num_stages=2)


def _precision(x) -> str:
    """Return how products of float32 are computed on x's device."""
    if not x.is_cuda or torch.version.hip or torch.cuda.get_device_capability(x.device)[0] < 8:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _rows(x):
    """Return x: (b, t, several, n), copied if its last dim has gaps."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


class _Scan:
    """The inputs of one launch, as the kernels take them."""

    def __init__(self, x, dt, A, B, C, plan):
        self.x, self.B, self.C = _rows(x), _rows(B), _rows(C)
        self.dt = dt if dt.stride(2) == 1 else dt.contiguous()
        self.A = A.contiguous()
        self.b, self.t, self.heads, self.channels = x.shape
        self.groups, self.size = B.shape[2:]
        self.chunks = cdiv(self.t, plan.Q)
        self.plan, self.precision = plan, _precision(x)
        self.blocks = cdiv(self.size, plan.N)
        self.sizes = self.t, self.heads, self.groups, self.channels, self.size, self.chunks

    def states(self, x, B, backward):
        """Return the state before each chunk, or the gradient of the one behind it for ``x`` = dy and ``B`` = C:
        (b, chunks, heads, p, n) float32."""
        shape = self.b, self.chunks, self.heads, self.channels, self.size
        states = torch.empty(shape, dtype=torch.float32, device=x.device)
        totals = torch.empty(shape[:3], dtype=torch.float32, device=x.device)
        programs = self.b * self.chunks * self.heads
        launch(
            _mamba2_states_kernel, (programs, self.blocks), x, self.dt, self.A, B, states, totals, *self.sizes,
            *x.stride()[:3], *self.dt.stride()[:2], *B.stride()[:3], FROM_START=backward, PRECISION=self.precision,
            **self.plan.meta(),
        )  # fmt: skip
        elements = self.channels * self.size
        grid = self.b * self.heads, cdiv(elements, 1024)
        launch(
            _mamba2_passing_kernel, grid, states, totals, self.heads, self.chunks, elements, BACKWARD=backward, BLOCK=1024,
            num_warps=4,
        )  # fmt: skip
        return states

    def launch(self, kernel, grid, tensors, sizes, strides, **options):
        """Launch a kernel that reads all inputs; ``strides``: of tensors in front of them."""
        launch(
            kernel, grid, *tensors, *sizes, *strides, *self.x.stride()[:3], *self.dt.stride()[:2], *self.B.stride()[:3],
            *self.C.stride()[:3], PRECISION=self.precision, **options, **self.plan.meta(),
        )  # fmt: skip


def _fwd(x, dt, A, B, C, D, chunk_size):
    y = _fake(x, dt, A, B, C, D, chunk_size)
    if y.numel():
        of = _Scan(x, dt, A, B, C, mamba2_scan_plan(x.shape[3], B.shape[3], x, False))
        states = of.states(of.x, of.B, False)
        tensors = of.x, of.dt, of.A, of.B, of.C, y if D is None else D.contiguous(), states, y
        grid = (of.b * of.chunks * of.heads,)
        of.launch(_mamba2_scan_kernel, grid, tensors, of.sizes, (), SKIP=D is not None)
    return y


def _bwd(dy, x, dt, A, B, C, D, chunk_size, needs):
    dx, ddt = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt))
    if not dx.numel():
        none = x.new_empty(0) if D is None else torch.zeros_like(D)
        return dx, ddt, torch.zeros_like(A), torch.zeros_like(B), torch.zeros_like(C), none
    of, dy = _Scan(x, dt, A, B, C, mamba2_scan_plan(x.shape[3], B.shape[3], x, True)), _rows(dy)
    states, slopes = of.states(of.x, of.B, False), of.states(dy, of.C, True)
    parts = torch.empty(2, of.b * of.chunks, of.heads, dtype=torch.float32, device=x.device)
    tensors = dy, of.x, of.dt, of.A, of.B, of.C, parts if D is None else D.contiguous(), states, slopes, dx, ddt, *parts
    grid = (of.b * of.chunks * of.heads,)
    of.launch(_mamba2_by_head_kernel, grid, tensors, of.sizes, dy.stride()[:3], SKIP=D is not None)
    dA = parts[0].sum(0).to(A.dtype)
    dD = x.new_empty(0) if D is None else parts[1].sum(0).to(D.dtype)
    dB, dC = _by_group(of, dy, states, slopes)
    return dx, ddt, dA, dB, dC, dD


def _by_group(of, dy, states, slopes):
    """Return dB and dC. Where there are few groups, several programs share their heads."""
    heads = of.heads // of.groups
    programs = of.b * of.chunks * of.groups * of.blocks
    several = cdiv(heads, min(heads, cdiv(4 * multiprocessors(dy), programs)))
    splits = cdiv(heads, several)
    made = [
        torch.empty(splits, *of.B.shape, dtype=like.dtype if splits == 1 else torch.float32, device=dy.device)
        for like in (of.B, of.C)
    ]
    tensors = dy, of.x, of.dt, of.A, of.B, of.C, states, slopes, *made
    grid = of.b * of.chunks * of.groups, of.blocks, splits
    of.launch(_mamba2_by_group_kernel, grid, tensors, (of.b, *of.sizes, several), dy.stride()[:3])
    if splits == 1:
        return made[0][0], made[1][0]
    return made[0].sum(0).to(of.B.dtype), made[1].sum(0).to(of.C.dtype)


def _fake(x, dt, A, B, C, D, chunk_size):
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


mamba2_scan = fused_op(
    "mamba2_scan",
    ("(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, int chunk_size) -> Tensor y", _fwd),
    (
        "(Tensor dy, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, int chunk_size, bool[] needs)"
        " -> (Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD)",
        _bwd,
    ),
    fake=_fake,
    grads=("x", "dt", "A", "B", "C", "D"),
)
