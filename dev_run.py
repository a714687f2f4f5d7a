"""Time sizes that 8 divides with and without being told so."""
import json, sys, torch, triton
from fx_fusion.kernels import row_norm, logit_rows, glu, gated_rms_norm
from fx_fusion import registry
registry.all_fusions()
out = sys.argv[1]
rows = []
def both(name, module, call, others=()):
    real = module.unit_of
    found = {}
    for round_ in range(2):
        for label, unit in (("before", lambda *a: 1), ("after", real)):
            module.unit_of = unit
            call()
            ms = triton.testing.do_bench_cudagraph(call, rep=60)
            found.setdefault(label, []).append(ms)
    module.unit_of = real
    row = {"name": name, **{k: min(v) for k, v in found.items()}}
    row["speedup"] = row["before"] / row["after"]
    rows.append(row); print(row, flush=True)
d = "cuda"
for dtype in (torch.bfloat16, torch.float32):
    for m, n in ((16384, 776), (65536, 776), (8192, 11000), (16384, 4104)):
        x, w, dy = torch.randn(m, n, device=d, dtype=dtype), torch.randn(n, device=d, dtype=dtype), torch.randn(m, n, device=d, dtype=dtype)
        for center in (False, True):
            b = w if center else None
            *_, stats = row_norm.norm_fwd(x, None, w, b, 1e-6, 0.0, not center, center=center)
            def call():
                row_norm.norm_fwd(x, None, w, b, 1e-6, 0.0, not center, center=center)
                row_norm.norm_bwd(dy, None, x, w, b, stats, 0.0, not center, [True] * (3 if center else 2) + [False] * (0 if center else 1), center=center)
            both(f"{'layer' if center else 'rms'}_norm {m}x{n} {dtype}", row_norm, call)
        def call():
            glu.glu_fwd(x, dy, "silu"); glu.glu_bwd(x, x, dy, "silu")
        both(f"swiglu {m}x{n} {dtype}", glu, call)
    for m, v in ((4096, 51864), (8192, 50280)):
        l, t = torch.randn(m, v, device=d, dtype=dtype), torch.randint(0, v, (m,), device=d)
        loss, stats = torch.empty(m, device=d), torch.empty(2, m, device=d)
        dl = torch.empty_like(l)
        def call():
            logit_rows.launch_rows(l, t, None, -100, 0.0, 0.0, 1.0, loss=loss, stats=stats)
            logit_rows.launch_rows(l, t, None, -100, 0.0, 0.0, 1.0, stats=stats, dloss=loss, dlogits=dl)
        both(f"cross_entropy {m}x{v} {dtype}", logit_rows, call)
        def call():
            logit_rows.launch_rows(l, t, None, -100, 0.0, 0.0, 1.0, loss=loss, stats=stats, dlogits=dl)
        both(f"loss and gradient at once {m}x{v} {dtype}", logit_rows, call)
json.dump({"gpu": torch.cuda.get_device_name(), "rows": rows}, open(out, "w"), indent=1)
