"""Compiles kernels for an H200, without a GPU and outside of the interpreter.

``python -m tests.kernels.compile_h200 fusions pairs plans`` (or some of these) prints a line of JSON for each group of
launches: ``{"group": ..., "kernels": {name: narrow accesses}, "error": ...}``.
"""

import functools
import itertools
import json
import re
import sys
import traceback

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fx_fusion.checking import calls_of
from fx_fusion.fusion.registry import all_fusions
from fx_fusion.kernels import embedding, evonorm_b0, gated_rms_norm, rms_norm_rope, rope
from fx_fusion.kernels.lib import glu
from fx_fusion.kernels.lib.block_lists import block_lists
from fx_fusion.kernels.logits.logit_rows import launch_rows
from fx_fusion.kernels.logits.scaled import scale_kernel
from fx_fusion.kernels.norms import group_norm_dispatch as channel_norm
from fx_fusion.kernels.norms import group_norm_math as norm_formulas
from fx_fusion.kernels.norms import row_norm, row_norm_kernels
from fx_fusion.ops import library
from fx_fusion.testing import kernels_on_cpu
from tests.changed_launches import changed
from tests.kernels.evonorm_b0_ways import B0_WAYS, by

FUSIONS = [f for f in all_fusions() if f.name in library.names()]


def compiling():
    """From now on a launch is compiled for an H200 instead of run; each kernel once for each way it is called. The compiled
    kernels, by name and how they are called."""
    types = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16"}
    types |= {torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv"}
    compiled = {}

    def compile_only(kernel, *args, grid, warmup, **keywords):
        bound = dict(zip(kernel.arg_names, args, strict=False))
        options = {}
        for key, item in keywords.items():
            (bound if key in kernel.arg_names else options)[key] = item
        fixed = {p.name for p in kernel.params if p.is_constexpr}
        signature = {
            n: "constexpr" if n in fixed else f"*{types[v.dtype]}" if isinstance(v, torch.Tensor) else "fp32" if isinstance(v, float) else "i32"
            for n, v in ((n, bound[n]) for n in kernel.arg_names)
        }  # fmt: skip
        constants = {(kernel.arg_names.index(n),): bound[n] for n in fixed}
        # As the launcher says it: what is not known to be aligned is not loaded ahead, and takes no shared memory.
        wide = [
            n
            for n, v in bound.items()
            if n not in fixed and (isinstance(v, torch.Tensor) or (isinstance(v, int) and v % 16 == 0))
        ]
        attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in wide}
        if (key := (kernel.__name__, str(signature), str(constants), str(wide))) not in compiled:
            source = ASTSource(kernel, signature, constants, attributes)
            compiled[key] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert compiled[key].metadata.shared <= 227 << 10, kernel.__name__

    triton.runtime.jit.JITFunction.run = compile_only
    return compiled


def norms(n):
    x, w = torch.randn(8, n).bfloat16(), torch.randn(n).bfloat16()
    *_, stats = row_norm.norm_fwd(x, None, w, None, 1e-6, 0.0, True, center=False)
    row_norm.norm_bwd(x, None, x, w, None, stats, 0.0, True, [True, True, False], center=False)


def gated_norms(n):
    x, options = torch.randn(8, n).bfloat16(), (True, True, True, 1, "input")
    gated_rms_norm._fwd(x, x, x[0], 1e-6, *options)
    gated_rms_norm._bwd(x, x, x, x[0], torch.empty(8), 1e-6, *options, [True] * 3)


def gates(n):
    x = torch.randn(8, n).bfloat16()
    glu.glu_fwd(x, x, "silu")
    glu.glu_bwd(x, x, x, "silu")


def losses(v):
    logits, target, loss, stats = torch.randn(8, v).bfloat16(), torch.zeros(8, dtype=torch.long), torch.empty(8), torch.empty(2, 8)
    launch_rows(logits, target, None, -100, 0.0, 0.0, 1.0, loss=loss, stats=stats, dlogits=logits)
    launch_rows(logits, target, None, -100, 0.0, 0.0, 1.0, stats=stats, dloss=loss, dlogits=logits)
    launch_rows(logits, target, None, -100, 0.0, 0.0, 1.0, loss=loss, stats=stats, dlogits=logits, z_factor=torch.rand(8))
    launch_rows(logits, target, None, -100, 0.0, 0.0, 1.0, stats=stats, dloss=loss, dlogits=logits, z_factor=torch.rand(8))


def of_fusion(fusion):
    """Every variant, forward and backward, in bfloat16."""
    with kernels_on_cpu(True):
        for variant in range(len(fusion.variants)):
            calls_of(fusion, variant, "cpu", torch.bfloat16)


def rows_of_any_width():
    """Whole rows, rows in pieces, and what lies between."""
    widths = ((4096, torch.bfloat16), (20001, torch.bfloat16), (8192, torch.float32), (5000, torch.float32), (1024, torch.bfloat16))
    for n, dtype in widths:
        x, w = torch.randn(8, n, dtype=dtype), torch.randn(n)
        for weight, first, center in ((w, True, False), (None, False, False), (w, False, True)):
            bias = weight if center else None
            *_, stats = row_norm.norm_fwd(x, None, weight, bias, 1e-6, 0.0, first, center=center)
            row_norm.norm_fwd(x, x, weight, bias, 1e-6, 0.0, first, center=center)
            for dh, needs in ((x, [True, True, True]), (None, [True, False, False])):
                row_norm.norm_bwd(x, dh, x, weight, bias, stats, 0.0, first, needs, center=center)


def gated_rows_in_groups():
    x, w, stats = torch.randn(8, 20001).bfloat16()[:, :4096], torch.randn(4096), torch.empty(16)
    for options in ((True, True, True, 2, "input"), (False, False, False, 1, "bfloat16")):
        gated_rms_norm._fwd(x, x, w, 1e-6, *options)
        gated_rms_norm._bwd(x, x, x, w, stats, 1e-6, *options, [True] * 3)


def images_of_any_size():
    """Groups in registers, in steps and in tiles, contiguous and channels last."""
    for shape, groups in (((4, 12, 28, 28), 4), ((1, 8, 90, 95), 2), ((2, 40, 16, 16), 1)):
        made, p = torch.randn(shape).bfloat16(), torch.randn(shape[1])
        for image in (made, made.to(memory_format=torch.channels_last)):
            for kind in (norm_formulas.GROUP_NORM, norm_formulas.GROUP_NORM_SWISH, norm_formulas.EVONORM_S0):
                kept = channel_norm.norm_fwd(image, torch.empty_like(image), groups, p, p, p, 1e-5, kind)
                channel_norm.norm_bwd(image, image, groups, p, p, p, kept, kind)
            for running, way in itertools.product((None, p), B0_WAYS):
                with by(way):
                    _, _, per_image, batch = evonorm_b0._fwd(image, p, p, p, running, 1e-3)
                    evonorm_b0._bwd(image, image, p, p, p, running, per_image, batch, 1e-3, [True] * 4)


def tables_of_few_and_many_ids():
    with kernels_on_cpu(True):
        for n in (3000, 20000):
            embedding.embedding_bwd(torch.randn(n, 8), torch.randint(0, 9, (n,)), 9, -1)


def launches_that_passes_change():
    """A table's gradient added to another one, and norms that quantize."""
    with kernels_on_cpu(True), changed(embedding, embedding._embedding_segments_kernel, ADD=True):
        tables_of_few_and_many_ids()
    x, w = torch.randn(8, 4096).bfloat16(), torch.randn(4096)
    q = {"q_ptr": torch.empty(8, 4096, dtype=torch.float8_e4m3fn), "scale_ptr": torch.empty(8, 1), "STORE_Q": True}
    forward, backward = row_norm_kernels.row_norm_fwd_kernel, row_norm_kernels.row_norm_bwd_kernel
    for center, power_of_two in ((False, False), (True, True)):
        bias = w if center else None
        given = {**q, "POWER_OF_TWO": power_of_two}
        for more in ({}, {"STORE_Y": False, "y_ptr": lambda given: given["x_ptr"]}):
            with changed(row_norm, forward, **given, **more):
                *_, stats = row_norm.norm_fwd(x, x, w, bias, 1e-6, 0.0, True, center=center)
        for more in ({}, {"STORE_Y": True, "y_ptr": x.clone(), "HAS_BIAS": center}):
            with changed(row_norm, backward, **given, **more):
                row_norm.norm_bwd(x, x, x, w, bias, stats, 0.0, True, [True] * 3, center=center)


def lists_of_blocks():
    with kernels_on_cpu(True):
        for n in (16, 300):
            block_lists(torch.ones(2, 1, n, n, dtype=torch.bool), torch.ones(1, 1, n, n, dtype=torch.bool))


def losses_over_long_rows():
    logits, target = torch.randn(4, 9001).bfloat16(), torch.zeros(4, dtype=torch.long)
    loss, stats = torch.empty(4), torch.empty(2, 4)
    for weight, smoothing, softcap in ((None, 0.0, 0.0), (torch.rand(9001), 0.1, 30.0)):
        launch_rows(logits, target, weight, -100, smoothing, softcap, 1.0, loss=loss, stats=stats)
        launch_rows(logits, target, weight, -100, smoothing, softcap, 1.0, loss=loss, stats=stats, dlogits=logits)
        launch_rows(logits, target, weight, -100, smoothing, softcap, 1.0, stats=stats, dloss=loss, dlogits=logits)


def gradients_in_place():
    for dtype in (torch.bfloat16, torch.float32):
        scale_kernel[(1056,)](torch.randn(9001, dtype=dtype), torch.tensor(0.5), 9001, BLOCK=4096)


def gates_of_every_activation():
    x = torch.randn(8, 20001).bfloat16()
    for kind in glu.ACTIVATIONS:
        glu.glu_fwd(x, x, kind)
        glu.glu_bwd(x, x, x, kind)


def rotations_of_every_style():
    q = torch.randn(2, 5, 8, 64).bfloat16()
    for style in rope.STYLES:
        table = torch.randn(1, 1, 8, 32 if style == "even_odd_to_halves" else 64)
        for backward in (False, True):
            rope._launch(q, q, table, table, q.clone(), q.clone(), style, backward)


def normed_rotations_of_every_style():
    x, weight, all_weights = (t.bfloat16() for t in (torch.randn(2, 8, 5, 64), torch.randn(64), torch.randn(320)))
    for style, across in itertools.product(rope.STYLES, (False, True)):
        table = torch.randn(1, 1, 8, 32 if style == "even_odd_to_halves" else 64)
        static = 1e-6, 0.0, True, across, style, "input", False
        for q in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
            given = q, all_weights if across else weight, table, table
            y, rstd = rms_norm_rope._fwd(*given, *static)
            rms_norm_rope._bwd(y, *given, rstd, *static, [True, True])


# Sizes that choose another plan than the small cases of the fusions do.
PLANS = {
    f.__name__: f
    for f in (
        rows_of_any_width, gated_rows_in_groups, images_of_any_size, tables_of_few_and_many_ids, losses_over_long_rows,
        gates_of_every_activation, rotations_of_every_style,
        normed_rotations_of_every_style, lists_of_blocks, launches_that_passes_change,
        gradients_in_place,
    )
}  # fmt: skip
# Launches at two sizes: one that 16 divides, one that only 8 does.
PAIRS = {
    "norms": (norms, 776, 768), "gated_norms": (gated_norms, 776, 768), "gates": (gates, 11000, 11008),
    "whisper": (losses, 51864, 51840), "mamba": (losses, 50280, 50304),
}  # fmt: skip


def narrow_accesses(made):
    """Reads and writes of 16 bits, one by one, in the PTX of a kernel."""
    reads = made.asm["ptx"].replace("ld.global.L1", "ld.global").splitlines()
    return sum(1 for line in reads if re.search(r"(ld|st)\.global[.\w:]*\.b16\b", line) and ".v" not in line)


GROUPS = {
    "fusions": {f.name: functools.partial(of_fusion, f) for f in FUSIONS},
    "plans": PLANS,
    "pairs": {f"{name} {size}": functools.partial(f, size) for name, (f, *both) in PAIRS.items() for size in both},
}


def main():
    compiled = compiling()
    for group, launches in ((g, f) for kind in sys.argv[1:] for g, f in GROUPS[kind].items()):
        compiled.clear()
        error = None
        try:
            launches()
        except Exception:
            error = traceback.format_exc()
        kernels = {}
        for (name, *_), made in compiled.items():
            kernels[name] = kernels.get(name, 0) + narrow_accesses(made)
        print(json.dumps({"group": group, "kernels": kernels, "error": error}), flush=True)


if __name__ == "__main__":
    main()
