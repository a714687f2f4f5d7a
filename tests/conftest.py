"""One process runs references and kernels: without a GPU every kernel is made for Triton's interpreter, and a test with the
marker ``kernel`` runs them; the others run the references, which is faster. TRITON_INTERPRET=1 makes all run the kernels."""

import gc
import importlib
import json
import os
import random
import time

import pytest
import torch

for name in [name for name in os.environ if name.startswith("FX_FUSION_")]:
    del os.environ[name]  # what the user's shell asks for is no test's
NO_GPU = not torch.cuda.is_available()
GIVEN = os.environ.get("TRITON_INTERPRET")
if NO_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton.experimental.gluon  # noqa: E402  the first launch would import it

from fx_fusion.fusion.registry import all_fusions  # noqa: E402
from fx_fusion.ops.on_cpu import interpreting, kernels_on_cpu  # noqa: E402
from tests import seconds  # noqa: E402

all_fusions()  # imports the kernels, but for those that are no fusion's
for name in ("turn", "glu", "together"):
    importlib.import_module(f"fx_fusion.kernels.float8.{name}")
if NO_GPU:
    if GIVEN is None:
        del os.environ["TRITON_INTERPRET"]  # it was for the imports; processes that tests start choose for themselves
    assert not isinstance(triton.language.sum, triton.JITFunction), "triton was imported before conftest.py"

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
# MKL chooses a function's kernel at its first call; two threads at once there can get one of low accuracy for a call
# (github.com/pytorch/pytorch/issues/188792). One element is one thread's.
for function in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.tanh, torch.sin, torch.cos, torch.erf, torch.expm1):
    for dtype in (torch.float32, torch.float64):
        function(torch.ones(1, dtype=dtype))


def pytest_addoption(parser):
    parser.addoption("--tier", choices=(*seconds.TIERS, "rest"), help="the tests of make check or make test (tests/seconds.py), or all others")
    parser.addoption("--seconds", help="append what each test takes to this file")
    parser.addoption("--at-most", type=int, help="so many cases of each test, spread over its parameters")
    parser.addoption("--minutes", type=float, help="begin no test after so many minutes: those that are left skip, and the summary counts them")
    parser.addoption("--shuffle", help="any word: another word, another order of files; with --minutes all get their turn")


def pytest_collection_modifyitems(config, items):
    if (tier := config.getoption("--tier")) is not None:
        quick = seconds.chosen([item.nodeid for item in items if item.get_closest_marker("slow") is None], "test" if tier == "rest" else tier)
        _keep(config, items, {item for item in items if (item.nodeid in quick) != (tier == "rest")})
    # Two workers take a file each: begun last, a long one would run alone at the end.
    longest = seconds.seconds_of_files([item.nodeid for item in items])
    items.sort(key=lambda item: -longest[item.nodeid.partition("::")[0]])
    if (word := config.getoption("--shuffle")) is not None:
        drawn = {path: random.Random(f"{word} {path.name}").random() for path in {item.path for item in items}}
        items.sort(key=lambda item: drawn[item.path])
    if (most := config.getoption("--at-most")) is not None:
        cases = {}
        for item in items:
            cases.setdefault(seconds.function_of(item.nodeid), []).append(item)
        _keep(config, items, {item for of in cases.values() for item in seconds.spread(of, most)})
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)


def _keep(config, items, kept):
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _processor_seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    began = _processor_seconds()
    result = yield
    if (file := item.config.getoption("--seconds")) is not None:
        with open(file, "a") as lines:
            lines.write(json.dumps([item.nodeid, round(_processor_seconds() - began, 3)]) + "\n")
    return result


LATE = "not begun: --minutes were over"
BEGAN = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(LATE)


def pytest_terminal_summary(terminalreporter, config):
    late = sum(LATE in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if late:
        terminalreporter.write_line(f"{late} tests were not begun: the {config.getoption('--minutes'):g} minutes of --minutes were over")


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--at-most") is not None:
        session.exitstatus = pytest.ExitCode.OK  # a file whose tests are all slow is no finding of make sanitize


def pytest_pycollect_makemodule(module_path, parent):
    torch.manual_seed(0)  # the tensors that a test file makes are the same in every run


@pytest.fixture(autouse=True, scope="module")
def small_collections():
    """Dynamo's resets collect garbage, twice a test: of what is new since the file began, and not of all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def kernels(request):
    """Tests with the marker ``kernel`` run the kernels of ops on CPU tensors."""
    if request.node.get_closest_marker("kernel") is None or not NO_GPU:
        yield
    else:
        with kernels_on_cpu(True):
            yield


@pytest.fixture
def device():
    return "cpu" if NO_GPU or interpreting() else "cuda"
