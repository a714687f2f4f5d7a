"""Families around attention: rotary embeddings, scores written out, masks, repeated heads."""

from __future__ import annotations

from tests.fuzz.maker import Maker

D = 16


def ropes(m: Maker) -> None:
    """Rotations of queries and keys in the styles of the models, with tables shared or not."""
    d = m.pick(8, 6)
    d = 8 if d == 6 and m.chance(0.5) else d
    q = m.activation("q", f"B, 3, S, {d}")
    k = m.activation("k", f"B, {m.pick(3, 1)}, S, {d}")
    style = m.pick("half", "half", "pairs", "reversed", "halves", "even_odd")
    columns = d // 2 if style in ("halves", "even_odd") else d
    dtype = m.pick("", "", "float32")
    batch = m.pick("1", "B")
    cos, sin = (
        m.given(n, f"torch.{n}(torch.randn({batch}, 1, S, {columns}, generator=g))", "", dtype) for n in ("cos", "sin")
    )
    if m.chance(0.2):
        cos, sin = (m.let(t[:3], f"{t}[:, 0].unsqueeze(1)") for t in (cos, sin))
    upcast = m.chance(0.3)
    for x in (q, k) if m.chance(0.8) else (q,):
        f = m.let("f", f"{x}.float()") if upcast else x
        if style in ("halves", "even_odd"):
            a, b = (
                m.let("a", f"{f}[..., {'0::2' if style == 'even_odd' else f':{d // 2}'}]"),
                m.let("b", f"{f}[..., {'1::2' if style == 'even_odd' else f'{d // 2}:'}]"),
            )
            y = m.let("y", f"torch.cat(({a} * {cos} - {b} * {sin}, {b} * {cos} + {a} * {sin}), dim=-1)")
        else:
            turned = {
                "half": f"torch.cat((-{f}[..., {d // 2}:], {f}[..., :{d // 2}]), dim=-1)",
                "reversed": f"torch.cat(({f}[..., {d // 2}:], -{f}[..., :{d // 2}]), dim=-1)",
                "pairs": f"torch.stack((-{f}[..., 1::2], {f}[..., 0::2]), dim=-1).flatten(-2)",
            }[style]
            t = m.let("t", turned)
            y = m.let(
                "y", m.pick(f"({f} * {cos}) + ({t} * {sin})", f"{t} * {sin} + {f} * {cos}", f"{f} * {cos} + {t} * {sin}")
            )
        m.out(m.let("y", f"{y}.to({x}.dtype)") if m.chance(0.7) else y)


def complex_ropes(m: Maker) -> None:
    """Rotations as products of complex numbers."""
    d = m.pick(8, 6)
    rows, table = m.pick((f"B, S, 3, {d}", "None, :, None"), (f"B, 3, S, {d}", "None, None"))
    freqs = m.given("freqs", f"torch.polar(torch.ones(S, {d // 2}), torch.randn(S, {d // 2}, generator=g))")
    for _ in range(m.pick(1, 2)):
        q = m.activation("q", rows)
        pairs = m.let(
            "pairs",
            f"torch.view_as_complex({q}.float().{m.pick(f'reshape(*{q}.shape[:-1], -1, 2)', 'unflatten(-1, (-1, 2))')})",
        )
        product = m.let(
            "product",
            m.pick(f"{pairs} * {freqs}[{table}]", f"{freqs}[{table}] * {pairs}", f"{pairs} * {freqs}[{table}].conj()"),
        )
        y = m.let("y", f"torch.view_as_real({product}).{m.pick('flatten(3)', 'flatten(-2)')}")
        m.out(m.let("y", m.pick(f"{y}.type_as({q})", f"{y}.to({q}.dtype)", y)))


def mask(m: Maker, n: str, k: str, dtype: str) -> str:
    """A mask in one of many spellings: provable, structured, or neither. Boolean or additive."""
    rows, cols = f"torch.arange({n})[:, None]", f"torch.arange({k})[None, :]"
    if m.chance(0.25):
        return m.let(
            "causal",
            m.pick(
                f"{cols} <= {rows}",
                f"torch.ones({n}, {k}, dtype=torch.bool).tril()",
                f"torch.ones({n}, {k}).tril() == 1",
                f"~torch.ones({n}, {k}, dtype=torch.bool).triu(1)",
            ),
        )
    size = m.pick("1", "2", "3", "64")
    shift = m.pick("0", "0", "1", "-1")
    if m.chance(0.4):  # an int that changes between calls, zero and negative ones too
        values = m.pick("(4, 6, -3)", "(2, 0, -2)", "(1, 3, 0)", "(0, 5, 1)", "(3, 2, 64)")
        shift = m.given("offset", f"{values}[call]")
        if m.chance(0.3):
            item = m.given("offset", f"torch.tensor({values}[call])")
            shift = m.let("offset", f"{item}.item()")
            m.program.inputs.pop(next(i for i in m.program.inputs if m.program.inputs[i].text == f"{values}[call]"))
    causal = m.let("causal", m.pick(
        f"{cols} <= {rows}", f"{cols} <= {rows} + {shift}", f"~({cols} > {rows})", f"{cols} - {shift} < {rows} + 1",
        f"torch.ones({n}, {k}, dtype=torch.bool).tril()", f"torch.ones({n}, {k}, dtype=torch.bool).tril({shift})",
        f"torch.triu(torch.ones({n}, {k}), diagonal=1 + {shift}) == 0", f"{cols} + {shift} >= 0 * {rows}",
        f"({cols} >= {shift}) | ({cols} <= {rows})", f"({rows} - {cols}).abs() <= {size}", f"torch.ones({n}, {k}, dtype=torch.bool)",
    ))  # fmt: skip
    more = m.pick("", "", "", "window", "window", "documents", "chunks", "padding", "padding")
    if more == "window":
        causal = m.let("visible", f"{causal} & ({cols} > {rows} - {m.pick(size, shift)})")
    elif more == "documents":
        kind = m.pick(
            "torch.arange(300) % 7", "torch.arange(300)", "torch.arange(300) // 3", "torch.arange(300) % (4 + call)"
        )
        ids = m.given("positions", f"({kind})[None, :S].repeat(B, 1)")
        ids = m.let("document", m.pick(f"(torch.diff({ids}, prepend={ids}[:, :1] - 1, dim=-1) != 1).cumsum(-1)", ids))
        causal = m.let("visible", f"{causal} & ({ids}[:, None, :, None] == {ids}[:, None, None, :])")
    elif more == "chunks":
        causal = m.let("visible", f"{causal} & ({rows} // {m.pick(size, 2)} == {cols} // {m.pick(size, 2)})")
    elif more == "padding":
        kinds = m.pick("(1, 1, 1)", "(1, 0, 1)", "(0, 1, 0)")
        given = m.given(
            "padding", f"(torch.arange(S)[None] >= torch.tensor([0, 1, 2, 0, 1])[:B, None] * (1 - {kinds}[call])).long()"
        )
        causal = m.let(
            "visible",
            m.pick(
                f"{causal} & {given}.bool()[:, None, None, :]",
                f"{causal} & ({given}[:, None, None] == 1)",
                f"{given}.bool()[:, None, None, :].expand(-1, 1, {n}, -1)",
            ),
        )
    if m.chance(0.35):
        low = m.pick("float('-inf')", f"torch.finfo({dtype}).min", "-1e4")
        causal = m.let("bias", m.pick(
            f"torch.zeros({n}, {k}, dtype={dtype}).masked_fill(~{causal}, {low})",
            f"torch.where({causal}, 0.0, {low}).to({dtype})", f"(~{causal}).to({dtype}) * {m.pick('-1e9', '-1e4')}",
        ))  # fmt: skip
    return causal


def masked(m: Maker) -> None:
    """scaled_dot_product_attention under a mask: causal, a window, documents, chunks, padding, offsets."""
    if m.chance(0.15):  # several blocks of a mask with a structure
        m.program.sizes["S"] = (150, 150, 150) if m.program.dynamic is False else (140, 260, 130)
    layout = m.chance(0.4)
    q, k, v = (m.activation(n, f"B, S, 2, {D}" if layout else f"B, 2, S, {D}") for n in "qkv")
    if layout:
        q, k, v = (m.let(t[:1], f"{t}.transpose(1, 2)") for t in (q, k, v))
    bias = mask(m, f"{q}.shape[-2]", f"{k}.shape[-2]", f"{q}.dtype")
    if m.chance(0.15):
        learned = m.given("learned", "torch.randn(S, S, 2, generator=g)", "leaf")
        bias = m.let(
            "bias",
            f"{learned}.permute(2, 0, 1)[None]"
            + (f".masked_fill(~{bias}, float('-inf'))" if bias[0] in "cv" else f" + {bias}"),
        )
    extra = m.pick("", "", ", dropout_p=0.0", ", scale=0.3")
    y = m.let("o", f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={bias}{extra})")
    if m.chance(0.3):
        y = m.let("o", f"F.scaled_dot_product_attention({q} + {y}, {k}, {v}, attn_mask={bias})")
    m.out(m.let("o", f"{y}.transpose(1, 2).reshape({y}.shape[0], {y}.shape[2], -1)") if m.chance(0.4) else y)


def grouped(m: Maker) -> None:
    """Keys and values with fewer heads, repeated for the call."""
    n = m.pick(2, 3)
    q, k, v = (
        m.activation("q", f"B, {2 * n}, S, {D}"),
        m.activation("k", f"B, 2, S, {D}"),
        m.activation("v", f"B, 2, S, {D}"),
    )
    way = m.pick(
        "{0}.repeat_interleave({1}, dim=1)",
        "{0}[:, :, None, :, :].expand({0}.shape[0], 2, {1}, {0}.shape[2], 16).reshape({0}.shape[0], 2 * {1}, {0}.shape[2], 16)",
        "{0}.unsqueeze(2).expand(-1, -1, {1}, -1, -1).flatten(1, 2)", "{0}.repeat(1, {1}, 1, 1)",
    )  # fmt: skip
    k, v = (m.let("rep", way.format(t, n)) for t in (k, v))
    kind = m.pick("", ", is_causal=True", "mask")
    if kind == "mask":
        kind = f", attn_mask={mask(m, f'{q}.shape[-2]', f'{k}.shape[-2]', f'{q}.dtype')}"
    m.out(m.let("o", f"F.scaled_dot_product_attention({q}, {k}, {v}{kind})"))


def written_out(m: Maker) -> None:
    """A product, a scale, a softcap, a mask or bias, a sink, a softmax, a dropout, a product."""
    q, k, v = (m.activation(n, f"B, 2, S, {D}") for n in "qkv")
    s = m.let(
        "s",
        m.pick(
            f"{q} @ {k}.transpose(-1, -2)", f"torch.matmul({q}, {k}.mT)", f"torch.matmul({q} * 0.25, {k}.transpose(2, 3))",
            f"{q}.float() @ {k}.float().mT",
        ),
    )
    if m.chance(0.8):
        s = m.let("s", m.pick(f"{s} / math.sqrt({D})", f"{s} * {D}**-0.5", f"{s} * 0.3", f"{s} / {q}.shape[-1] ** 0.5"))
    if m.chance(0.1):  # the same for a softmax, but not for a softcap or beside a sink
        s = m.let("s", f"{s} - {s}.amax(-1, keepdim=True)")
    if m.chance(0.25):
        cap = m.pick("5.0", "30", "0.5")
        s = m.let("s", m.pick(f"torch.tanh({s} / {cap}) * {cap}", f"{cap} * ({s} / {cap}).tanh()", f"torch.tanh({s})"))
    if m.chance(0.15):
        s = m.let("s", f"{s} + {m.given('bias', 'torch.randn(1, 2, S, S, generator=g)', m.pick('leaf', ''))}")
    if m.chance(0.6):
        visible = mask(m, f"{q}.shape[-2]", f"{k}.shape[-2]", f"{s}.dtype")
        if visible.startswith("bias"):
            s = m.let("s", f"{s} + {visible}")
        else:
            low = m.pick("float('-inf')", f"torch.finfo({s}.dtype).min", "-1e4")
            s = m.let("s", m.pick(f"{s}.masked_fill(~{visible}, {low})", f"torch.where({visible}, {s}, {low})"))
    sink = m.chance(0.3)
    if sink:
        rows = m.let("sink", m.pick(
            f"{m.weight('sinks', '2')}.view(1, 2, 1, 1).expand({s}.shape[0], -1, {s}.shape[-2], -1).to({s}.dtype)",
            f"torch.zeros(*{s}.shape[:-1], 1, dtype={s}.dtype)", f"{s}[..., :1]", f"{q}.mean(-1, keepdim=True)",
        ))  # fmt: skip
        s = m.let("s", m.pick(f"torch.cat([{s}, {rows}], dim=-1)", f"torch.cat(({s}, {rows}), 3)"))
        if m.chance(0.5):
            s = m.let("s", f"{s} - {s}.{m.pick('amax(-1, keepdim=True)', 'max(dim=-1, keepdim=True).values')}")
    p = m.let(
        "p",
        m.pick(
            f"torch.softmax({s}, -1)",
            f"F.softmax({s}, dim=-1, dtype=torch.float32).to({q}.dtype)",
            f"{s}.float().softmax(-1).type_as({v})",
        ),
    )
    if sink:
        p = m.let("p", m.pick(f"{p}[..., :-1]", f"{p}[:, :, :, :{v}.shape[2]]", f"{p}[..., 1:]"))
    if m.chance(0.3):
        p = m.let("p", m.pick(f"F.dropout({p}, p=0.0)", f"F.dropout({p}, 0.5, training=False)"))
    m.out(m.let("o", m.pick(f"{p} @ {v}", f"torch.matmul({p}, {v})")))
