"""The sizes at which fusions are measured, from tiny to huge: by what a fusion's dims are called, so that a new fusion of
rows, images or tokens is measured without a line here; and the cases that it declares itself."""

from __future__ import annotations

from fx_fusion.fusion.declaration import Case, Fusion, case
from fx_fusion.fusion.dims import Spec
from fx_fusion.fusion.registry import all_fusions

ROWS = (
    (128, 768), (1024, 1024), (2048, 768), (2048, 4096), (4096, 2048), (8192, 8192), (16384, 1024), (16384, 2048),
    (16384, 4096), (16384, 8192), (65536, 4096), (262144, 128),
    (16384, 776), (8192, 11000),  # 8 divides them, 16 does not
)  # fmt: skip
IMAGES = (
    (1, 64, 28, 28), (16, 64, 28, 28), (32, 64, 28, 28), (64, 64, 28, 28), (256, 64, 28, 28), (8, 320, 64, 64),
    (8, 640, 32, 32), (8, 1280, 16, 16), (64, 256, 56, 56), (128, 512, 28, 28), (2, 512, 64, 64), (16, 512, 128, 128),
    (256, 1024, 14, 14), (64, 2048, 7, 7),
)  # fmt: skip
LOGITS = (
    (128, 32000), (128, 128256), (512, 50257), (1024, 32000), (1024, 128256), (2048, 50257), (2048, 128256),
    (4096, 32000), (4096, 50257), (8192, 128256), (16384, 32000), (16384, 50257),
    (4096, 51864), (8192, 50280),  # Whisper's and Mamba's: 8 divides them, 16 does not
)  # fmt: skip
HEADS = (  # batch, heads, positions, size of a head
    (1, 8, 128, 64), (1, 32, 512, 64), (8, 12, 512, 64), (1, 32, 2048, 128), (8, 12, 1024, 64), (2, 16, 2048, 64),
    (16, 16, 512, 128), (1, 32, 4096, 128), (8, 32, 2048, 64), (4, 32, 2048, 128), (1, 32, 8192, 128), (4, 32, 4096, 128),
)  # fmt: skip
TABLES = (  # tokens, vocabulary, columns
    (128, 32000, 768), (2048, 32000, 4096), (2048, 50257, 768), (8192, 128256, 2048), (8192, 256000, 2048),
    (16384, 30522, 768), (16384, 32000, 4096), (16384, 128256, 4096), (65536, 50257, 768), (65536, 32000, 2048),
    (65536, 128256, 4096), (262144, 32000, 1024),
)  # fmt: skip
HEADS_OF_MODELS = (  # tokens, hidden size, vocabulary: lm_head and loss
    (512, 768, 50257), (512, 4096, 128256), (2048, 768, 50257), (2048, 2048, 128256), (2048, 4096, 128256),
    (4096, 4096, 32000), (8192, 768, 50257), (8192, 2048, 128256), (8192, 4096, 128256), (16384, 2048, 128256),
    (16384, 4096, 32000), (32768, 2048, 151936), (4096, 768, 51864), (8192, 2560, 50280),
)  # fmt: skip


def cases_of(fusion: Fusion, *, full: bool) -> list[Case]:
    """Return what ``bench`` measures: the declared cases, and with ``full`` the whole grid of the fusion's dims."""
    declared = [c for c in fusion.cases if c.bench]
    if not full:
        return declared
    dims, statics = set(fusion.dims), declared[0].statics if declared else {}
    groups = {"groups": 32} if "groups" in fusion.inputs else {}
    grid: list[Case] = []
    if dims == {"m", "n"}:
        grid = [case(f"{m}x{n}", m=m, n=n, statics=statics) for m, n in ROWS]
    elif dims in ({"b", "c", "m"}, {"b", "c", "h", "w"}):
        for b, c, h, w in IMAGES:
            sizes = {"m": h * w} if "m" in dims else {"h": h, "w": w}
            last = {"x": "b ... c" if "m" in dims else "b h w c"}
            grid.append(case(f"{b}x{c}x{h}x{w}", b=b, c=c, scalars=groups, **sizes))
            grid.append(case(f"{b}x{c}x{h}x{w} nhwc", b=b, c=c, scalars=groups, order=last, **sizes))
    elif dims == {"m", "v"}:
        grid = [case(f"{m}x{v}", m=m, v=v, statics=statics) for m, v in LOGITS]
    elif dims == {"m", "h", "v"}:
        grid = [case(f"{m}x{h}x{v}", m=m, h=h, v=v, statics=statics) for m, h, v in HEADS_OF_MODELS]
    elif dims == {"m", "n", "v"}:
        grid = [case(f"{m}x{v}x{n}", m=m, v=v, n=n, statics=statics) for m, v, n in TABLES]
        grid += [case(f"{m}x{v}x{n} zipf", m=m, v=v, n=n, statics=statics, scalars={"ids": "zipf"}) for m, v, n in TABLES]
    elif dims >= {"b", "h", "s", "d"} and fusion in all_fusions():
        for b, h, s, d in HEADS:
            more = {
                "g": max(1, h // 4) if "g" in fusion.sized else None,
                "c": (d // 2 if fusion.complex_inputs else d) if "c" in dims else None,
            }
            # As models have them: projections lie positions first.
            order = {n: _positions_first(spec) for n, spec in fusion.specs.items() if not spec.dims[-1].broadcast}
            sizes = {n: size for n, size in more.items() if size is not None}
            grid.append(case(f"{b}x{h}x{s}x{d}", b=b, h=h, s=s, d=d, statics=statics, order=order, **sizes))
    known = {(tuple(sorted(c.sizes.items())), repr(c.statics)) for c in grid}
    return grid + [c for c in declared if (tuple(sorted(c.sizes.items())), repr(c.statics)) not in known]


def _positions_first(spec: Spec) -> str:
    b, h, s, d = [dim.name for dim in spec.dims if not dim.several]
    return f"{b} {s} {h} {d}"
