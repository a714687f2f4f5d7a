"""The sizes at which fusions are measured, from tiny to huge: by what a fusion's dims are called, so that a new fusion of
rows, images or tokens is measured without a line here; and the cases that it declares itself."""

from __future__ import annotations

from fx_fusion.fusion import Case, Fusion, case

ROWS = (
    (128, 768), (1024, 1024), (2048, 768), (2048, 4096), (4096, 2048), (8192, 8192), (16384, 1024), (16384, 2048),
    (16384, 4096), (16384, 8192), (65536, 4096), (262144, 128),
)  # fmt: skip
IMAGES = (
    (1, 64, 28, 28), (16, 64, 28, 28), (32, 64, 28, 28), (64, 64, 28, 28), (256, 64, 28, 28), (8, 320, 64, 64),
    (8, 640, 32, 32), (8, 1280, 16, 16), (64, 256, 56, 56), (128, 512, 28, 28), (2, 512, 64, 64), (16, 512, 128, 128),
)  # fmt: skip
LOGITS = ((128, 32000), (128, 128256), (1024, 32000), (1024, 128256), (4096, 50257), (8192, 128256), (16384, 32000))


def cases_of(fusion: Fusion, *, full: bool) -> list[Case]:
    """What ``bench`` measures: the declared cases, and with ``full`` the whole grid of the fusion's dims."""
    declared = [c for c in fusion.cases if c.bench]
    if not full:
        return declared
    dims, statics = set(fusion.dims()), declared[0].statics if declared else {}
    groups = {"groups": 32} if "groups" in fusion.inputs else {}
    grid: list[Case] = []
    if dims == {"m", "n"}:
        grid = [case(f"{m}x{n}", m=m, n=n, statics=statics) for m, n in ROWS]
    elif dims == {"b", "c", "m"}:
        grid = [case(f"{b}x{c}x{h}x{w}", b=b, c=c, m=h * w, scalars=groups) for b, c, h, w in IMAGES]
    elif dims == {"b", "c", "h", "w"}:
        grid = [case(f"{b}x{c}x{h}x{w}", b=b, c=c, h=h, w=w, scalars=groups) for b, c, h, w in IMAGES]
    elif dims == {"m", "v"}:
        grid = [case(f"{m}x{v}", m=m, v=v, statics=statics) for m, v in LOGITS]
    known = {tuple(sorted(c.sizes.items())) for c in grid}
    return grid + [c for c in declared if tuple(sorted(c.sizes.items())) not in known or c.statics != statics]
