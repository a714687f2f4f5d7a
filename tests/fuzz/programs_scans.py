"""A family of Mamba-2 scans, written out over chunks as transformers does, of random sizes and with random ops around."""

from __future__ import annotations

from tests.fuzz.maker import Maker


def scans(m: Maker) -> None:
    """A projection that is split, perhaps a convolution, the scan with or without D, and a gate or a norm of its result."""
    b, t, q = 2, m.pick(1, 6, 11, 16), m.pick(4, 8, 16)
    groups, several, p, n = m.pick(1, 2), m.pick(1, 2), m.pick(4, 6), m.pick(4, 8)
    heads = groups * several
    rows, columns = heads * p, groups * n
    packed = m.activation("zxbc", f"{b}, {t}, {rows + 2 * columns}")
    if m.chance(0.4):
        cut = m.let("conv", f"F.conv1d({packed}.transpose(1, 2), {m.weight('w', f'{rows + 2 * columns}, 1, 4')}, None, padding=3, "
                            f"groups={rows + 2 * columns})[..., :{t}]")  # fmt: skip
        packed = m.let("packed", f"F.silu({cut}).transpose(1, 2)")
    parts = m.let("parts", f"torch.split({packed}, [{rows}, {columns}, {columns}], dim=-1)")
    x = m.let("x", f"{parts}[0].{m.pick('view', 'reshape')}({b}, {t}, {heads}, {p})")
    B, C = (m.let(name, f"{parts}[{i}].{m.pick('view', 'reshape')}({b}, {t}, {groups}, {n})") for i, name in ((1, "B"), (2, "C")))
    dt = m.let("dt", f"{m.pick('F.softplus', 'torch.sigmoid')}({m.activation('dt', f'{b}, {t}, {heads}')})")
    A = m.let("A", f"-torch.exp({m.given('A_log', f'torch.rand({heads}, generator=g)', 'leaf')}.float())")
    y = scan(m, x, dt, A, B, C, m.weight("D", f"{heads}") if m.chance(0.7) else None, (b, t, heads, p), (groups, n), q)
    y = m.let("y", f"{y}.reshape({b}, {t}, -1)")
    gate = m.activation("gate", f"{b}, {t}, {rows}")
    m.out(m.let("z", m.pick(f"{y} * F.silu({gate}.float())", f"{y}.to({gate}.dtype) + {gate}", f"{y} @ torch.ones({rows}, 3)", y)))


def scan(m: Maker, x: str, dt: str, A: str, B: str, C: str, D: str | None, shape: tuple, state: tuple, q: int) -> str:
    """The scan, statement by statement."""
    (b, t, heads, p), (groups, n) = shape, state
    behind = (q - t % q) % q
    pad = f"(0, 0, 0, 0, 0, {behind}, 0, 0), mode='constant', value=0"
    f = m.let("x", f"{x}.float()")
    B, C = (m.let("r", f"{r}.float().repeat_interleave({heads // groups}, dim=2, output_size={heads})") for r in (B, C))
    skip = None if D is None else m.let("skip", f"{D}[..., None] * F.pad({f}, {pad})")
    f = m.let("x", f"{f} * {dt}[..., None].float()")
    steps = m.let("steps", f"{A}.to(torch.float32) * {dt}.float()")
    f, B, C = (m.let("c", f"F.pad({r}, {pad}).reshape({b}, -1, {q}, {heads}, {w})") for r, w in ((f, p), (B, n), (C, n)))
    steps = m.let("steps", f"F.pad({steps}, (0, 0, 0, {behind}, 0, 0), mode='constant', value=0).reshape({b}, -1, {q}, {heads})")
    steps = m.let("steps", f"{steps}.permute(0, 3, 1, 2)")
    sums, chunks = m.let("sums", f"torch.cumsum({steps}, dim=-1)"), (t + behind) // q
    decays = between(m, steps, f"{b}, {heads}, {chunks}, {q}", q)
    products = m.let("g", f"torch.einsum('bclhn,bcshn->bclsh', {C}, {B}) * {decays}.permute(0, 2, 3, 4, 1)")
    within = m.let("within", f"torch.einsum('bclsh,bcshp->bclhp', {products}, {f})")
    ends = m.let("ends", f"torch.exp({sums}[:, :, :, -1:] - {sums})")
    states = m.let("s", f"torch.einsum('bclhn,bclhp->bchpn', {B} * {ends}.permute(0, -2, -1, 1)[..., None], {f})")
    states = m.let("s", f"torch.cat([torch.zeros_like({states}[:, :1]), {states}], dim=1)")
    last = m.let("last", f"F.pad({sums}[:, :, :, -1], (1, 0))")
    passed = between(m, last, f"{b}, {heads}, {chunks + 1}", chunks + 1)
    states = m.let("s", f"torch.einsum('bzch,bzhpn->bchpn', {passed}.transpose(1, 3), {states})[:, :-1]")
    before = m.let("before", f"torch.einsum('bclhn,bchpn->bclhp', {C}, {states})")
    before = m.let("before", f"{before} * torch.exp({sums}).permute(0, 2, 3, 1)[..., None]")
    y = m.let("y", f"({within} + {before}).contiguous().reshape({b}, -1, {heads}, {p})")
    y = y if skip is None else m.let("y", f"{y} + {skip}")
    return m.let("y", f"{y}[:, :{t}]") if behind else y


def between(m: Maker, steps: str, shape: str, n: int) -> str:
    """exp of the sums of steps between two places, 0 above the diagonal."""
    wide = m.let("wide", f"{steps}[..., None].expand({shape}, {n})")
    kept = m.let("kept", f"torch.tril(torch.ones({n}, {n}, device={steps}.device, dtype=torch.bool), diagonal=-1)")
    total = m.let("total", f"torch.cumsum({wide}.masked_fill(~{kept}, 0), dim=-2)")
    upto = m.let("upto", f"torch.tril(torch.ones({n}, {n}, device={steps}.device, dtype=torch.bool), diagonal=0)")
    return m.let("decays", f"torch.exp({total}.masked_fill(~{upto}, -torch.inf))")
