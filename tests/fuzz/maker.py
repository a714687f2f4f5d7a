"""Builds a program statement by statement, with choices drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.program import Input, Program

SIZES = {"B": ((2, 2, 2), (2, 3, 5)), "S": ((5, 5, 5), (6, 9, 4))}  # static, dynamic
EPS = ("1e-6", "1e-5", "1e-3", "0.1")


class Maker:
    """Inputs, statements and outputs of one program; every name is new."""

    def __init__(self, seed: int, family: str):
        self.random = random.Random(f"{family} {seed}")
        dtype = self.pick("float32", "float32", "float32", "bfloat16", "float16")
        self.program = Program(seed, family, dtype)
        self._names = 0
        if self.chance(0.25):
            self.program.dynamic = self.pick(True, None)
        for name, choices in SIZES.items():
            self.program.sizes[name] = choices[self.program.dynamic is not False]

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def _new(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    # -- inputs --------------------------------------------------------------------------------------------------
    def given(self, stem: str, text: str, grad: str = "", dtype: str = "") -> str:
        name = self._new(stem)
        self.program.inputs[name] = Input(text, grad, dtype)
        return name

    def activation(self, stem: str, shape: str) -> str:
        return self.given(stem, f"torch.randn({shape}, generator=g)", self.pick("made", "made", "made", "leaf", ""))

    def weight(self, stem: str, shape: str) -> str:
        return self.given(
            stem, f"torch.randn({shape}, generator=g) * 0.5 + 0.5", self.pick("leaf", "leaf", "leaf", "leaf", "")
        )

    def integers(self, stem: str, shape: str, bound: int) -> str:
        return self.given(stem, f"torch.randint(0, {bound}, ({shape},), generator=g)")

    # -- statements ----------------------------------------------------------------------------------------------
    def let(self, stem: str, expression: str) -> str:
        name = self._new(stem)
        self.program.statements.append(f"{name} = {expression}")
        return name

    def do(self, statement: str) -> None:
        self.program.statements.append(statement)

    def out(self, *names: str) -> None:
        self.program.outputs.extend(names)

    def eps(self) -> str:
        return self.pick(*EPS)

    # -- pieces that several families use --------------------------------------------------------------------------
    def rms_norm(self, x: str, w: str | None) -> str:
        if self.chance(0.15):
            return self.let("y", f"F.rms_norm({x}, ({x}.shape[-1],), {w}, {self.eps()})")
        f = x if self.chance(0.3) else self.let("f", f"{x}.{self.pick('float()', 'to(torch.float32)')}")
        square = self.pick(f"{f}.pow(2)", f"{f}.pow(2)", f"{f}.square()", f"{f} * {f}", f"{f}.abs().pow(2)")
        mean = self.pick(
            f"({square}).mean(-1, keepdim=True)",
            f"torch.mean({square}, dim=-1, keepdim=True)",
            f"({square}).sum(-1, keepdim=True) / {x}.shape[-1]",
        )
        var = self.let("var", mean)
        eps = self.eps()
        scaled = self.pick(
            f"{f} * torch.rsqrt({var} + {eps})",
            f"{f} * torch.rsqrt({var} + {eps})",
            f"{f} / torch.sqrt({var} + {eps})",
            f"{f} * ({var} + {eps}).rsqrt()",
            f"{f} * ({var} + {eps}) ** -0.5",
        )
        n = self.let("n", scaled)
        if w is None:
            return self.let("y", f"{n}.to({x}.dtype)")
        return self.let(
            "y",
            self.pick(
                f"{w} * {n}.to({x}.dtype)",
                f"({n} * {w}.float()).to({x}.dtype)",
                f"({n} * (1.0 + {w}.float())).type_as({x})",
                f"{n}.to({x}.dtype) * {w}",
                f"({w} * {n}).to({x}.dtype)",
            ),
        )

    def layer_norm(self, x: str, w: str | None, b: str | None) -> str:
        if self.chance(0.5):
            if self.chance(0.3):
                ws, bs = (None if t is None else f"{t}.float()" for t in (w, b))
                return self.let("y", f"F.layer_norm({x}.float(), ({x}.shape[-1],), {ws}, {bs}, {self.eps()}).to({x}.dtype)")
            return self.let("y", f"F.layer_norm({x}, ({x}.shape[-1],), {w}, {b}, {self.eps()})")
        f = self.let("f", f"{x}.float()")
        c = self.let("c", f"{f} - {f}.mean(-1, keepdim=True)")
        variance = self.pick(
            f"{c}.pow(2).mean(-1, keepdim=True)",
            f"{f}.var(-1, unbiased=False, keepdim=True)",
            f"{f}.var(-1, correction=0, keepdim=True)",
            f"{f}.var(-1, keepdim=True)",
        )
        var = self.let("var", variance)
        n = self.let("n", self.pick(f"{c} * torch.rsqrt({var} + {self.eps()})", f"{c} / torch.sqrt({var} + {self.eps()})"))
        if w is None:
            return self.let("y", f"{n}.to({x}.dtype)")
        plus = "" if b is None else f" + {b}"
        plus_float = "" if b is None else f" + {b}.float()"
        return self.let("y", self.pick(f"{w} * {n}.to({x}.dtype){plus}", f"({n} * {w}.float(){plus_float}).to({x}.dtype)"))

    def linear(self, x: str, w: str, b: str | None = None) -> str:
        if b is not None:
            return self.let("z", self.pick(f"F.linear({x}, {w}, {b})", f"F.linear({x}, {w}) + {b}"))
        ways = [f"F.linear({x}, {w})"] * 6
        return self.let("z", self.pick(*ways, f"{x} @ {w}.t()", f"torch.matmul({x}, {w}.T)"))

    def gelu(self, x: str) -> str:
        return self.pick(
            f"F.gelu({x})", f"F.gelu({x}, approximate='tanh')", f"{x} * torch.sigmoid(1.702 * {x})",
            f"0.5 * {x} * (1.0 + torch.erf({x} / math.sqrt(2.0)))", f"{x} * 0.5 * (1.0 + torch.erf({x} * 0.7071067811865476))",
            f"0.5 * {x} * (1.0 + torch.tanh(0.7978845608028654 * ({x} + 0.044715 * {x} ** 3)))",
            f"0.5 * {x} * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * ({x} + 0.044715 * torch.pow({x}, 3.0))))",
        )  # fmt: skip

    def silu(self, x: str) -> str:
        return self.pick(
            f"F.silu({x})",
            f"F.silu({x})",
            f"{x} * torch.sigmoid({x})",
            f"{x}.sigmoid() * {x}",
            f"{x} / (1 + torch.exp(-{x}))",
        )

    def glu(self, gate: str, up: str) -> str:
        act = self.silu(gate) if self.chance(0.5) else self.gelu(gate)
        a = self.let("a", act)
        return self.let("p", self.pick(f"{a} * {up}", f"{up} * {a}"))
