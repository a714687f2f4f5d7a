"""Trains small models by the code that Inductor generates, with launches of our kernels in it as on a GPU. On a CPU: the rest
is C++, and a launch runs in Triton's interpreter.

``python -m tests.generated_code NAME ...`` in a process without TRITON_INTERPRET prints, for each of ``CASES``, how far its
gradients are from float64's, each and all together, and beside them those of eager; the kernels that were launched; and what
the report says.
"""

import contextlib
import copy
import json
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
import triton.language as tl
from torch._dynamo.device_interface import CpuInterface
from torch._inductor.fx_passes import pad_mm
from torch._inductor.runtime import triton_compat, triton_heuristics
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from triton.runtime.interpreter import InterpretedFunction

import fx_fusion
from fx_fusion.kernels.norms import row_norm
from fx_fusion.memory import candidates
from fx_fusion.ops import library
from fx_fusion.ops.on_cpu import kernels_on_cpu
from fx_fusion.torch_internals import lowerings
from tests.helpers import tiny_llama

LAUNCHED = []


class H200:
    """What Triton has to know of a GPU to say which of its arguments a kernel writes to."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def is_active(self):
        return True


def as_on_a_gpu():
    for value in (1, torch.empty(1)):
        jit.mangle_type(value)  # the first call of it would ask for a real driver
    driver.set_active(H200())
    lowerings.on_gpu = lambda x: True
    library._is_traceable = lambda tensor, symbolic: symbolic or all(isinstance(n, int) for n in tensor.shape)
    row_norm.multiprocessors = lambda tensor: 3
    candidates._SMALLEST = 1
    pad_mm.check_device = lambda a, b: True
    pad_mm.has_triton = lambda: True
    CpuInterface.raise_if_triton_unavailable = lambda device=None: None
    triton_compat.GPUTarget = lambda *of_this_device: H200().get_current_target()  # torch 2.14 asks what options it has
    triton_heuristics.CachingAutotuner.precompile = lambda self, *args, **options: None
    triton_heuristics.CachingAutotuner.run = launch
    jit.JITFunction.run = launch_of_an_op


def launch(self, *args, stream=None, **options):
    """What the generated code calls for each launch, with the sizes of the grid behind the arguments."""
    kernel = next(
        value
        for name, module in sys.modules.items()
        if name.startswith("fx_fusion.kernels")
        for value in vars(module).values()
        if isinstance(value, jit.JITFunction) and value.fn.__name__ == self.fn.__name__
    )
    names = [p.name for p in kernel.params if not p.is_constexpr]
    *given, x, y, z = args
    constants = {n: v for n, v in self.triton_meta["constants"].items() if n in kernel.arg_names and n not in names}
    stored = sorted(name.lower() for name in ("STORE_Y", "STORE_Q", "ADD") if constants.get(name))
    LAUNCHED.append(" ".join([kernel.fn.__name__, *stored]))
    with interpreted():
        _interpreted(kernel)[x, y, z](**dict(zip(names, map(_in_memory, names, given), strict=True)), **constants)


def _in_memory(name, value):
    """An argument; a tensor of one number was read by Inductor, since a CPU's memory holds it."""
    return torch.tensor(value) if name.endswith("_ptr") and isinstance(value, float) else value


def launch_of_an_op(kernel, *args, grid, warmup, **options):
    """What an op that the generated code calls does for each launch."""
    LAUNCHED.append(f"{kernel.fn.__name__} of an op")
    with interpreted():
        _interpreted(kernel)[grid](*args, **{name: value for name, value in options.items() if name in kernel.arg_names})


def _interpreted(kernel, known={}):  # noqa: B006
    return known.setdefault(kernel.fn, InterpretedFunction(kernel.fn))


@contextlib.contextmanager
def interpreted():
    """Functions that kernels call are interpreted too. The interpreter leaves its own ops in Triton's modules: they are put
    back, for who asks next what a kernel writes to."""
    modules = [m for n, m in sys.modules.items() if n.startswith(("fx_fusion.kernels", "triton.language")) and m is not None]
    classes = [tl.tensor, tl.dtype, tl.condition, tl.core.tensor_descriptor_base, tl.core.base_type, tl.core.constexpr]
    before = [(of, dict(vars(of))) for of in (*modules, *classes)]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, jit.JITFunction):
                setattr(module, name, _interpreted(value))
    try:
        yield
    finally:
        for of, was in before:
            for name, value in list(vars(of).items()):
                if name in was and was[name] is not value:
                    setattr(of, name, was[name])
                elif name not in was and not isinstance(of, ModuleType):
                    delattr(of, name)


CASES = {
    "default": {},
    "min": {"memory": "min"},
    "float8": {"float8": "rowwise"},
    "float8, min": {"float8": "rowwise_gw_hp", "memory": "min"},
    "scaled loss": {},
    "padded": {},
    "flat layers": {"layers": "flat"},
    "layers once": {"layers": "once"},
}


class Padded(torch.nn.Module):
    """A lookup whose gradient is a product's of 30 columns: Inductor makes it in wider rows, and hands a part of these on."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=64)
        self.table = torch.nn.Parameter(torch.randn(64, 30))
        self.a, self.b = torch.nn.Linear(30, 40, bias=False), torch.nn.Linear(40, 30, bias=False)

    def forward(self, input_ids, labels):
        logits = F.linear(self.b(torch.tanh(self.a(F.embedding(input_ids, self.table)))), self.table)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def trained(options, padded, times, layers):
    """One step of a Llama with a tied table, for so many times its loss, and then its loss without a gradient."""
    torch.manual_seed(0)
    model = Padded() if padded else tiny_llama(torch.bfloat16, num_hidden_layers=layers, tie_word_embeddings=True)
    ids = torch.randint(0, model.config.vocab_size - 9, (2, 16))
    batch = {"input_ids": ids, "labels": ids}

    def gradients(call, of):
        of.zero_grad()
        (times * call(**batch).loss).backward()
        return {name: parameter.grad.double() for name, parameter in of.named_parameters()}

    exact = gradients(in_float64 := copy.deepcopy(model).double(), in_float64)
    eager = gradients(model, model)
    LAUNCHED.clear()
    call = torch.compile(model, backend="fx_fusion", options={"select": "always", "strict": True, **options})
    with fx_fusion.recording() as report, kernels_on_cpu(True):
        found = gradients(call, model)
        trained = list(LAUNCHED)
        LAUNCHED.clear()
        with torch.no_grad():
            loss = call(**batch).loss.item()
    differences = [found[name] - right for name, right in exact.items()]
    errors = {
        name: [float((of[name] - right).norm() / right.norm()) for of in (found, eager)] for name, right in exact.items()
    }
    off, right = (torch.stack([tensor.norm() for tensor in of]).norm() for of in (differences, exact.values()))
    return {
        "errors": errors, "error": float(off / right), "launched": trained, "without a gradient": list(LAUNCHED), "loss": loss,
        "exact loss": in_float64(**batch).loss.item(), "report": str(report),
    }  # fmt: skip


def main():
    as_on_a_gpu()
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1, force_shape_pad=True):
        found = {
            name: trained(CASES[name], name == "padded", 3.0 if name == "scaled loss" else 1.0, 4 if "layers" in name else 1)
            for name in sys.argv[1:]
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
