"""Changes of a program, of which each may make a rewrite illegal: writes, views, casts, regions, other uses.

A mutation takes the program, a random number generator and what tensors there are before each statement; it changes the
program in place and returns True, or returns False where there is nothing for it to change.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from tests.fuzz import mutations_regions as regions
from tests.fuzz.edits import Seen, states, with_pattern, with_swapped, with_use, works
from tests.fuzz.program import Input, Program, names_read

States = list[dict[str, Seen]]
Mutation = Callable[[Program, random.Random, States], bool]


def _floating(seen: dict[str, Seen]) -> list[Seen]:
    return [s for s in seen.values() if s.floating and s.shape]


# -- writes --------------------------------------------------------------------------------------------------------
def _write(*ways: str) -> Mutation:
    """A statement that changes a tensor in place, somewhere."""

    def mutation(program: Program, rng: random.Random, seen: States) -> bool:
        at = rng.randrange(len(seen))
        names = [s.name for s in _floating(seen[at])]
        if not names:
            return False
        program.statements.insert(at, rng.choice(ways).format(rng.choice(names)))
        return True

    return mutation


def write_soon_after(program: Program, rng: random.Random, seen: States) -> bool:
    """A write to what the statement just before has read: the most likely place to break a fusion."""
    at = rng.randrange(1, len(seen))
    names = [n for n in names_read(program.statements[at - 1]) if n in seen[at] and seen[at][n].floating]
    if not names:
        return False
    program.statements.insert(at, f"{rng.choice(names)}.mul_(1.25)")
    return True


def write_to_a_copy(program: Program, rng: random.Random, seen: States) -> bool:
    """A copy is changed, and then used instead."""
    at = rng.randrange(len(program.statements))
    names = [n for n in names_read(program.statements[at]) if n in seen[at] and seen[at][n].floating]
    if not names:
        return False
    name = rng.choice(names)
    program.statements[at] = with_use(program.statements[at], name, "copied", rng)
    program.statements[at:at] = [
        f"copied = {name}.{rng.choice(('clone()', 'contiguous()', 'float()', 'view_as(' + name + ')'))}",
        "copied.mul_(3)",
    ]
    return True


def write_behind(program: Program, rng: random.Random, seen: States) -> bool:
    """A result is changed outside of the compiled function, and the others are read after that."""
    ways = ("{0}.mul_(2)", "{0}.detach().add_(1)", "with torch.no_grad():\n    {0}.add_(1)", "{0}[0] = 0")
    program.after.insert(0, rng.choice(ways).format(f"r[{rng.randrange(len(program.outputs))}]"))
    return True


# -- another operand -------------------------------------------------------------------------------------------------
def _use(*ways: str, every: bool = False) -> Mutation:
    """One use of a tensor is a use of something made of it: {0} is its name, {1} its last size."""

    def mutation(program: Program, rng: random.Random, seen: States) -> bool:
        at = rng.randrange(len(program.statements))
        names = [
            s for n in names_read(program.statements[at]) if (s := seen[at].get(n)) is not None and s.floating and s.shape
        ]
        if not names:
            return False
        chosen = rng.choice(names)
        expression = "(" + rng.choice(ways).format(chosen.name, chosen.shape[-1]) + ")"
        program.statements[at] = with_use(program.statements[at], chosen.name, expression, rng, every)
        return True

    return mutation


# -- another statement -----------------------------------------------------------------------------------------------
def swapped(program: Program, rng: random.Random, seen: States) -> bool:
    """Operands of a sum, product or difference change places."""
    at = rng.randrange(len(program.statements))
    changed = with_swapped(program.statements[at], rng)
    program.statements[at] = changed or program.statements[at]
    return changed is not None


def _pattern(*pairs: tuple[str, str]) -> Mutation:
    """Some text of a statement is another text."""

    def mutation(program: Program, rng: random.Random, seen: States) -> bool:
        pattern, replacement = rng.choice(pairs)
        for at in rng.sample(range(len(program.statements)), len(program.statements)):
            changed = with_pattern(program.statements[at], pattern, replacement, rng)
            if changed is not None:
                program.statements[at] = changed
                return True
        return False

    return mutation


def changing_scalar(program: Program, rng: random.Random, seen: States) -> bool:
    """A literal becomes an argument that changes between calls."""
    values = {
        r"(?<![\w.*-])\d+e-\d+|\b0\.1\b": ("(1e-6, 1e-2, 0.5)", "(1e-5, 1e-5, 1e-3)"),
        r"(?<![\w.])(0\.5|2\.0|1\.0|0\.3|0\.25)(?![\w.])": (
            "(0.5, 2.0, 0.25)",
            "(1.0, 3.0, 1.0)",
            "(1, 2, 3)",
            "(0.5, 0.0, -1.5)",
        ),
        r"(?<=\+ )1(?=[),])|(?<=diagonal=)1": ("(1, 0, -2)", "(4, 6, -3)"),
    }
    pattern = rng.choice(list(values))
    if not _pattern((pattern, "scalar"))(program, rng, seen):
        return False
    text = rng.choice(values[pattern])
    program.inputs["scalar"] = Input(f"torch.tensor({text}[call])" if rng.random() < 0.2 else f"{text}[call]", "", "float32")
    return True


# -- another result ----------------------------------------------------------------------------------------------------
def _returned(*ways: str) -> Mutation:
    """One more output: an intermediate, or something made of it."""

    def mutation(program: Program, rng: random.Random, seen: States) -> bool:
        names = [s.name for s in _floating(seen[-1])]
        outputs = [o for o in program.outputs if o in names]
        if not names:
            return False
        chosen = rng.choice(outputs) if outputs and rng.random() < 0.4 else rng.choice(names)
        program.outputs.insert(rng.randrange(len(program.outputs) + 1), rng.choice(ways).format(chosen))
        return True

    return mutation


# -- other inputs --------------------------------------------------------------------------------------------------------
def _input(change: Callable[[Input, random.Random], Input | None]) -> Mutation:
    def mutation(program: Program, rng: random.Random, seen: States) -> bool:
        names = [n for n, i in program.inputs.items() if "randn" in i.text and "polar" not in i.text]
        if not names:
            return False
        name = rng.choice(names)
        changed = change(program.inputs[name], rng)
        program.inputs[name] = changed or program.inputs[name]
        return changed is not None

    return mutation


def strided(item: Input, rng: random.Random) -> Input:
    """Every other element of something, or one element many times, or a transposed tensor."""
    ways = (
        "torch.stack(({0}, {0} * 0.5), -1)[..., 0]",
        "({0})[..., :1].expand(({0}).shape)",
        "({0}).transpose(0, -1).contiguous().transpose(0, -1)",
        "torch.cat(({0}, {0}), -1)[..., : ({0}).shape[-1]]",
        "({0}).flip(-1)",
    )
    return Input(rng.choice(ways).format(item.text), item.grad, item.dtype)


def one_tensor_twice(program: Program, rng: random.Random, seen: States) -> bool:
    """Two inputs of one shape are one tensor, or parts of one."""
    groups: dict[str, list[str]] = {}
    for name, item in program.inputs.items():
        if "randn" in item.text:
            groups.setdefault(item.text, []).append(name)
    pairs = [g for g in groups.values() if len(g) > 1]
    if not pairs:
        return False
    a, b = rng.sample(rng.choice(pairs), 2)
    del program.inputs[b]
    first = next((i for i, s in enumerate(program.statements) if b in names_read(s)), 0)
    program.statements.insert(
        first, f"{b} = {rng.choice(('{0}', '{0}[:]', '{0}.view({0}.shape)', '{0}.clone()')).format(a)}"
    )
    return True


MUTATIONS: dict[str, Mutation] = {
    "write": _write("{0}.mul_(1.5)", "{0}.add_(0.25)", "{0} += 0.5", "torch.add({0}, 1, out={0})", "torch._foreach_mul_([{0}], 1.25)"),
    "write_to_a_view": _write("{0}[..., :1].mul_(2)", "{0}.view(-1)[:2].zero_()", "{0}[0] = 0.5", "{0}[..., -1] += 1", "{0}.transpose(0, -1).add_(1)"),
    "write_to_detached": _write("{0}.detach().add_(0.5)", "with torch.no_grad():\n    {0}.mul_(0.5)", "{0}.data.add_(1)"),
    "write_soon_after": write_soon_after,
    "write_to_a_copy": write_to_a_copy,
    "write_behind": write_behind,
    "clone": _use("{0}.clone()", "{0}.contiguous()", "+{0}", "{0} * 1", "{0} + 0"),
    "transposed_copy": _use("{0}.transpose(0, -1).contiguous().transpose(0, -1)", "{0}.mT.contiguous().mT", every=True),
    "view": _use("{0}.view({0}.shape)", "{0}.reshape({0}.shape)", "{0}[:]", "{0}[..., :{1}]", "{0}.unsqueeze(0).squeeze(0)", "{0}.view_as({0})", "{0}.flatten().view({0}.shape)"),
    "part": _use("{0}[:1]", "{0}[..., :1]", "{0}[-1:]", "{0}.narrow(0, 0, 1)", "{0}[..., :-1]", "{0}[:, 1:]", "{0}.flip(-1)", "{0}.roll(1, 0)"),
    "expanded": _use("{0}[:1].expand({0}.shape)", "{0}[..., :1].expand_as({0})", "{0}[None]", "{0}.mean(0, keepdim=True)"),
    "rounded": _use("{0}.bfloat16().to({0}.dtype)", "{0}.half().float()", "{0}.bfloat16()", "{0}.half().to({0}.dtype)"),
    "wider": _use("{0}.float()", "{0}.double()", "{0}.double().to({0}.dtype)", "{0}.float().to({0}.dtype)"),
    "detached": _use("{0}.detach()", "{0}.detach().clone()", "{0}.data"),
    "doubled": _use("{0} * 2", "{0} + {0}", "-{0}", "{0}.abs()", "{0} / 2", "torch.where({0} > 0, {0}, 0.5)"),
    "dropout": _use("F.dropout({0}, 0.0)", "F.dropout({0}, 0.5, training=False)", "F.dropout({0}, p=0.0, training=True)", "nn.Identity()({0})"),
    "swapped": swapped,
    "other_dim": _pattern((r"(?<=[(=, ])-1(?=[,)])", "-2"), (r"(?<=[(=, ])-1(?=[,)])", "1"), (r"(?<=[(=, ])-1(?=[,)])", "0"), (r"(?<=[(=, ])-1(?=[,)])", "2"), (r"\(2, 3\)", "(1, 2)")),
    "keepdim": _pattern((r", keepdim=True", ""), (r"keepdim=True", "keepdim=False"), (r"correction=0|unbiased=False", "correction=2")),
    "constant": _pattern((r"(?<![\w.])1\.702", "1.7"), (r"0\.044715", "0.0447"), (r"\b0\.5\b", "0.4"), (r"(?<![\w.])\d+e-\d+", "0.0"), (r"(?<![\w.])\d+e-\d+", "-1e-3"), (r"\b5\.0\b", "4.0"), (r"1\.0 \+", "1.5 +")),
    "operator": _pattern((r" \* ", " / "), (r" \+ ", " - "), (r"rsqrt", "reciprocal"), (r"\.float\(\)", ""), (r"\.to\(\w+\.dtype\)", ""), (r"<=", "<"), (r" & ", " | "), (r"torch\.cat\(\(-", "torch.cat(("), (r"sigmoid", "tanh"), (r"\.exp\(\)", ".exp2()")),
    "changing_scalar": changing_scalar,
    "returned": _returned("{0}", "{0}", "{0} * 2", "{0}.sum()", "{0}.clone()"),
    "alias_returned": _returned("{0}.view({0}.shape)", "{0}[:, -1]", "{0}[..., :1]", "{0}.float()", "{0}.contiguous()", "{0}.detach()", "{0}.transpose(0, -1)", "{0}.expand(2, *{0}.shape)", "{0}.flatten()", "{0}"),
    "other_dtype": _input(lambda item, rng: Input(item.text, item.grad, rng.choice(("float32", "bfloat16", "float16", "float64")))),
    "strided_input": _input(strided),
    "other_grad": _input(lambda item, rng: Input(item.text, rng.choice(("", "leaf", "made")), item.dtype)),
    "one_tensor_twice": one_tensor_twice,
    **regions.MUTATIONS,
}  # fmt: skip


def mutated(program: Program, rng: random.Random) -> Program:
    """The program with up to three mutations, of which each leaves something that eager runs."""
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        seen = states(program)
        if seen is None:
            break
        for _ in range(4):
            name = rng.choice(list(MUTATIONS))
            changed = copy.deepcopy(program)
            if MUTATIONS[name](changed, rng, seen) and works(changed):
                changed.mutations.append(name)
                program = changed
                break
    return program
