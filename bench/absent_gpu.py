"""An H200 that is not there: what Inductor would launch on one, and how many bytes that moves, on a machine without a GPU.

Tensors without memory lie on ``cuda:0`` of a torch that was built for CPUs; graphs are captured, rewritten, split and
lowered as on a GPU, up to the code that would be run. What needs a GPU to decide is left out: Inductor pads no products,
folds no constants and measures nothing. Sizes are static. Import this module before torch, in a process that does nothing
else: torch is told of a GPU for good.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "torch" in sys.modules:
    raise ImportError("bench.absent_gpu must be imported before torch, which asks once for its devices")
_spec = importlib.util.find_spec("torch")
assert _spec is not None, "torch is not installed"
assert _spec.origin is not None
_torch = Path(_spec.origin).parent
with tempfile.TemporaryDirectory() as _folder:
    _library = Path(_folder) / "absent_gpu.so"
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{_torch}/include", Path(__file__).with_suffix(".cpp"),
         "-o", _library, f"-L{_torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{_torch}/lib"],
        check=True,
    )  # fmt: skip
    ctypes.CDLL(str(_library))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

assert torch.version.cuda is None, f"torch {torch.__version__} is built for GPUs; bench.absent_gpu needs a build for CPUs"

_DEVICE = torch.device("cuda:0")
_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, max_threads_per_multi_processor=2048, warp_size=32,
    max_threads_per_block=1024, regs_per_multiprocessor=65536, total_memory=140 * 2**30, L2_cache_size=50 * 2**20,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    gcnArchName="", is_integrated=0, is_multi_gpu_board=0,
)  # fmt: skip
# What makes no difference between two kernels that have it in their names.
_NO_WORK = frozenset((
    "view", "reshape", "_unsafe_view", "permute", "t", "unsqueeze", "squeeze", "expand", "select", "slice", "getitem",
    "clone", "convert_element_type", "_to_copy",
))  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """The kernel that one node of Inductor's schedule launches.

    Attributes:
        name: of a kernel of ours, its function; of Inductor's, the ops in it; of a library's, the op.
        bytes: what it reads and writes, each tensor once.
        kind: "ours", "inductor" or "library" (products, convolutions, attention, ops that are not traced).
    """

    name: str
    bytes: int
    kind: str


@dataclass(frozen=True)
class Code:
    """The code of one graph: its text, its kernels, and whether it is a backward."""

    text: str
    kernels: tuple[Kernel, ...]
    backward: bool


def on_gpu(value: Any, mode: FakeTensorMode) -> Any:
    """A tensor, or a module with its parameters and buffers (in place), on the GPU and without memory."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return FakeTensor(mode, empty, _DEVICE)
    assert isinstance(value, nn.Module)
    moved: dict[torch.Tensor, torch.Tensor] = {}  # a tied parameter stays one
    for module in value.modules():
        for name, p in module._parameters.items():
            if p is not None:
                moved.setdefault(p, nn.Parameter(on_gpu(p, mode), requires_grad=p.requires_grad))
                module._parameters[name] = moved[p]  # type: ignore[assignment]
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = moved.setdefault(b, on_gpu(b, mode))
    return value


def code_of(model: nn.Module, inputs: dict[str, torch.Tensor], backend: str, options: Any = None) -> list[Code]:
    """Return what ``torch.compile(model, backend, options)`` makes of the graphs of a training step, forward and backward of
    each. The model and its inputs are ``on_gpu``; it is called, and what its graphs return has no values."""
    torch._dynamo.reset()
    _made.clear()
    _bodies.clear()
    torch.compile(model, backend=backend, options=options)(**inputs)
    return list(_made)


def bodies_of_rows() -> list[Code]:
    """Return what became of losses that treat rows one by one, in the last ``code_of``: for a chunk of 1024 rows."""
    return list(_bodies)


# -- telling torch ---------------------------------------------------------------------------------------------------------
_made: list[Code] = []
_bodies: list[Code] = []
_written = tempfile.TemporaryDirectory()  # gone with the process


class _Driver:
    """The part of Triton's driver that is asked without a launch."""

    class utils:
        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {
                "max_shared_mem": 232448,
                "max_num_regs": 65536,
                "multiprocessor_count": 132,
                "warpSize": 32,
                "sm_clock_rate": 1980000,
                "mem_clock_rate": 3201000,
                "mem_bus_width": 6144,
            }

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return _DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def _tell_torch() -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.graph import GraphLowering

    for passes in (joint_graph, post_grad):  # patterns are traced on real tensors, on CPUs as well
        passes.lazy_init(torch.device("cpu"))
        passes.lazy_init = lambda *_, **__: None
    functorch_config.force_non_lazy_backward_lowering = True
    functorch_config.enable_autograd_cache = inductor_config.fx_graph_cache = False
    inductor_config.joint_graph_constant_folding = inductor_config.shape_padding = False
    inductor_config.compile_threads = 1
    triton.runtime.driver.set_active(_Driver())
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # type: ignore[attr-defined]  # bitsandbytes reads it when imported
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_properties": _PROPERTIES, "get_device_capability": (9, 0), "get_device_name": _PROPERTIES.name,
        "is_bf16_supported": True, "synchronize": None, "set_device": None, "_lazy_init": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    answers |= {"get_compute_capability": 90, "is_triton_capable": True, "raise_if_triton_unavailable": None}
    for name, answer in answers.items():
        if hasattr(CudaInterface, name):
            setattr(CudaInterface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *_: _PROPERTIES)
    GraphLowering.compile_to_module = _keep_code
    torch._inductor.standalone_compile = _keep_body  # type: ignore[assignment]


def _keep_body(gm: torch.fx.GraphModule, fakes: list[FakeTensor], **_: Any) -> None:
    """Remember the code for the number of rows that is expected, in the place of ``torch._inductor.standalone_compile``."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    mode, before = FakeTensorMode(), len(_made)
    given = []
    for fake in fakes:
        sizes, strides = (tuple(getattr(n, "node", n).hint if isinstance(n, torch.SymInt) else n for n in of)
                          for of in (fake.shape, fake.stride()))  # fmt: skip
        given.append(on_gpu(torch.empty_strided(sizes, strides, dtype=fake.dtype, device="meta"), mode))
    with mode:
        static = make_fx(gm)(*given)
    compile_fx(static, given)
    _bodies.extend(_made[before:])
    del _made[before:]


def _keep_code(self: Any) -> types.ModuleType:
    """Stand for ``GraphLowering.compile_to_module``: remember the code and run none."""
    text = self.codegen()[0].value
    _made.append(Code(text, tuple(_kernels(self)), self.is_backward))
    path = Path(_written.name) / f"{len(_made)}.py"  # Inductor reads it
    path.write_text(text)
    module = types.ModuleType("code")
    module.__file__ = self.cache_path = str(path)
    module.value, self.cache_key, self.cache_linemap = text, "", []
    outputs = self.orig_gm.graph.output_node().args[0]
    values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in outputs]

    def call(given: list[Any]) -> list[Any]:
        given.clear()
        return [on_gpu(v, v.fake_mode) if isinstance(v, FakeTensor) else v for v in values]

    module.call = call
    return module


def _kernels(graph: Any) -> Iterator[Kernel]:
    from torch._inductor import ir
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    scheduler = graph.scheduler
    for node in scheduler.nodes:
        made = node.node
        nothing = isinstance(made, ir.ComputedBuffer) and 0 in getattr(made.data, "ranges", ())  # memory alone
        if nothing or isinstance(node, NopKernelSchedulerNode) or isinstance(made, ir.MultiOutput):
            continue
        if isinstance(made, ir.InvokeSubgraph):
            with V.set_graph_handler(made.subgraph.graph):
                yield from list(_kernels(made.subgraph.graph))
            continue
        if isinstance(made, ir.UserDefinedTritonKernel):  # Inductor counts what it writes more than once
            names = {scheduler.mutation_real_name.get(d.name, d.name) for d in node.read_writes.reads_and_writes()}
            buffers = [b for b in map(graph.try_get_buffer, names) if b is not None]
            size = sum(math.prod(map(int, b.get_size())) * b.get_dtype().itemsize for b in buffers)
            yield Kernel(made.get_kernel_and_metadata()[0].fn.__name__, size, "ours")
            continue
        library = isinstance(made, ir.ExternKernel)
        yield Kernel(_ops(node), node.get_read_write_buffers_sizes(), "library" if library else "inductor")


def _ops(node: Any) -> str:
    names = set()
    for part in node.get_nodes():
        for origin in getattr(part.node, "origins", None) or ():
            target = getattr(origin.target, "overloadpacket", origin.target)
            names.add(getattr(target, "__name__", str(target)).split(".")[-1])
    return "+".join(sorted(names - _NO_WORK)) or "copy"


_tell_torch()
