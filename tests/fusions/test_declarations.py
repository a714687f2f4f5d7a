"""Test what every fusion declares."""

from fx_fusion.fusion.registry import all_fusions

# These become calls of torch's own, or of another fusion's op.
WITHOUT_A_KERNEL = {
    "attention", "biased_attention", "causal_mask", "complex_rope", "dense_mask", "flex_attention", "moe_combine", "repeat_kv",
    "routed_experts",
}  # fmt: skip


def test_every_fusion_is_two_files_of_one_name():
    from pathlib import Path

    root = Path(__file__).parents[2]
    for fusion in all_fusions():
        assert (root / "patterns" / f"{fusion.name}.py").exists()
        assert (root / "tests" / "fusions" / f"test_{fusion.name}.py").exists()
        assert (root / "kernels" / f"{fusion.name}.py").exists() == (fusion.name not in WITHOUT_A_KERNEL)
        assert fusion.source
        assert fusion.cases
