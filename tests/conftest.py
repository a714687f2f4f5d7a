import os

import pytest
import torch

from fx_fusion.ops.fused_op import interpreting

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(2)
# MKL chooses a function's kernel at its first call; two threads at once there can get one of low accuracy for a call
# (github.com/pytorch/pytorch/issues/188792). One element is one thread's.
for function in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.tanh, torch.sin, torch.cos, torch.erf, torch.expm1):
    for dtype in (torch.float32, torch.float64):
        function(torch.ones(1, dtype=dtype))


def pytest_collection_modifyitems(config, items):
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def pytest_pycollect_makemodule(module_path, parent):
    torch.manual_seed(0)  # the tensors that a test file makes are the same in every run


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
