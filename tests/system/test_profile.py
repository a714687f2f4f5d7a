"""``python -m fx_fusion profile``: a script's steps by kind of kernel, under Inductor and under fx_fusion."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import DeviceType

from fx_fusion.commands import profile_command
from fx_fusion.profiling import Measured, Profiled, Steps, kind_of, microseconds_by_kind, side_by_side
from fx_fusion.scripts import compiling

NAMES = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_tn_align8>": "matmul",
    "triton_tem_fused_mm_0": "matmul",
    "aten::addmm": "matmul",
    "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "triton_tem_fused_flex_attention_backward_1": "attention",
    "triton_per_fused__softmax_add_3": "attention",
    "triton_red_fused__log_softmax_nll_loss_forward_2": "loss",
    "_cross_entropy_rows_kernel": "loss",
    "_loss_totals_kernel": "loss",
    "triton_red_fused_add_mean_mul_pow_rsqrt_3": "norm",
    "row_norm_bwd_kernel": "norm",
    "_group_norm_fwd_kernel": "norm",
    "_rope_kernel": "rope",
    "triton_poi_fused_cat_cos_mul_sin_4": "rope",
    "glu_fwd_kernel": "gate, activation",
    "triton_poi_fused_mul_silu_5": "gate, activation",
    "_embedding_segments_kernel": "embedding",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<c10::BFloat16, 4>>": "optimizer",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW": "convolution",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    "triton_poi_fused_add_7": "elementwise",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
    "triton_red_fused_sum_1": "reduction",
    "inductor_codecache_torch_key (dynamo_timed)": "compilation",
    "whatever": "other",
}

SCRIPT = '''
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Embedding(50, 32), nn.RMSNorm(32), nn.Linear(32, 50))
compiled = torch.compile(model, mode=sys.argv[2]) if len(sys.argv) > 2 else torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[1])):
    tokens = torch.randint(0, 50, (4, 16))
    nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit("it went on after it was measured")
'''


@pytest.mark.parametrize("name", NAMES)
def test_kinds(name):
    assert kind_of(name) == NAMES[name]


def profile(*arguments, folder):
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fx_fusion", "profile", "--after", "3", "--steps", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


@pytest.mark.slow
def test_a_script_is_profiled_under_both(tmp_path):
    done = profile("--trace", str(tmp_path / "t"), str(tmp_path / "train.py"), "100", "max-autotune-no-cudagraphs", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    header, _, *rows = done.stdout.splitlines()
    assert re.split(r"\s{2,}", header) == ["ms a step", "inductor", "fx_fusion"]
    kinds = {row.split("  ")[0] for row in rows}
    assert {"matmul", "loss", "embedding", "optimizer", "all of it", "a step, without the profiler"} <= kinds
    assert re.search(r"fx_fusion: \d+\.\d\d of inductor's speed\n\d+ sites? fused in 1 graph\n", done.stdout)
    for backend in ("inductor", "fx_fusion"):
        assert json.loads((tmp_path / f"t_{backend}.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_a_script_that_ends_too_early(tmp_path):
    (tmp_path / "short.py").write_text(SCRIPT.replace('sys.exit("it', '0 and print("it'))
    done = profile(str(tmp_path / "short.py"), "4", folder=tmp_path)
    assert done.returncode == 2
    assert "ended after 4 step(s) of its optimizer; 7 are needed (--after 3 and twice --steps 2)" in done.stderr
    assert not done.stdout
    done = profile("nowhere.py", folder=tmp_path)
    assert done.returncode == 2
    assert "there is no script 'nowhere.py'" in done.stderr


def test_a_script_that_compiles_nothing(tmp_path, monkeypatch, capsys):
    """There is nothing to compare: as an option that does not exist."""

    def measured(command, **given):
        Profiled("a backend", 1.0, None).save(command[command.index("--result") + 1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("fx_fusion.commands.subprocess.run", measured)
    assert profile_command("train.py", [], after=1, steps=1, trace=None) == 2
    assert "nothing was compiled: the script has to call torch.compile, or model.compile()" in capsys.readouterr().out


def test_only_the_steps_of_the_first_optimizer_count():
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    with Steps("eager", after=1, steps=1, trace=None) as steps:
        for _ in range(2):
            one.step()
            other.step()
        with pytest.raises(Measured):
            one.step()
    assert steps.made == steps.needed == 3
    assert steps.result.ms > 0
    assert steps.result.kinds["optimizer"] > 0
    one.step()  # nobody listens any more


def kernel(name, start, end, annotation=False):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=span, device_type=DeviceType.CUDA, is_user_annotation=annotation)


def test_a_gpu_is_idle_where_none_of_its_kernels_runs():
    host = SimpleNamespace(name="aten::mm", device_type=DeviceType.CPU, self_cpu_time_total=99.0, is_user_annotation=False)
    events = [host, kernel("_rope_kernel", 10, 20), kernel("nvjet_a", 30, 50), kernel("ncclDevKernel_x", 35, 60),
              kernel("Optimizer.step#AdamW.step", 0, 100, annotation=True)]  # fmt: skip
    assert microseconds_by_kind(events) == {"rope": 10, "matmul": 20, "communication": 25, "idle": 10}


def test_the_table_says_what_differs_first():
    text = side_by_side([
        Profiled("inductor", 10.0, 2 * 2**30, {"matmul": 6.0, "loss": 3.0}),
        Profiled("fx_fusion", 8.0, 2**30, {"matmul": 5.9, "loss": 1.0, "norm": 0.5}, fused=3, graphs=1),
    ])  # fmt: skip
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines[2:5]] == ["loss", "norm", "matmul"]
    assert lines[-3:] == ["fx_fusion: 1.25 of inductor's speed", "peak memory: 2.00 -> 1.00 GiB", "3 sites fused in 1 graph"]
    assert "nothing was compiled" in side_by_side([Profiled("inductor", 1.0, None), Profiled("fx_fusion", 1.0, None)])


@pytest.mark.parametrize("wanted", ["inductor", "fx_fusion"])
def test_a_script_that_names_either_backend_gets_the_wanted_one(wanted, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model=None, **given: seen.append(given))
    with compiling(wanted, {}):
        torch.compile(backend="fx_fusion", options={"memory": "min", "max_autotune": True})
        torch.compile(backend="eager")
        torch.compile(mode="max-autotune-no-cudagraphs", dynamic=False)
    ours = {} if wanted == "inductor" else {"memory": "min"}
    assert seen[0] == {"backend": wanted, "options": {"max_autotune": True, **ours}}
    assert seen[1] == {"backend": "eager"}
    assert seen[2]["backend"] == wanted
    assert seen[2]["dynamic"] is False
    assert seen[2]["options"].get("mode", seen[2]["options"].get("max_autotune"))


def test_the_arguments_of_a_script_are_its_own(tmp_path):
    """Also those that are called as ours."""
    file = tmp_path / "train.py"
    file.write_text("import sys\nprint('ARGUMENTS', sys.argv[1:])\n")
    command = [sys.executable, "-m", "fx_fusion", "profile", str(file), "--", "--steps", "3", "--name", "a"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ARGUMENTS ['--steps', '3', '--name', 'a']" in said.stderr
    assert "--steps 5" in said.stderr, "ours is as it was"
