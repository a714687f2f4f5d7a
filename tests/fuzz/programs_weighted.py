"""Families around losses of rows: numbers that are made of them, distributions instead of classes, both together."""

from __future__ import annotations

from tests.fuzz.maker import Maker
from tests.fuzz.programs_loss import H, V, reads, scaled


def head(m: Maker) -> str:
    """Logits (B, S, V) of an lm_head."""
    h = m.activation("h", f"B, S, {H}")
    return m.linear(h, m.weight("head", f"{V}, {H}"), m.weight("bias", f"{V}") if m.chance(0.2) else None)


def rows_of(m: Maker, z: str) -> str:
    """One loss a row, (B, S)."""
    target = m.given(
        "target", f"torch.randint(0, {V}, (B, S), generator=g)" + m.pick("", "", ".masked_fill(torch.arange(S) < 2, -100)")
    )
    if m.chance(0.3):
        return m.let("rows", f"{m.pick('-', '')}F.log_softmax({z}, -1).gather(-1, {target}.clamp(min=0)[..., None]).squeeze(-1)")
    extra = m.pick("", "", ", label_smoothing=0.1", ", ignore_index=0")
    if m.chance(0.3):
        return m.let("rows", f"F.cross_entropy({z}.transpose(1, 2), {target}, reduction='none'{extra})")
    return m.let(
        "rows", f"F.cross_entropy({z}.reshape(-1, {V}), {target}.reshape(-1), reduction='none'{extra}).view({target}.shape)"
    )


def mask(m: Maker, shape: str = "B, S") -> str:
    """Weights of rows, in another dtype sometimes, with zeros mostly, with a gradient rarely."""
    text = m.pick(
        f"(torch.rand({shape}, generator=g) > 0.4).float()", f"torch.rand({shape}, generator=g) > 0.4",
        f"torch.randint(0, 3, ({shape},), generator=g)", f"torch.rand({shape}, generator=g) - 0.3",
        "(torch.arange(S) > 1).float()", f"(torch.rand({shape}, generator=g) > 0.4).to(torch.bfloat16)",
    )  # fmt: skip
    grad = "leaf" if m.chance(0.08) and "rand" in text and ">" not in text and "randint" not in text else ""
    return m.given("mask", text, grad, m.pick("", "float32") if grad else "")


def number(m: Maker, rows: str, *, classes: bool = False) -> str:
    """A number that is made of rows by steps that are linear in them, most of the time."""
    if classes:
        weigh = f"{rows} * {mask(m)}[..., None]" if m.chance(0.4) else rows
        rows = m.let("rows", f"({weigh}){m.pick('.sum(-1)', '.sum(dim=-1)', '.mean(-1)', '.sum(-1, keepdim=True).squeeze(-1)')}")
    for _ in range(m.pick(0, 1, 1, 2)):
        by, n = mask(m), m.pick("0.5", "2", "3.0")
        rows = m.let("rows", m.pick(
            f"{rows} * {by}", f"{by} * {rows}", f"{rows} * {by}", f"torch.where({by} != 0, {rows}, 0.0)", f"-{rows}",
            f"{rows}.masked_fill({by} == 0, 0)", f"{rows} / {n}", f"{rows}.float()", f"{rows} * {by}.sum()", f"{rows}.view(-1).view(B, S)",
            f"{rows} / ({by}.sum(-1, keepdim=True) + 3)", f"{rows} + 1", f"{rows}.square()", f"{rows} * {rows}.detach()",
            f"torch.where({by} != 0, {rows}, 1.0)", f"{rows}.t().t()",
        ).replace("view(B, S)", f"view({rows}.shape)"))  # fmt: skip
    by = mask(m)
    return m.let("loss", m.pick(
        f"{rows}.sum()", f"{rows}.mean()", f"{rows}.sum() / ({by}.sum() + 3)", f"({rows} * {by}).sum() / {by}.sum().clamp(min=1)",
        f"{rows}.sum(-1).mean()", f"{rows}.flatten().sum() * 0.1", f"({rows}.sum(1) / {rows}.shape[1]).sum()", f"{rows}.mean(0).sum()",
        f"{rows}.sum((0, 1))", f"{rows}.mean(dim=-1, keepdim=True).sum()", f"{rows}.max()", f"{rows}[:, 1:].mean()", rows,
        f"{rows}.sum(dtype=torch.float32)",
    ))  # fmt: skip


def weighed(m: Maker) -> None:
    """Losses of rows of an lm_head, weighed and added up; a part of it is returned too, sometimes."""
    logits = head(m)
    rows = rows_of(m, scaled(m, logits) if m.chance(0.5) else logits)
    m.out(number(m, rows))
    if m.chance(0.15):
        m.out(f"{rows}.detach()")
    if m.chance(0.4):
        m.out(logits)
        reads(m, 1, True)


def distribution(m: Maker, *, log: bool) -> str:
    """A distribution for each row, or its logarithm."""
    grad = m.pick("", "", "", "", "leaf")
    t = m.given("teacher", f"torch.randn(B, S, {V}, generator=g) * 2", grad)
    if m.chance(0.2):
        t = m.let("t", m.pick(f"{t}.detach()", f"{t}.sin()"))
    if m.chance(0.4):
        t = m.let("t", m.pick(f"{t}.float()", f"{t} / 2.0", f"{t} * 0.5"))
    name = "log_softmax" if log else "softmax"
    q = m.let("q", m.pick(f"F.{name}({t}, dim=-1)", f"{t}.{name}(-1)", f"torch.{name}({t}.float(), -1)"))
    if m.chance(0.1):
        m.out(f"{q}.argmax(-1)")
    return q


def divergence(m: Maker, z: str) -> str:
    """A number that says how far logits are from a distribution."""
    logp = m.let("logp", m.pick(f"{z}.log_softmax(-1)", f"F.log_softmax({z}, dim=-1)", f"F.log_softmax({z}.float(), -1)"))
    kind = m.pick("kl", "kl", "kl none", "log", "product", "hand", "cross_entropy")
    q = distribution(m, log=kind == "log")
    if kind == "kl":
        return m.let("loss", f"F.kl_div({logp}, {q}, reduction={m.pick('batchmean', 'sum', 'mean')!r})")
    if kind == "cross_entropy":
        how = m.pick("", ", reduction='sum'", ", label_smoothing=0.1")
        return m.let("loss", f"F.cross_entropy({z}.flatten(0, 1), {q}.flatten(0, 1){how})")
    each = {
        "kl none": f"F.kl_div({logp}, {q}, reduction='none')", "log": f"F.kl_div({logp}, {q}, reduction='none', log_target=True)",
        "product": m.pick(f"-({q} * {logp})", f"{logp} * {q}", f"-{logp} * {q}"), "hand": f"{q} * ({q}.log() - {logp})",
    }[kind]  # fmt: skip
    return number(m, m.let("each", each), classes=True)


def distilled(m: Maker) -> None:
    """An lm_head and a divergence from a teacher, the usual loss of the same logits beside it, sometimes."""
    logits = head(m)
    soft = divergence(m, m.let("z", f"{logits} / 2.0") if m.chance(0.5) else logits)
    if m.chance(0.5):
        hard = number(m, rows_of(m, logits)) if m.chance(0.5) else rows_of(m, logits) + ".mean()"
        both = m.pick(f"{soft} + {hard}", f"0.5 * {hard} + 0.5 * {soft}", f"({soft} - {hard}) / 3", f"{hard} - 2 * {soft}")
        soft = m.let("both", both)
    m.out(soft)
    if m.chance(0.3):
        m.out(logits)
        reads(m, 1, True)
