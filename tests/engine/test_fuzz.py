"""A fixed part of what ``python -m tests.fuzz`` runs: some seeds of every family, with the mutations that they draw."""

from collections import Counter

import pytest
import torch

from tests.fuzz import fuzzed
from tests.fuzz.compare import parted
from tests.fuzz.judge import judge
from tests.fuzz.layers import differs
from tests.fuzz.program import Input, Program, script
from tests.fuzz.programs import families, seed_of
from tests.helpers import slow_but

FIRST, PROGRAMS = 2000, 7  # of each family
FIRST_OF = {"masked": 2028}  # the one mask that fused among 2000 to 2006 is rounded to float16, and no longer proved
LEAST = {  # about half of what fuses: a fuzzer that fuses nothing tests nothing
    "norms": {"add_layer_norm": 1, "add_rms_norm": 2, "layer_norm": 1},
    "gated_norms": {"gated_rms_norm": 2, "rms_norm": 1},
    "images": {"group_norm": 2, "group_norm_swish": 1},
    "evonorms": {"evonorm_b0": 2, "evonorm_s0": 1},
    "glus": {"geglu": 2, "swiglu": 1},
    "embeddings": {"embedding": 3},
    "ropes": {"rope": 3},
    "complex_ropes": {"complex_rope": 4},
    "written_out": {"attention": 3},
    "masked": {"block_sparse_attention": 1},
    "grouped": {"causal_mask": 2, "repeat_kv": 5},
    "losses": {"cross_entropy": 2},
    "heads": {"cross_entropy": 2},
    "policies": {"token_log_probs": 1, "log_probs_entropy": 2},
    "modules": {"embedding": 3, "rms_norm": 5, "linear_cross_entropy": 1},
    "weighed": {"linear_cross_entropy": 2},
    "distilled": {"linear_soft_cross_entropy": 1},
    "rows_inside": {"linear_rows": 1},
    "rows_behind": {"linear_rows": 3},
    "rows_outside": {"linear_rows": 2},
    "rows_returned": {"linear_rows": 3},
    "convolutions": {"causal_conv1d": 1},
    "experts": {"moe_sort": 1, "moe_dispatch": 2, "moe_combine": 2},
    "scans": {"mamba2_scan": 1},
    "blocks": {"add_layer_norm": 5, "geglu": 2, "swiglu": 1, "linear_cross_entropy": 1},
}


FAST = [name for name in families() if name.split()[1] in ("norms", "glus", "ropes", "losses", "grouped", "images", "convolutions", "experts", "scans")]


def test_every_family_has_to_fuse_something():
    assert {name.split()[1] for name in families()} == set(LEAST)


@pytest.mark.parametrize("name", slow_but(FAST, families()))
def test_programs_near_the_patterns(name):
    fused, judged = Counter(), 0
    for n in range(PROGRAMS):
        program = fuzzed(seed_of(name, FIRST_OF.get(name.split()[1], FIRST) + n))
        rest = "eager" if n % 3 else "aot_eager"
        verdict = judge(program, rest)
        assert not verdict.failure, f"{verdict.failure}\n\n{script(program, rest)}\n{verdict.report}"
        judged += verdict.judged
        fused += verdict.fused
    assert judged >= 3 * PROGRAMS // 2, "most programs raise in eager: they test nothing"
    missing = {f: (fused[f], n) for f, n in LEAST[name.split()[1]].items() if fused[f] < n}
    assert not missing, f"fused, and expected: {missing}"


def _scaled_gradient(y):
    return y.detach() + (y - y.detach()) * 1.01


WRONG = {
    "number": lambda args, y, z: (y * 1.0001, z),
    "gradient": lambda args, y, z: (_scaled_gradient(y), z),
    "no_gradient": lambda args, y, z: (y.detach(), z.detach()),
    "alias": lambda args, y, z: (y, z.clone()),
    "dtype": lambda args, y, z: (y.double(), z),
    "layout": lambda args, y, z: (y.mT.contiguous().mT, z),
    "argument": lambda args, y, z: (y, z, [a.detach().add_(1) for a in args if a.is_floating_point()])[:2],
}


@pytest.mark.parametrize("name", [*WRONG, "nothing"])
def test_what_the_judge_sees(name, monkeypatch):
    def backend(gm, inputs):
        return lambda *args: WRONG[name](args, *gm(*args)) if name in WRONG else gm(*args)

    program = Program(0, "by hand", statements=["y = x.sin() * 2", "z = y.view(-1)"], outputs=["y", "z"])
    program.inputs["x"] = Input("torch.randn(3, 4, generator=g)", "made")
    monkeypatch.setattr("tests.fuzz.judge.ours", lambda rest: backend)
    verdict = judge(program)
    assert bool(verdict.failure) == (name in WRONG), verdict.failure


def test_where_eager_overflows_float64_says_what_is_right():
    nan, usual = float("nan"), torch.tensor([1.0, float("nan")])
    for exact, found, right in (([1.0, 2.0], [1.0, 2.0], True), ([1.0, 2.0], [1.0, 9.0], False), ([1.0, nan], [1.0, 2.0], False)):
        used, _ = parted("dx", torch.tensor(found), usual, torch.tensor(exact, dtype=torch.float64), torch.float16)
        assert (used <= 1) == right, (exact, found)


@pytest.mark.parametrize("line", ["y[..., -1] += 1", "y[0] = 1", "y.add_(1)", "y *= 2"])
def test_a_program_that_writes_says_so(line):
    assert Program(0, "by hand", statements=["y = x.sin()", line], outputs=["y"]).writes()
    assert not Program(0, "by hand", statements=["y = x.sin()", "z = y >= 1"], outputs=["y"]).writes()


def test_random_layers_that_are_compiled_once():
    found = [differs(seed) for seed in range(10)]
    assert not any(wrong for wrong, _ in found), found
    assert sum(calls for _, calls in found) > 10
