"""Mutations of where statements run: grad modes, autocast, checkpoints, functions, graph breaks, repeated calls."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fuzz.edits import Seen, as_function, block_of, with_use
from tests.fuzz.program import Input, Program, names_read, names_set

States = list[dict[str, Seen]]
Mutation = Callable[[Program, random.Random, States], bool]


def _span(program: Program, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(program.statements))
    return start, rng.randrange(start, len(program.statements)) + 1


def _region(*openings: str) -> Mutation:
    """Some statements run in a region."""

    def mutation(program: Program, rng: random.Random, seen: States) -> bool:
        start, end = _span(program, rng)
        program.statements = block_of(program.statements, start, end, "with " + rng.choice(openings))
        return True

    return mutation


def checkpointed(program: Program, rng: random.Random, seen: States) -> bool:
    """Some statements run in a checkpoint."""
    return _called(program, rng, "checkpoint(part, {0}, use_reentrant=False)", everything=rng.random() < 0.3)


def in_a_function(program: Program, rng: random.Random, seen: States) -> bool:
    """Some statements are a function of their own, maybe one that Dynamo is told to leave out, or one called twice."""
    call = rng.choice(
        (
            "part({0})",
            "torch._dynamo.disable(part)({0})",
            "torch.compiler.allow_in_graph(part)({0})",
            "[part({0}), part({0})][1]",
        )
    )
    return _called(program, rng, call, everything=False)


def _called(program: Program, rng: random.Random, call: str, everything: bool) -> bool:
    start, end = (0, len(program.statements)) if everything else _span(program, rng)
    if any("def part" in s for s in program.statements):
        return False
    made = as_function(program, start, end)
    if made is None:
        return False
    lines, takes, gives = made
    program.statements[start:end] = [*lines, f"{', '.join(gives)} = {call.format(', '.join(takes))}"]
    return True


def graph_break(program: Program, rng: random.Random, seen: States) -> bool:
    """The graph ends somewhere and another begins."""
    program.statements.insert(rng.randrange(len(program.statements) + 1), "torch._dynamo.graph_break()")
    return True


def repeated(program: Program, rng: random.Random, seen: States) -> bool:
    """Everything is computed twice, from the same inputs or from the first result."""
    inside = list(program.statements)
    sets = list(dict.fromkeys(n for s in inside for n in names_set(s)))
    kept = [o for o in program.outputs if o in sets]
    if not kept:
        return False
    copies = [f"first_{o} = {o}" for o in kept]
    again: list[str] = []
    last, shape = kept[-1], seen[-1].get(kept[-1])
    fits = [
        n
        for n in program.inputs
        if shape is not None and n in seen[0] and seen[0][n].shape == shape.shape and seen[0][n].floating
    ]
    if fits and rng.random() < 0.6:
        again = [f"{rng.choice(fits)} = {last}"]
    program.statements = [*inside, *copies, *again, *inside]
    program.outputs += [f"first_{o}" for o in kept]
    return True


def reused(program: Program, rng: random.Random, seen: States) -> bool:
    """A statement is there twice: the second gives another name the same value, and that is returned."""
    at = rng.randrange(len(program.statements))
    sets = names_set(program.statements[at])
    if len(sets) != 1 or not program.statements[at].startswith(sets[0] + " = "):
        return False
    name = sets[0]
    program.statements.insert(at + 1, "again" + program.statements[at][len(name) :])
    program.outputs.append("again")
    if rng.random() < 0.5:
        for i in range(at + 2, len(program.statements)):
            if name in names_read(program.statements[i]) and "def " not in program.statements[i]:
                program.statements[i] = with_use(program.statements[i], name, "again", rng)
                break
    return True


def dynamic(program: Program, rng: random.Random, seen: States) -> bool:
    """Sizes change between calls."""
    program.dynamic = rng.choice((True, None))
    program.sizes = {"B": rng.choice(((2, 3, 5), (1, 2, 3), (3, 3, 1))), "S": rng.choice(((6, 9, 4), (5, 5, 7), (2, 7, 3)))}
    return True


def evaluated(program: Program, rng: random.Random, seen: States) -> bool:
    """Nothing is differentiated."""
    program.mode = rng.choice(("no_grad", "inference"))
    return True


def outside(program: Program, rng: random.Random, seen: States) -> bool:
    """The compiled function is called in a checkpoint, or under autocast."""
    program.outer = rng.choice(("checkpoint", "autocast"))
    return True


def read_later(program: Program, rng: random.Random, seen: States) -> bool:
    """A result is read in one more way behind the compiled function."""
    at = rng.randrange(len(program.outputs))
    ways = (
        "r.append(second({0}))", "r.append(checkpoint(second, {0}, use_reentrant=False))", "r.append({0}.detach().mul_(2))", "r.append({0}[..., -1])",
        "r.append(torch.autograd.grad({0}.float().sum(), {0})[0])", "r.append({0}.to(torch.float64))", "r.append({0}.sum().item())", "r.append({0}.tolist())",
        "import copy\nr.append(copy.copy({0}))", "r.append(torch.func.vmap(lambda z: z.sin())({0}))", "r.append({0}.new_zeros(2) + {0}.sum())",
        "with torch.inference_mode():\n    r.append({0} * 2)", "r.append(torch.utils.dlpack.from_dlpack({0}.detach()))", "r.append(torch.from_numpy({0}.detach().float().numpy()))",
        "{0}.register_hook(lambda dy: dy * 2)", "{0}.retain_grad()", "z = {0}.detach().requires_grad_()\nz.float().square().sum().backward()\nr.append(z.grad)",
        "r.append({0}.unbind(0)[0])", "r.append(torch.equal({0}, {0}.clone()))", "r.append({0}.untyped_storage().nbytes() > 0)", "r.append({0} is r[-1])",
        "r.append({0}.view(-1)[0])", "torch.manual_seed(0)\nr.append({0}.data.clone())", "r.append({0}.is_leaf)",
    )  # fmt: skip
    program.after.append(rng.choice(ways).format(f"r[{at}]"))
    return True


def int_argument(program: Program, rng: random.Random, seen: States) -> bool:
    """An int that changes, zero and negative ones too, is added, sliced by or rolled by."""
    at = rng.randrange(len(seen))
    names = [s.name for s in seen[at].values() if s.floating and s.shape]
    if not names:
        return False
    program.inputs["number"] = Input(f"{rng.choice(('(1, 2, 0)', '(2, 0, -1)', '(0, 1, -2)', '(3, 3, 1)'))}[call]")
    symbol = "number"
    if rng.random() < 0.4:
        program.inputs["number"] = Input(f"torch.tensor({program.inputs['number'].text})")
        symbol = "number.item()"
    name = rng.choice(names)
    ways = (
        "{0} = {0} + {1}",
        "{0} = {0} * {1}",
        "{0} = {0}.roll({1}, 0)",
        "{0} = torch.where(torch.arange({0}.shape[-1]) >= {1}, {0}, 0.5)",
        "{0} = {0} + torch.arange({0}.shape[-1]).to({0}.dtype) * {1}",
    )
    program.statements.insert(at, rng.choice(ways).format(name, symbol))
    return True


MUTATIONS: dict[str, Mutation] = {
    "no_grad": _region("torch.no_grad()", "torch.set_grad_enabled(False)", "torch.enable_grad()"),
    "autocast": _region(
        'autocast("cpu", dtype=torch.bfloat16)', 'autocast("cpu", dtype=torch.bfloat16)', 'autocast("cpu", enabled=False)'
    ),
    "checkpointed": checkpointed,
    "in_a_function": in_a_function,
    "graph_break": graph_break,
    "repeated": repeated,
    "reused": reused,
    "dynamic": dynamic,
    "evaluated": evaluated,
    "outside": outside,
    "read_later": read_later,
    "int_argument": int_argument,
}
