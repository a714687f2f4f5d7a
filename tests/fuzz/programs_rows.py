"""Families of losses that treat rows of logits one by one, composed of random ops: in the graph, behind a break, outside."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.fuzz.maker import Maker
from tests.fuzz.programs_loss import H, V, reads, scaled

Let = Callable[[str, str], str]


def without_unread(lines: list[str], start: int, last: str) -> None:
    """Remove from ``start`` on the lines whose names nothing reads up to ``last``: they would keep the logits."""
    read = last
    for at in range(len(lines) - 1, start - 1, -1):
        name, _, value = lines[at].partition(" = ")
        if re.search(rf"\b{name}\b", read):
            read += f" {value}"
        else:
            del lines[at]


def logits(m: Maker) -> str:
    """Logits (B, S, V) of an lm_head."""
    h = m.activation("h", f"B, S, {H}")
    if m.chance(0.3):
        h = m.rms_norm(h, m.weight("w", f"{H}"))
    return m.linear(h, m.weight("head", f"{V}, {H}"), m.weight("bias", f"{V}") if m.chance(0.2) else None)


def composed(m: Maker, let: Let, z: str, y: str, row: str, teacher: str) -> str:
    """A number made of logits ``z``, classes ``y``, one number a row ``row``, which may have a gradient, and a ``teacher``."""
    logp = let("logp", m.pick(f"{z}.log_softmax(-1)", f"F.log_softmax({z}, dim=-1)", f"{z} - {z}.logsumexp(-1, keepdim=True)"))
    elements, rows, numbers = [z, logp], [], []
    for _ in range(m.pick(3, 5, 7, 9)):
        kind = m.random.random()
        e, other = m.pick(*elements), m.pick(*elements)
        if kind < 0.25:
            elements.append(let("e", m.pick(
                f"{e} / 2.0", f"{e}.float()", f"{e} * 0.5 + 0.25", f"{e}.softmax(-1)", f"{logp}.exp()", f"{e}.tanh()", f"{e} * {other}",
                f"{e} - {teacher}.log_softmax(-1)", f"torch.logaddexp({e}, {teacher})", f"{e}.clamp(-2, 2)", f"{e}.abs()", f"{e}.detach()",
                f"torch.where({teacher} > 0, {e}, 0.0)", f"{e}.masked_fill({teacher} > 1, 0.0)", f"{e} * {row}[..., None]",
                f"{e} - {e}.amax(-1, keepdim=True).detach()",
            )))  # fmt: skip
        elif kind < 0.6 or not rows:
            rows.append(let("r", m.pick(
                f"{e}.sum(-1)", f"{e}.mean(-1)", f"{e}.logsumexp(-1)", f"{logp}.gather(-1, {y}[..., None]).squeeze(-1)", f"{e}.amax(-1)",
                f"({e} * {teacher}.softmax(-1)).sum(-1)", f"-({logp}.exp() * {logp}).sum(-1)", f"{e}.square().sum(-1)", f"{e}[..., 2]",
                f"F.cross_entropy({e}.transpose(1, 2), {y}, reduction='none')", f"({e}.argmax(-1) == {y}).float()",
                f"F.kl_div({logp}, {teacher}.softmax(-1), reduction='none').sum(-1)", f"{e}.topk(3, -1).values.sum(-1)",
                f"F.cross_entropy({e}.reshape(-1, {V}), {y}.reshape(-1), reduction='none').view({y}.shape)",
                f"({logp}.exp() - {teacher}.softmax(-1)).abs().sum(-1)", f"({logp}.exp() * ({logp} - {teacher}.log_softmax(-1))).sum(-1)",
            )))  # fmt: skip
        elif kind < 0.8:
            r, s = m.pick(*rows), m.pick(*rows)
            rows.append(let("r", m.pick(
                f"{r} * {s}", f"{r} - {s}.detach()", f"{r} * {row}", f"torch.where({row} > 0, {r}, {s})", f"{r}.tanh().exp()", f"{r}.square()",
                f"torch.minimum({r}, {s})", f"F.softplus({r})", f"{r} * ({row} > 0)", f"({r} - {row}).clamp(-1, 1)", f"-{r}", f"{r} + {s}",
            )))  # fmt: skip
        else:
            r = m.pick(*rows)
            numbers.append(let("n", m.pick(
                f"{r}.mean()", f"{r}.sum()", f"({r} * {row}).sum() / ({row}.abs().sum() + 1)", f"{r}[:, 1:].mean()", f"{r}.sum(-1).square().mean()",
                f"F.logsigmoid({r}.sum(-1)).mean()", f"{r}.max()", f"({r}.sum(1) / {r}.shape[1]).sum()", f"{r}.float().mean()",
            )))  # fmt: skip
    if m.chance(0.2):
        parts = let("parts", m.pick(f"{z}.chunk(2, 1)", f"list(zip({z}, {y}))", f"torch.split({z}, 2, dim=1)"))
        loss = f"sum(F.cross_entropy(p.reshape(-1, {V}), {y}[0, 0].expand(p.reshape(-1, {V}).shape[0]), reduction='sum') for p in {parts})"
        if "zip" in m.program.statements[-1] or "zip" in "".join(m.program.after[-1:]):
            loss = f"sum(F.cross_entropy(p, t) for p, t in {parts})"
        numbers.append(let("n", loss))
    rows = rows or [let("r", f"{logp}.square().sum(-1)")]
    numbers = numbers[:3] + [let("n", f"{r}.mean()") for r in m.random.sample(rows, min(2, len(rows)))]
    return let("loss", " + ".join(f"{m.pick('', '0.5 * ', '2 * ')}{n}" for n in numbers))


def operands(m: Maker) -> tuple[str, str, str]:
    """Classes, one number a row, and the teacher's logits."""
    y = m.integers("y", "B, S", V)
    row = m.given("row", "torch.randn(B, S, generator=g)", m.pick("", "", "leaf"), m.pick("", "float32"))
    return y, row, m.given("teacher", f"torch.randn(B, S, {V}, generator=g)", m.pick("", "", "", "leaf"))


def rows_inside(m: Maker) -> None:
    """The loss is in the graph; the logits are returned, sometimes, and read."""
    z = logits(m)
    seen = scaled(m, z) if m.chance(0.4) else z
    given, start = operands(m), len(m.program.statements)
    loss = composed(m, m.let, seen, *given)
    without_unread(m.program.statements, start, loss)
    m.out(loss)
    if m.chance(0.3):
        m.out(z)
        reads(m, 1, True)


def rows_behind(m: Maker) -> None:
    """A graph break is between the logits and their loss."""
    z = logits(m)
    m.do("torch._dynamo.graph_break()")
    given, start = operands(m), len(m.program.statements)
    loss = composed(m, m.let, z, *given)
    without_unread(m.program.statements, start, loss)
    m.out(loss)


def rows_outside(m: Maker) -> None:
    """The function returns logits; eager code makes the loss of them."""
    z = logits(m)
    y, row, teacher = operands(m)
    m.out(z, y, f"{row} * 1", f"{teacher} * 1")
    names = iter(range(10**6))

    def let(stem: str, expression: str) -> str:
        name = f"{stem}_{next(names)}"
        m.program.after.append(f"{name} = {expression}")
        return name

    loss = composed(m, let, "r[0]" if m.chance(0.8) else "r[0].float()", "r[1]", "r[2]", "r[3]")
    without_unread(m.program.after, 0, loss)
    m.program.after.append(f"r[0] = {m.pick('0', '0', 'r[0]', f'{loss}.detach()')}")
    m.program.after.append(f"r.append({loss})")


def rows_returned(m: Maker) -> None:
    """The function returns numbers of rows, masked or not; eager code logs some, writes to some, and makes losses of them."""
    z = logits(m)
    y, row, _ = operands(m)
    seen = scaled(m, z) if m.chance(0.4) else m.let("z", f"{z}.float()")
    logp = m.let("logp", f"{seen}.log_softmax(-1)")
    mask = m.let("mask", f"{row} > {m.pick(-1.0, 0.0, 0.5, 9.0)}")
    rows = []
    for _ in range(m.pick(1, 2, 3)):
        rows.append(m.let("r", m.pick(
            f"{logp}.gather(-1, {y}[..., None]).squeeze(-1)", f"-({logp}.exp() * {logp}).sum(-1)", f"{seen}.logsumexp(-1)",
            f"({seen}.argmax(-1) == {y}).float()", f"{seen}.mean(-1).detach()", f"{seen}.square().sum(-1)",
            f"F.cross_entropy({seen}.flatten(0, 1), {y}.flatten(), reduction='none').view({y}.shape)",
        )))  # fmt: skip
    hides = m.pick("{}", "{}.masked_fill(~{m}, 0)", "{}.masked_fill(~{m}, 0)", "torch.where({m}, {}, 0.0)", "{} * {m}")
    rows = [m.let("h", hides.format(r, m=mask)) for r in rows]
    returned = [*rows, *([m.let("n", f"-{m.pick(*rows)}.sum() / {mask}.sum().clamp(min=1)")] if m.chance(0.5) else [])]
    m.out(*returned, f"{row} * 1", mask)
    names, after = iter(range(10**6)), m.program.after
    weights, counted = f"r[{len(returned)}]", f"r[{len(returned) + 1}]"
    alive, numbers, logged = [f"r[{i}]" for i in range(len(rows))], [], []

    def let(stem: str, expression: str) -> str:
        name = f"{stem}_{next(names)}"
        after.append(f"{name} = {expression}")
        return name

    for _ in range(m.pick(2, 4, 6)):
        kind, a = m.random.random(), m.pick(*alive)
        if kind < 0.3:
            alive.append(let("a", m.pick(
                f"-{a}", f"{a} * {weights}", f"torch.exp({a} - {a}.detach())", f"{a}.clamp(-1, 1)", f"{a} * {counted}", f"{a}.square()",
            )))  # fmt: skip
        elif kind < 0.65 or not numbers:
            numbers.append(let("n", m.pick(
                f"{a}.mean()", f"({a} * {counted}).sum() / {counted}.sum().clamp(min=1)", f"F.logsigmoid({a}.sum(-1)).mean()",
                f"{a}.sum()", f"{a}.norm()",
            )))  # fmt: skip
        elif kind < 0.9:
            logged.append(let("s", m.pick(
                f"{a}.detach().sum().item()", f"{m.pick(*numbers)}.item()", f"{a}.tolist()", f"{a}.detach().mean().item()",
            )))  # fmt: skip
        else:
            after.append(m.pick(f"{a} = {a} * 2", f"{let('c', f'{a} + 0')}.mul_(2)", f"{numbers[-1]} = {numbers[-1]} + {a}.sum()"))
    kept = m.random.sample(alive, m.pick(0, 0, 1)) if m.chance(0.5) else []
    after.append(f"r[:] = [{', '.join([*kept, *m.random.sample(numbers, min(2, len(numbers))), *logged])}]")
