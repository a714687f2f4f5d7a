"""Launches: row order, warps and stages, integers, tracing."""

import pytest
import torch

from fx_fusion.kernels import gated_rms_norm, log_probs_entropy
from fx_fusion.kernels.lib import device
from fx_fusion.kernels.lib.rows import as_rows, row_order
from fx_fusion.kernels.logits.logit_rows import NO_IGNORE, launch_rows
from fx_fusion.kernels.norms import row_norm
from fx_fusion.ops.launch import NotTraceable, traced


def test_integers_that_inductor_can_pass(monkeypatch):
    """Its launcher has 32 bits for an integer unless that is too large: one that is too small overflows there."""
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append([a for a in args if isinstance(a, int)])

    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: Recorder())
    logits, target = torch.randn(4, 9000), torch.zeros(4, dtype=torch.int64)
    with traced():
        log_probs_entropy._fwd(logits, target, 0.0, 1.0)
        launch_rows(logits, target, None, NO_IGNORE, 0.0, 0.0, 1.0, loss=torch.empty(4), stats=torch.empty(2, 4))
        with pytest.raises(NotTraceable):
            launch_rows(logits, target, None, -(2**63), 0.0, 0.0, 1.0, loss=torch.empty(4), stats=torch.empty(2, 4))
    assert len(launched) == 2
    assert min(n for args in launched for n in args) >= -(2**31)


def test_row_order_follows_memory():
    x = torch.randn(2, 5, 3, 24).transpose(1, 2)
    assert row_order(x) == [0, 2, 1, 3]
    assert as_rows(x.permute(row_order(x))).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("n", [128, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("loaded", [6, 8, 10, 12])
def test_warps_are_powers_of_two(n, loaded):
    """Of mixed dtypes too: x, gate and dy may have 2 or 4 bytes each."""
    assert gated_rms_norm.gated_rms_norm_bwd_plan(n, loaded, torch.empty(())).num_warps in (4, 8, 16, 32)


@pytest.mark.parametrize(("kib", "stages"), [(227, (3, 3)), (163, (3, 2)), (99, (2, 1)), (48, (1, 1))])
def test_loads_run_ahead_as_far_as_the_device_has_room(kib, stages, monkeypatch):
    """Hopper, Ampere, Ada, and one that says nothing: 4096 columns of gated_rms_norm, of add_rms_norm, in float32."""
    monkeypatch.setattr(device, "shared_memory", lambda x: kib << 10)
    x = torch.empty(())
    plans = gated_rms_norm.gated_rms_norm_bwd_plan(4096, 12, x), row_norm.row_norm_bwd_plan(4096, 12, False, x)
    assert tuple(plan.STAGES for plan in plans) == stages


def test_another_thread_launches_for_real_while_one_traces(device):
    import threading

    from fx_fusion.ops.launch import refuse_tracing

    seen = []

    def launch_there():
        try:
            refuse_tracing()
            seen.append("real")
        except NotTraceable:
            seen.append("traced")

    with traced():
        thread = threading.Thread(target=launch_there)
        thread.start()
        thread.join()
    assert seen == ["real"]
