"""``python -m tests.fuzz.layers 0 1200``: random layers, repeated, whose graphs call bodies and must return the same bits.

Forward and backward graphs are those that AOTAutograd makes, run op by op. What Inductor makes of calls is tested elsewhere.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from fx_fusion.inductor import layers_once, repeats

N = 8
UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin, torch.relu, torch.sigmoid, F.gelu, F.silu, torch.exp, torch.neg, torch.square, lambda t: t * 0.5, lambda t: t + 1,
    lambda t: t.detach(), lambda t: t.double().float(), lambda t: t.bfloat16().float(),
)  # fmt: skip
MOVES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.view(2, -1, N).transpose(0, 1).reshape(-1, N), lambda t: t.mT.contiguous().mT, lambda t: t.roll(1, 0),
    lambda t: t.reshape(-1, 2, N // 2).flip(1).reshape(-1, N), lambda t: torch.cat(t.chunk(2, -1)[::-1], -1),
    lambda t: t[torch.arange(t.shape[0] - 1, -1, -1)], lambda t: torch.stack(t.unbind(-1), -1), lambda t: t.sort(-1)[0],
)  # fmt: skip
NORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: F.layer_norm(t, (N,)), lambda t: t.softmax(-1), lambda t: t / (t.abs().mean(-1, keepdim=True) + 1),
    lambda t: t - t.mean(0), lambda t: F.normalize(t, dim=-1),
)  # fmt: skip
OPS: dict[str, Callable[..., Tensor]] = {
    "unary": lambda top, a, c, i, p: UNARY[i % len(UNARY)](top),
    "move": lambda top, a, c, i, p: MOVES[i % len(MOVES)](top),
    "norm": lambda top, a, c, i, p: NORMS[i % len(NORMS)](top),
    "product": lambda top, a, c, i, p: top @ p[i % 2],
    "add": lambda top, a, c, i, p: top + c,
    "gate": lambda top, a, c, i, p: top * torch.tanh(c),
    "bias": lambda top, a, c, i, p: top + p[2],
    "constant": lambda top, a, c, i, p: top * torch.arange(N, dtype=torch.float32) + torch.full((N,), 0.1),
    "attention": lambda top, a, c, i, p: F.scaled_dot_product_attention(top[None, None], a[None, None], c[None, None])[0, 0],
    "where": lambda top, a, c, i, p: torch.where(c > 0, top, a),
}  # fmt: skip
Layer = list[tuple[str, int, int]]


def random_layer(rng: random.Random) -> Layer:
    """Return the steps of a layer: what is done, and to which of the values before."""
    steps = [(rng.choice([*OPS, "product", "save"]), rng.randrange(100), rng.randrange(100)) for _ in range(rng.randint(3, 9))]
    steps.insert(rng.randrange(len(steps)), ("product", 0, 0))
    return steps


def run(layer: Layer, x: Tensor, parameters: list[Tensor], saved: list[Tensor]) -> Tensor:
    """Run a layer on x (rows, N). Its parameters are two matrices and a row."""
    values = [x]
    for what, i, j in layer:
        a, c = values[i % len(values)], values[j % len(values)]
        if what == "save":
            saved.append(a if i % 3 else a.mT)
        else:
            values.append(OPS[what](values[-1], a, c, i, parameters))
    x = x + values[-1] * 0.1
    return F.layer_norm(x, (N,)) if layer[0][1] % 2 else x


def program(seed: int) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor], bool, Any]:
    """Return a stack of layers, its inputs, whether they have gradients, and how its joint graph is partitioned."""
    rng, given = random.Random(seed), torch.Generator().manual_seed(seed)
    layers = [random_layer(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    order = [layers[0] if rng.random() < 0.7 else layers[-1] for _ in range(rng.randint(4, 8))]
    odd, returns = rng.choice([None, None, rng.randrange(len(order))]), rng.random() < 0.5

    def stack(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        saved: list[Tensor] = []
        for i, layer in enumerate(order):
            x = run(layer, x * 2 if i == odd else x, list(parameters[3 * i : 3 * i + 3]), saved)
        return (x, *(saved if returns else [t.sum() for t in saved[:3]]))

    shapes = [(6, N), *((N, N), (N, N), (N,)) * len(order)]
    inputs = [torch.randn(shape, generator=given) / (3 if shape == (N, N) else 1) for shape in shapes]
    partition = rng.choice([min_cut_rematerialization_partition, default_partition])
    return stack, inputs, rng.random() < 0.8, partition


def results(seed: int, *, once: bool) -> tuple[list[Tensor], list[layers_once.Body]]:
    """Return the results of a program and its gradients, and the bodies that its graphs call."""
    stack, inputs, train, partition = program(seed)
    bodies: list[layers_once.Body] = []

    def compiler(gm: torch.fx.GraphModule, _: Any) -> Any:
        bodies.extend(layers_once.compile_layers_once(gm) if once else ())
        return make_boxed_func(gm.forward)

    given = [t.clone().requires_grad_(train) for t in inputs]
    with mock.patch.multiple(repeats, _LEAST=3, _CALL=1), mock.patch.object(layers_once, "_FEWEST", 20):
        found = aot_function(stack, compiler, compiler, partition_fn=partition)(*given)
        losses = [(t.double() * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in found if t.requires_grad]
        gradients = torch.autograd.grad(sum(losses), given, allow_unused=True) if losses else ()
    return [*found, *(g for g in gradients if g is not None)], bodies


def differs(seed: int) -> tuple[bool, int]:
    """Return whether a program's results depend on whether its layers are compiled once, and how many calls there are."""
    (flat, _), (once, bodies) = results(seed, once=False), results(seed, once=True)
    alike = len(flat) == len(once) and all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and a.stride() == b.stride() for a, b in zip(flat, once, strict=True)
    )
    return not alike, sum(body.calls for body in bodies)


if __name__ == "__main__":
    torch.set_num_threads(1)
    calls, wrong = 0, []
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        found, count = differs(seed)
        calls += count
        wrong += [seed] if found else []
    print(f"{calls} calls of bodies; {len(wrong)} programs differ: {wrong}")
