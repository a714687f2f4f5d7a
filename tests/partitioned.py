"""Models whose graphs are partitioned as under Inductor, and run eagerly: what is saved for the backward."""

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_map

from fx_fusion.backend import compile_graph
from fx_fusion.float8.linears import Linears
from fx_fusion.graph.size_hints import expected
from fx_fusion.inductor.compile import DECISIONS, LINEARS, joint_pass
from fx_fusion.memory.recompute import Decisions
from fx_fusion.options import parse
from fx_fusion.torch_internals.traced_kernels import launched


class _Enough(Exception):
    pass


@dataclass
class Partitioned:
    """What the forward saves, besides inputs and parameters: bytes by shape and dtype; the ops of the backward, and of those
    how many are norms' backwards that hand out y; what was decided; what became of the linears; the gradients; what is
    guarded of symbolic sizes; the kernels that forward and backward launch, with what they store besides."""

    saved: Counter = field(default_factory=Counter)
    backward: Counter = field(default_factory=Counter)
    handed_out: int = 0
    decisions: Decisions = field(default_factory=Decisions)
    linears: Linears = field(default_factory=Linears)
    gradients: dict = field(default_factory=dict)
    guards: set = field(default_factory=set)
    launched: list = field(default_factory=list)

    @property
    def bytes(self):
        return sum(self.saved.values())

    def again(self):
        return Counter(v.kind for v in self.decisions.values if v.again)


def partitioning(found, *, step=True):
    """Return what runs a rewritten graph: AOTAutograd, our choice and the partitioner's, and no compiler."""

    def rest(gm, examples, options):
        def partition(joint, inputs, *, num_fwd_outputs, **rest):
            found.decisions = gm.meta.get(DECISIONS, Decisions())
            found.linears = gm.meta.get(LINEARS, Linears())
            joint_pass(found.decisions, found.linears, options)(joint.graph)
            joint.graph.lint()
            if (mode := detect_fake_mode(inputs)) is not None and mode.shape_env is not None:
                found.guards |= {str(guard.expr) for guard in mode.shape_env.guards}
            joint.recompile()
            both = min_cut_rematerialization_partition(
                joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **rest
            )
            for node in both[0].graph.output_node().args[0][num_fwd_outputs:]:
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor) and node.op != "placeholder":
                    shape = tuple(map(expected, value.shape))
                    found.saved[shape, value.dtype] += math.prod(shape) * value.dtype.itemsize
            found.backward += Counter(_name(n) for n in both[1].graph.nodes if n.op == "call_function")
            found.launched += [_launches(part.graph) for part in both]
            _check_launches([node for part in both for node in part.graph.nodes])
            launches = filter(None, map(launched, both[1].graph.nodes))
            found.handed_out += sum(bool(given.get("STORE_Y")) for _, given in launches)
            if not step:
                raise _Enough
            return both

        def as_it_is(gm, examples):
            return make_boxed_func(gm.forward)

        def without_backward(inference, examples):
            found.linears = gm.meta.get(LINEARS, Linears())
            joint_pass(gm.meta.get(DECISIONS, Decisions()), found.linears, options)(inference.graph)
            inference.graph.lint()
            inference.recompile()
            found.launched.append(_launches(inference.graph))
            _check_launches(inference.graph.nodes)
            if not step:
                raise _Enough
            return as_it_is(inference, examples)

        return aot_module_simplified(
            gm, examples, fw_compiler=as_it_is, bw_compiler=as_it_is, inference_compiler=without_backward,
            partition_fn=partition, decompositions=select_decomp_table(),
        )  # fmt: skip

    return rest


def partitioned(model, batch, memory="min", *, step=True, dynamic=None, **options):
    """One step of a model: loss and backward; ``step=False``: the graph is partitioned and not run."""
    torch._dynamo.reset()
    found = Partitioned()
    parsed = parse(None, {"select": "always", "memory": memory, "strict": True, **options})
    rest = partitioning(found, step=step)
    model.zero_grad()
    compiled = torch.compile(model, backend=lambda gm, examples: compile_graph(gm, examples, parsed, rest), dynamic=dynamic)
    if not step:
        try:
            compiled(**batch)
        except Exception as error:
            if "_Enough" not in str(error):
                raise
        return found
    out = compiled(**batch)
    (out if isinstance(out, torch.Tensor) else out["loss"]).backward()
    found.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found


def _check_launches(nodes):
    """A launch has the results that are read, also by what nothing reads. Inductor gives it its arguments as it was told they
    lie, which is as they do lie."""
    for node in nodes:
        if launched(node) is None:
            continue
        read = {user.args[1] for user in node.users}
        assert read <= set(node.kwargs["tensors_to_clone"]), f"{node}: {read}"
        tree_map(lambda *_: None, dict(node.kwargs), dict(node.meta["eager_input_vals"][1]))  # torch 2.11 does, and raises
        told = node.meta["eager_input_vals"][1]["kwargs"]
        for name, argument in node.kwargs["kwargs"].items():
            if isinstance(argument, torch.fx.Node) and isinstance(argument.meta["val"], torch.Tensor):
                was, value = told[name], argument.meta["val"]
                assert (was.shape, was.stride()) == (value.shape, value.stride()), f"{node}: {name}"


def _launches(graph):
    """The kernels of a graph in order, as ``name`` or ``name: y, dgate``."""
    found = []
    for kernel, given in filter(None, map(launched, graph.nodes)):
        stored = [name.removeprefix("STORE_").lower() for name, value in given.items() if name.startswith("STORE_") and value]
        found.append(kernel.fn.__name__ + (f": {', '.join(sorted(stored))}" if stored else ""))
    return found


def _name(node):
    return getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
