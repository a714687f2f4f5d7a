"""``python -m bench.code gpt2 bert``: the kernels that Inductor and fx_fusion launch in a step of a model on an H200, and
the bytes that these move, on a machine without a GPU. The models of ``bench.models``, at their sizes there."""

from bench.absent_gpu import Code, code_of, on_gpu  # isort: skip  before torch

import argparse
import contextlib
import time
from collections import Counter

import torch
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fusion
from bench import families
from bench.families import FAMILIES, OF_TIMM
from fx_fusion.options import LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=FAMILIES)
    parser.add_argument(
        "--variants", default="inductor,fx_fusion", help="with a colon, a mode of memory or layers: fx_fusion:min or :once"
    )
    parser.add_argument("--rows", type=int, default=12, help="kernels shown of each pass, those that move most")
    parser.add_argument("--write", metavar="FOLDER", help="also write the code there")
    given = parser.parse_args()
    families.DEVICE = "cpu"
    for name in given.models:
        model, inputs, mode = built(name)
        for variant in given.variants.split(","):
            backend, _, way = variant.partition(":")
            options = {"layers" if way in LAYERS else "memory": way} if way else None
            began = time.process_time()
            with mode, fx_fusion.recording(), torch._inductor.config.patch(force_disable_caches=True):
                codes = code_of(model, inputs, backend, options)
            print(f"{name}, {variant}: compiled in {time.process_time() - began:.1f} processor seconds")
            for i, code in enumerate(codes):
                _show(f"{name}, {variant}, graph {i // 2}, {'backward' if code.backward else 'forward'}", code, given.rows)
                if given.write:
                    with open(f"{given.write}/{name}.{variant.replace(':', '.')}.{i}.py", "w") as file:
                        file.write(code.text)


def built(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], FakeTensorMode]:
    """Return the model of a family, the inputs of a step and the mode that their tensors are in."""
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    TORCH_INIT_FUNCTIONS["trunc_normal_"] = lambda tensor, **_: tensor  # draws until it has all values
    family, mode = FAMILIES[name], FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.nullcontext() if name in OF_TIMM else mode:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model, step, _ = family.build(family.batch, family.length)
        finally:
            torch.set_default_dtype(torch.float32)
        inputs = step(0)
    return on_gpu(model.train(), mode), {name: on_gpu(value, mode) for name, value in inputs.items()}, mode


def _show(title: str, code: Code, rows: int) -> None:
    moved, count = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for kernel in code.kernels:
        moved[kernel.kind, kernel.name] += kernel.bytes
        count[kernel.kind, kernel.name] += 1
    of_library = sum(size for (kind, _), size in moved.items() if kind == "library")
    total = moved.total() - of_library
    print(f"\n{title}: {count.total()} kernels, {total / 2**30:.2f} GiB, and {of_library / 2**30:.2f} by libraries")
    shown = [(f"{size / 2**30:.3f}", count[key], *key) for key, size in moved.most_common(rows)]
    print(tabulate(shown, ("GiB", "kernels", "of", "ops"), maxcolwidths=[None, None, None, 90]))


if __name__ == "__main__":
    main()
