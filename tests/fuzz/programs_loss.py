"""Families around losses: of logits, of an lm_head, of policies; modules; a small transformer."""

from __future__ import annotations

from tests.fuzz.maker import Maker
from tests.fuzz.programs_attention import mask

V, H = 13, 8


def scaled(m: Maker, z: str) -> str:
    """Return what models do to logits: a cast, a scale that is constant or an argument, a softcap."""
    if m.chance(0.4):
        z = m.let("z", f"{z}.{m.pick('float()', 'to(torch.float32)')}")
    if m.chance(0.25):
        scale = m.given("scale", "(0.5, 2.0, 0.5)[call]") if m.chance(0.25) else m.pick("0.5", "0.125")
        z = m.let("z", m.pick(f"{z} * {scale}", f"{z} / {scale}"))
    if m.chance(0.25):
        cap = m.pick("5.0", "30.0")
        z = m.let("z", m.pick(f"{cap} * torch.tanh({z} / {cap})", f"torch.tanh({z} / {cap}) * {cap}"))
    return z


def loss_of(m: Maker, z: str, shift: bool) -> str:
    """A cross-entropy of logits (batch, length, classes) in one of the spellings."""
    target = m.given(
        "target", f"torch.randint(0, {V}, (B, S), generator=g)" + m.pick("", "", ".masked_fill(torch.arange(S) < 2, -100)")
    )
    ignored = "masked_fill" in m.program.inputs[target].text
    if shift:
        z = m.let("z", f"{z}[:, :-1]{m.pick('', '.contiguous()')}")
        target = m.let("target", f"{target}[:, 1:]{m.pick('', '.contiguous()')}")
    if not ignored and m.chance(0.35):
        logp = m.let(
            "logp",
            f"{m.pick(f'{z}.log_softmax(-1)', f'F.log_softmax({z}, dim=-1, dtype=torch.float32)', f'torch.log_softmax({z}.float(), -1)')}",
        )
        taken = m.let("taken", f"{logp}.gather(-1, {target}.unsqueeze(-1)).squeeze(-1)")
        if m.chance(0.3):
            taken = m.let("taken", f"{z}.gather(-1, {target}.unsqueeze(-1)).squeeze(-1) - torch.logsumexp({z}, dim=-1)")
        return m.let(
            "loss", m.pick(f"-{taken}.mean()", f"-{taken}", f"{taken}", f"{taken}.sum()", f"-{taken}[:, :2].mean()")
        )
    extra = m.pick("", "", ", reduction='sum'", ", reduction='none'", ", label_smoothing=0.1", ", ignore_index=0", "weight")
    if extra == "weight":
        text = m.pick(
            f"torch.rand({V}, generator=g) + 0.1",
            f"(torch.rand({2 * V}, generator=g) + 0.1)[::2]",
            f"(torch.rand(1, generator=g) + 0.1).expand({V})",
        )
        extra = f", weight={m.given('classes', text, '', m.pick('', 'float32'))}"
    rows, targets = m.pick(
        (f"{z}.reshape(-1, {V})", f"{target}.reshape(-1)"),
        (f"{z}.flatten(0, 1)", f"{target}.flatten()"),
        (f"{z}.reshape(-1, {z}.shape[-1])", f"{target}.reshape(-1)"),
    )
    if m.chance(0.2) and "smoothing" not in extra:
        return m.let("loss", f"F.nll_loss(F.log_softmax({rows}, -1), {targets}{extra})")
    loss = m.let("loss", f"F.cross_entropy({rows}, {targets}{extra})")
    return with_z_loss(m, loss, z, target, extra) if m.chance(0.15) else loss


def with_z_loss(m: Maker, loss: str, z: str, target: str, extra: str) -> str:
    """The squares of logsumexp beside it, of all rows or of those with a label; some in another reduction."""
    squares = m.let("squares", f"{z}.logsumexp(-1){m.pick('.square()', '.pow(2)', ' ** 2')}")
    if m.chance(0.4):
        squares = m.let("squares", f"{squares} * ({target} != {m.pick(-100, -100, 0)})")
    if "none" in extra:
        squares = m.let("squares", f"{squares}.reshape(-1)")
    else:
        wanted = "sum" if "sum" in extra else "mean"
        squares = m.let("squares", f"{squares}.{m.pick(wanted, wanted, wanted, 'sum')}()")
    if m.chance(0.15):
        m.out(f"{squares}.detach()")
    return m.let("loss", m.pick(f"{loss} + 0.01 * {squares}", f"{squares} / 100 + {loss}"))


def losses(m: Maker) -> None:
    """A loss of logits that are given or made by a function that is not linear."""
    z = m.activation("z", f"B, S, {V}")
    if m.chance(0.4):
        z = m.let("z", m.pick(f"{z}.sin()", f"{z} * {z}", f"{z} + 1"))
    m.out(loss_of(m, scaled(m, z), m.chance(0.3)))
    if m.chance(0.2):
        m.out(z)


def reads(m: Maker, at: int, late: bool) -> None:
    """Ways to read (or write to) a result outside of the compiled function."""
    z = f"r[{at}]"
    m.program.after.append(m.pick(
        f"r.append({z}.detach())", f"r.append({z}[:, -1])", f"r.append({z}.float())", f"r.append({z}.argmax(-1))",
        f"z = {z}.detach()\nz.mul_(2)\nr.append(z)", f"r.append(second({z}))", f"r.append(second({z}.detach()))",
        f"r.append(checkpoint(lambda z: z.sin() * 2, {z}, use_reentrant=False))", f"r.append({z}.view(-1).softmax(-1))",
        f"r.append(torch.stack([{z}, {z} * 2]).sum())", f"early = {z}.float()\n{z}.detach().zero_()\nr.append(early)",
        f"early = {z}[:, 0]\nwith torch.no_grad():\n    {z}.add_(1)\nr.append(early)", f"a, b = {z}.split(1, dim=0)[:2]\nr.append(a + b)",
        f"r.append({z}.transpose(0, 1).contiguous())", f"r.append(torch.cat([{z}, {z}], dim=-1)[..., 3])", f"r.append({z}.to(torch.float64).mean())",
    ))  # fmt: skip


def heads(m: Maker) -> None:
    """An lm_head and its loss; the logits are returned, or something made of them is."""
    h = m.activation("h", f"B, S, {H}")
    if m.chance(0.4):
        h = m.rms_norm(h, m.weight("w", f"{H}"))
    z = m.linear(h, m.weight("head", f"{V}, {H}"), m.weight("bias", f"{V}") if m.chance(0.3) else None)
    logits = scaled(m, z)
    m.out(loss_of(m, logits, m.chance(0.4)))
    if m.chance(0.75):
        m.out(m.pick(z, logits, logits))
        if m.chance(0.4):
            m.out(
                m.pick(
                    f"{logits}[:, -1]",
                    f"{logits}.view(-1, {V})",
                    f"{logits}.float()",
                    f"{logits}.contiguous()",
                    f"{logits}.detach()",
                    f"{logits}.argmax(-1)",
                    f"{logits}.transpose(0, 1)",
                    f"{logits}.softmax(-1)",
                    logits,
                    h,
                )
            )
        for _ in range(m.pick(0, 1, 1, 2)):
            reads(m, 1, True)


def policies(m: Maker) -> None:
    """Log-probabilities of tokens and the entropy, of an lm_head or of logits."""
    if m.chance(0.6):
        h = m.activation("h", f"B, S, {H}")
        raw = m.linear(h, m.weight("head", f"{V}, {H}"))
    else:
        raw = m.activation("z", f"B, S, {V}")
    z = scaled(m, raw) if m.chance(0.5) else raw
    target = m.integers("target", "B, S", V)
    logp = m.let(
        "logp",
        m.pick(
            f"{z}.log_softmax(-1)",
            f"F.log_softmax({z}, dim=-1)",
            f"torch.log_softmax({z}.float(), -1)",
            f"{z} - {z}.logsumexp(-1, keepdim=True)",
        ),
    )
    taken = m.let("taken", f"{logp}.gather(-1, {target}.unsqueeze(-1)).squeeze(-1)")
    entropy = m.let("entropy", m.pick(
        f"-({logp}.exp() * {logp}).sum(-1)", f"-(torch.exp({logp}) * {logp}).sum(dim=-1)", f"-({z}.softmax(-1) * {logp}).sum(-1)",
        f"torch.logsumexp({z}, dim=-1) - ({z}.softmax(-1) * {z}).sum(-1)",
    ))  # fmt: skip
    if m.chance(0.3):
        old = m.given("old", "torch.randn(B, S, generator=g)")
        taken = m.let("ratio", f"torch.exp({taken} - {old}).clamp(0.8, 1.2).mean()")
    m.out(taken, entropy)
    if m.chance(0.3):
        m.out(raw)
        reads(m, 2, True)


def modules(m: Maker) -> None:
    """Modules of torch.nn, one of them maybe used twice, a tied head."""

    def module(text: str) -> str:
        return m.given("module", f"randomized({text}, g)")

    if m.chance(0.3):
        x = m.activation("x", "B, 8, 5, 6")
        norm = module("nn.GroupNorm(2, 8)")
        x = m.let("x", f"F.silu({norm}({x}))")
        m.out(m.let("x", f"{norm}({x})") if m.chance(0.4) else x)
        return
    if m.chance(0.5):
        table = module(f"nn.Embedding({V}, {H}{m.pick('', ', padding_idx=2')})")
        x = m.let("x", f"{table}({m.integers('ids', 'B, S', V)})")
    else:
        table, x = "", m.activation("x", f"B, S, {H}")
    norm = module(
        m.pick(
            f"nn.RMSNorm({H}, eps=1e-6)",
            f"nn.LayerNorm({H})",
            f"nn.LayerNorm({H}, elementwise_affine=False)",
            f"nn.RMSNorm({H})",
        )
    )
    for _ in range(m.pick(1, 2)):
        y = m.let("y", f"{norm}({x})")
        mlp = module(f"nn.Linear({H}, {2 * H})")
        both = m.let("both", f"{mlp}({y})")
        x = m.let("x", f"{x} + {m.glu(f'{both}[..., :{H}]', f'{both}[..., {H}:]')}")
    x = m.let("y", f"{norm}({x})")
    if table and m.chance(0.7):
        z = m.let("z", f"F.linear({x}, {table}.weight)")
        m.out(loss_of(m, z, m.chance(0.5)), z)
        reads(m, 1, True)
    m.out(x)


def blocks(m: Maker) -> None:
    """A layer or two of a transformer: norm, attention, residual, norm, gate, and a head sometimes."""
    x = m.activation("x", "B, S, 16")
    visible = mask(m, f"{x}.shape[1]", f"{x}.shape[1]", f"{x}.dtype") if m.chance(0.7) else None
    rms = m.chance(0.6)

    def norm(x: str) -> str:
        w = m.weight("w", "16")
        return m.rms_norm(x, w) if rms else m.layer_norm(x, w, m.weight("b", "16"))

    for _ in range(m.pick(1, 1, 2)):
        h = norm(x)
        q, k, v = (
            m.let(
                "q",
                f"F.linear({h}, {m.weight('w', '32, 16')} * 0.2).view({x}.shape[0], {x}.shape[1], 2, 16).transpose(1, 2)",
            )
            for _ in "qkv"
        )
        how = f"attn_mask={visible}" if visible else "is_causal=True"
        o = m.let("o", f"F.scaled_dot_product_attention({q}, {k}, {v}, {how})")
        o = m.let("o", f"{o}.transpose(1, 2).reshape({x}.shape[0], {x}.shape[1], 32)")
        x = m.let("x", f"{x} + F.linear({o}, {m.weight('w', '16, 32')} * 0.2)")
        h = norm(x)
        p = m.glu(m.linear(h, m.weight("w", "16, 16")), m.linear(h, m.weight("w", "16, 16")))
        x = m.let("x", f"{x} + {p}")
    x = norm(x)
    if m.chance(0.5):
        z = m.linear(x, m.weight("head", f"{V}, 16"))
        m.out(loss_of(m, z, m.chance(0.5)), z)
    m.out(x)
