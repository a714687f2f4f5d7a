"""Families of programs: what the patterns are about, in many spellings, some of them only nearly."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.maker import Maker
from tests.fuzz.program import Program

Family = Callable[[Maker], None]


def norms(m: Maker) -> None:
    """RMSNorm and LayerNorm, alone, behind a residual add, and several in a row."""
    n = m.pick(8, 6, 16)
    x = m.activation("x", f"B, S, {n}")
    for _ in range(m.pick(1, 1, 2)):
        w = m.weight("w", f"{n}") if m.chance(0.85) else None
        b = m.weight("b", f"{n}") if w and m.chance(0.7) else None
        if m.chance(0.5):
            r = m.activation("r", f"B, S, {n}")
            x = m.let("h", m.pick(f"{x} + {r}", f"{r} + {x}", f"torch.add({x}, {r})"))
            if m.chance(0.7):
                m.out(x)
        x = m.rms_norm(x, w) if m.chance(0.5) else m.layer_norm(x, w, b)
    m.out(x)


def gated_norms(m: Maker) -> None:
    """RMSNorm with a gate before or behind it, in groups too."""
    n, groups = m.pick(8, 12), m.pick(1, 1, 2)
    x, gate, w = m.activation("x", f"B, S, {n}"), m.activation("gate", f"B, S, {n}"), m.weight("w", f"{n}")
    before = m.chance(0.5) or groups > 1
    act = m.pick(
        f"F.silu({gate}.float())", f"F.silu({gate}.to(torch.float32))", f"torch.sigmoid({gate}.float())", f"F.silu({gate})"
    )
    f = m.let("f", f"{x}.float()")
    if before:
        f = m.let("f", f"{f} * {act}")
    if groups > 1:
        f = m.let("f", m.pick(f"{f}.unflatten(-1, ({groups}, -1))", f"{f}.view(*{x}.shape[:-1], {groups}, {n // groups})"))
    var = m.let("var", f"{f}.pow(2).mean(-1, keepdim=True)")
    y = m.let("n", f"{f} * torch.rsqrt({var} + {m.eps()})")
    if groups > 1:
        y = m.let("n", m.pick(f"{y}.view({x}.shape)", f"{y}.flatten(-2)", f"{y}.reshape(*{x}.shape)"))
    y = m.let("y", m.pick(f"{w} * {y}.to({x}.dtype)", f"{w}.float() * {y}", f"{w} * {y}"))
    if not before:
        y = m.let("y", f"{y} * {act}")
    m.out(m.let("y", f"{y}.to({x}.dtype)"))


def images(m: Maker) -> None:
    """GroupNorm with and without SiLU."""
    c, groups = m.pick((8, 2), (6, 3), (4, 4), (4, 1))
    positions = m.pick("5, 6", "5, 6", "7", "2, 3, 4")
    x = m.activation("x", f"B, {c}, {positions}")
    w, b = (m.weight("w", f"{c}"), m.weight("b", f"{c}")) if m.chance(0.8) else (None, None)
    y = m.let("y", f"F.group_norm({x}, {groups}, {w}, {b}, {m.eps()})")
    if m.chance(0.6):
        y = m.let("s", m.silu(y))
    m.out(y)


def evonorms(m: Maker) -> None:
    """EvoNorm-S0 as in timm, and -B0 in training and evaluation."""
    c, groups = m.pick((8, 2), (6, 3), (4, 1))
    x = m.activation("x", f"B, {c}, 5, 6")
    v, w, b = (m.weight(n, f"{c}") for n in ("v", "w", "b"))
    v, w4, b4 = (m.let("t", f"{t}.view(1, -1, 1, 1)") for t in (v, w, b))
    if m.chance(0.5):
        grouped = m.let(
            "grouped",
            m.pick(f"{x}.reshape({x}.shape[0], {groups}, -1)", f"{x}.view({x}.shape[0], {groups}, {c // groups}, 5, 6)"),
        )
        dims = "2" if "reshape" in m.program.statements[-1] else "(2, 3, 4)"
        correction = m.pick("unbiased=False", "correction=0", "unbiased=True")
        std = m.let("std", f"{grouped}.float().var({dims}, {correction}, keepdim=True).add({m.eps()}).sqrt().to({x}.dtype)")
        std = m.let("std", f"{std}.expand({grouped}.shape).reshape({x}.shape)")
        top = m.let("top", m.pick(f"{x} * ({x} * {v}).sigmoid()", f"{x} * torch.sigmoid({v} * {x})"))
        m.out(m.let("y", f"{top} / {std} * {w4} + {b4}"))
        return
    if m.chance(0.6):
        var = m.let("var", f"{x}.float().var((0, 2, 3), unbiased=False)")
        running = m.given("running", f"torch.rand({c}, generator=g) + 0.5", "", "float32")
        m.do(f"{running}.copy_({running} * 0.9 + {var}.detach() * 0.1)")
    else:
        var = m.given("running", f"torch.rand({c}, generator=g) + 0.5", "", "float32")
    eps = m.eps()
    left = m.let("left", f"{var}.add({eps}).sqrt().view(1, -1, 1, 1).to({x}.dtype)")
    std = m.let("std", f"{x}.float().var((2, 3), unbiased=False, keepdim=True).add({eps}).sqrt().to({x}.dtype)")
    right = m.let("right", m.pick(f"{x} * {v} + {std}", f"{std} + {v} * {x}"))
    m.out(m.let("y", f"{x} / {m.pick(f'{left}.max({right})', f'torch.maximum({right}, {left})')} * {w4} + {b4}"))


def glus(m: Maker) -> None:
    """Products of a gate and something else, from projections or given."""
    n = m.pick(8, 6)
    x = m.activation("x", f"B, S, {n}")
    if m.chance(0.4):
        both = m.linear(x, m.weight("w", f"{2 * n}, {n}"))
        gate, up = m.let("gate", f"{both}[..., :{n}]"), m.let("up", f"{both}[..., {n}:]")
    elif m.chance(0.5):
        gate, up = (m.linear(x, m.weight("w", f"{n}, {n}")) for _ in range(2))
    else:
        gate, up = x, m.activation("up", f"B, S, {n}")
    if m.chance(0.15):
        m.out(m.let("s", m.silu(gate)))
        return
    p = m.glu(gate, up)
    m.out(m.linear(p, m.weight("w", f"{n}, {n}")) if m.chance(0.3) else p)


def embeddings(m: Maker) -> None:
    """Lookups in a table that is trained, with a scale, a norm or a second table behind them."""
    v, n = m.pick(12, 7), m.pick(8, 6)
    ids, table = m.integers("ids", "B, S", v), m.weight("table", f"{v}, {n}")
    padding = m.pick("", "", ", padding_idx=3", ", padding_idx=-1")
    h = m.let(
        "h",
        m.pick(
            f"F.embedding({ids}, {table}{padding})",
            f"F.embedding({ids}.{m.pick('int()', 'clone()', 'view(-1)')}, {table}{padding})",
            f"{table}[{ids}]",
        ),
    )
    if m.chance(0.3):
        h = m.let("h", f"{h} * {n}**0.5")
    if m.chance(0.3):
        h = m.let(
            "h", f"{h} + F.embedding({m.integers('ids', 'B, S', 5)}.view({h}.shape[:-1]), {m.weight('table', f'5, {n}')})"
        )
    if m.chance(0.4):
        h = m.rms_norm(h, m.weight("w", f"{n}"))
    m.out(h)
    if m.chance(0.3):  # tied
        m.out(m.let("z", f"F.linear({h}, {table})"))


def convolutions(m: Maker) -> None:
    """Causal convolutions of channels: cut behind or padded in front, channels innermost or not, gates around them."""
    c, taps, tokens = m.pick(6, 8), m.pick(2, 3, 4, 4, 4, 5), m.pick(1, 7, 12, 21)
    innermost = m.chance(0.6)
    x = m.activation("x", f"B, {tokens}, {c}" if innermost else f"B, {c}, {tokens}")
    if innermost:
        x = m.let("x", m.pick(f"{x}.transpose(1, 2)", f"{x}.mT", f"{x}.permute(0, 2, 1)"))
    if m.chance(0.3):
        x = m.let("x", f"{x} * {m.activation('gate', f'B, {c}, {tokens}')}")
    w, b = m.weight("w", f"{c}, 1, {taps}"), m.weight("b", f"{c}") if m.chance(0.6) else None
    if m.chance(0.7):
        y = m.let("y", f"F.conv1d({x}, {w}, {b}, padding={taps - 1}, groups={c})")
        y = m.let("y", m.pick(f"{y}[..., :{tokens}]", f"{y}[:, :, :{x}.shape[-1]]", f"{y}.narrow(-1, 0, {tokens})"))
    else:
        padded = m.let("padded", f"F.pad({x}, ({taps - 1}, 0){m.pick('', ', value=0.0')})")
        y = m.let("y", f"F.conv1d({padded}, {w}, {b}, groups={c})")
    if m.chance(0.6):
        y = m.let("s", m.silu(y))
    m.out(m.let("z", m.pick(f"{y}.transpose(1, 2)", f"{y} * 2", f"{y}.mT.reshape(B, {tokens}, 2, {c // 2})", f"{y} + {x}")))


def experts(m: Maker) -> None:
    """Layers of experts: choices sorted and counted, rows there and back, biases, weights before or behind the experts."""
    t, h, inner, e = m.pick(1, 6, 11), m.pick(4, 5), m.pick(4, 6), m.pick(2, 3, 5)
    k = m.pick(*(k for k in (1, 2, 2, 3) if k <= e))
    x, scores = m.activation("x", f"{t}, {h}"), m.activation("scores", f"{t}, {e}")
    chosen = m.let("chosen", f"{m.pick(scores, f'{scores}.softmax(-1)')}.topk({k}, {m.pick(-1, 1)})")
    ids = m.let("ids", f"{chosen}[1].{m.pick('reshape', 'view')}(-1)")
    ordered = m.let("ordered", f"torch.sort({ids}, stable=True)")
    keys, perm = m.let("keys", f"{ordered}[0]"), m.let("perm", f"{ordered}[1]")
    ends = m.let("ends", f"torch.cumsum(torch.histc({keys}.float(), bins={e}, min=0, max={e - 1}), 0, dtype=torch.int32)")
    rows = m.let("rows", f"{x}[{perm} // {k}]" if m.chance(0.7) else f"{x}.index_select(0, {perm} // {k})")
    if m.chance(0.3):
        rows = m.let("rows", f"{rows} * {chosen}[0].reshape(-1)[{perm}].unsqueeze(-1)")
    up, down = m.weight("up", f"{e}, {h}, {2 * inner}"), m.weight("down", f"{e}, {inner}, {h}")
    hidden = m.let("h", f"torch.einsum('sh,shi->si', {rows}, {up}[{keys}])")
    if m.chance(0.4):
        m.do(f"{hidden}.add_({m.weight('b', f'{e}, {2 * inner}')}[{keys}])")
    y = m.let("a", f"F.silu({hidden}.chunk(2, -1)[0]) * {hidden}.chunk(2, -1)[1]")
    y = m.let("y", f"torch.einsum('si,sih->sh', {y}, {down}[{keys}])")
    if m.chance(0.4):
        m.do(f"{y}.add_({m.weight('b', f'{e}, {h}')}[{keys}])")
    if m.chance(0.7):
        y = m.let("y", f"{y} * {chosen}[0].reshape(-1)[{perm}].{m.pick('unsqueeze(-1)', 'view(-1, 1)')}")
    if m.chance(0.6):
        inverse = m.let("inverse", f"torch.empty_like({perm})")
        m.do(f"{inverse}[{perm}] = torch.arange({t * k})")
    else:
        inverse = m.let("inverse", f"torch.argsort({perm})")
    back = m.let("back", f"{y}[{inverse}].{m.pick('view', 'reshape')}({t}, {k}, {h})")
    m.out(m.let("z", f"{back}.sum({m.pick('dim=1', '1', '-2')}) + {m.pick('0', x)} + {ends}[-1] * 0"))


LATER = 10**7  # seeds from here on are of families that came later: the program of a seed is always the same one


def families() -> dict[str, Family]:
    """Every family by name, in a fixed order: a seed says which."""
    return {name: family for _, group in _groups() for name, family in group.items()}


def _first() -> dict[str, Family]:
    from tests.fuzz import programs_attention as attention
    from tests.fuzz import programs_loss as loss

    chosen = (
        norms, gated_norms, images, evonorms, glus, embeddings, attention.ropes, attention.complex_ropes,
        attention.written_out, attention.masked, attention.masked, attention.grouped, loss.losses, loss.heads, loss.heads,
        loss.policies, loss.modules, loss.blocks,
    )  # fmt: skip
    return {f"{i} {f.__name__}": f for i, f in enumerate(chosen)}


def _later() -> dict[str, Family]:
    from tests.fuzz import programs_weighted as weighted

    return {f"later {f.__name__}": f for f in (weighted.weighed, weighted.distilled)}


def _of_rows() -> dict[str, Family]:
    from tests.fuzz import programs_rows as rows

    return {f"rows {f.__name__}": f for f in (rows.rows_inside, rows.rows_behind, rows.rows_outside)}


def _returned() -> dict[str, Family]:
    from tests.fuzz import programs_rows as rows

    return {"returned rows_returned": rows.rows_returned}


def _convolutions() -> dict[str, Family]:
    return {"convolutions convolutions": convolutions}


def _experts() -> dict[str, Family]:
    return {"experts experts": experts}


def _scans() -> dict[str, Family]:
    from tests.fuzz.programs_scans import scans

    return {"scans scans": scans}


def _groups() -> tuple[tuple[int, dict[str, Family]], ...]:
    """Groups of families, each with its first seed."""
    made = _first, _later, _of_rows, _returned, _convolutions, _experts, _scans
    return tuple((i * LATER, group()) for i, group in enumerate(made))


def seed_of(family: str, n: int) -> int:
    """The seed of program ``n`` of a family."""
    start, group = next(found for found in _groups() if family in found[1])
    return start + n * len(group) + list(group).index(family)


def program_of(seed: int) -> Program:
    """The program of a seed as its family makes it, before mutations."""
    by_name = next(group for start, group in reversed(_groups()) if seed >= start)
    name = list(by_name)[seed % len(by_name)]
    maker = Maker(seed, name)
    by_name[name](maker)
    maker.program.family = name.split()[1]
    return maker.program
