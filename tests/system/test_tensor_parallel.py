"""Two and four CPU processes, tensor parallel: lm_head's classes on all, the loss without gathering, deferred logits."""

import contextlib
import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.helpers import tiny_llama, tokens, worst_of
from tests.ranks import on_ranks, whole

SETUPS = (
    "columns", "odd_vocabulary", "softcap", "none_of_a_row", "sum_of_rows", "each_row", "entropy", "sequence", "smoothing",
    "z_loss", "weights", "inductor", "transformers", "transformers, experts", "dynamic", "ignored class", "all together",
)  # fmt: skip
SLOW = (
    "z-loss of each row", "log_probs", "tied", "transformers, gpt_oss", "transformers, gemma3", "bfloat16",
    "transformers, Inductor", "softcap, Inductor", "z_loss, Inductor",
)  # fmt: skip


def plan(model, mesh=None):
    """Queries, keys, values, gate, up and lm_head by columns, the rest by rows; logits gathered, as the loss wants them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    names = {f"self_attn.{n}_proj": columns for n in "qkv"} | {"self_attn.o_proj": rows, "mlp.down_proj": rows}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**names, "mlp.gate_proj": columns, "mlp.up_proj": columns})
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def with_entropy(logits, labels):
    log_p = logits.log_softmax(-1)
    taken = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -taken.mean() - 0.01 * -(log_p.exp() * log_p).sum(-1).mean()


def all_together(logits, labels):
    logits = 5 * torch.tanh(logits / 5)
    loss = F.cross_entropy(logits, labels, torch.linspace(0.1, 2, 256), label_smoothing=0.1)
    return loss + 1e-2 * (logits.logsumexp(-1).square() * (labels != -100)).mean()


def log_probs(logits, labels):
    taken = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -(taken * (labels != -100)).mean()


def z_loss_of_each_row(logits, labels):
    return (
        F.cross_entropy(logits, labels, reduction="none") + 1e-2 * logits.logsumexp(-1).square() * (labels != -100)
    ).sum() / 7


CHECKPOINTS = {
    "transformers": "llama", "transformers, experts": "qwen3_moe", "transformers, gpt_oss": "gpt_oss",
    "transformers, gemma3": "gemma3",  # rows of its table, which lie on both ranks, are scaled before they are summed
}  # fmt: skip
OF_ROWS = {
    "sum_of_rows": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "each_row": lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.linspace(0, 1, len(y))).sum(),
    "smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "z_loss": lambda z, y: F.cross_entropy(z, y) + 1e-2 * (z.logsumexp(-1).square() * (y != -100)).mean(),
    "weights": lambda z, y: F.cross_entropy(z, y, torch.linspace(0, 2, 256), label_smoothing=0.2),
    "entropy": with_entropy,
    "all together": all_together,
    "log_probs": log_probs,
    "z-loss of each row": z_loss_of_each_row,
}


def build(setup, parallel=True):
    """The model of a set-up, over the ranks or, not ``parallel``, whole on each."""
    planned = plan if parallel else lambda model: model
    if setup in CHECKPOINTS:  # under its own plan
        from transformers import AutoModelForCausalLM

        folder = os.path.join(os.environ["CHECKPOINTS"], CHECKPOINTS[setup])
        return AutoModelForCausalLM.from_pretrained(folder, **({"tp_plan": "auto"} if parallel else {})).train()
    if setup == "softcap":
        from transformers import Gemma2Config, Gemma2ForCausalLM

        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, final_logit_softcapping=5.0, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        return planned(Gemma2ForCausalLM(config))
    model = tiny_llama(
        vocab_size=259 if setup == "odd_vocabulary" else 256,
        num_key_value_heads=dist.get_world_size(),
        tie_word_embeddings=setup == "tied",
    )
    if setup == "tied" and parallel:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

        mesh = plan(model).lm_head.weight.device_mesh
        parallelize_module(model, mesh, {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())})
        model.lm_head.weight = model.model.embed_tokens.weight
        return model
    if setup == "sharded too" and parallel:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
        plan(model, mesh["tensor"])
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh["data"])
        return model
    return planned(model)


class HalfRows(torch.nn.Module):
    """The head alone, of rows of which each rank has a half, as behind a norm of a sequence-parallel plan."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.lm_head = torch.nn.Parameter(torch.randn(64)), torch.nn.Linear(64, 256, bias=True)

    def forward(self, x, labels):
        logits = self.lm_head(x * self.scale)
        return F.cross_entropy(logits.view(-1, 256), labels.view(-1)), logits


class Norm(torch.nn.Module):
    """RMSNorm as models write it out."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(*size, bias=False) for size in ((64, 96), (64, 96), (96, 64)))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class InSequence(torch.nn.Module):
    """Layers whose rows lie on all ranks between the products: the residual stream is a DTensor, of an odd length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = Norm(), Norm(), torch.nn.LayerNorm(64)
        self.mlp, self.other, self.lm_head = Mlp(), Mlp(), torch.nn.Linear(64, 256, bias=False)

    def forward(self, x, labels):
        x = x + self.mlp(self.first(x))
        x = x + self.other(self.second(x))
        logits = self.lm_head(self.third(x))
        return F.cross_entropy(logits.view(-1, 256), labels.view(-1)), logits


def in_sequence():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    columns = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    norm = SequenceParallel(use_local_output=False)
    mlp = {"gate": columns, "up": columns, "down": rows}
    plan = {f"{part}.{name}": how for part in ("mlp", "other") for name, how in mlp.items()}
    plan |= {"first": norm, "second": norm, "third": norm}
    plan |= {"lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    return parallelize_module(InSequence(), mesh, plan), mesh


def norms_in_parts(rank, backend):
    """Loss, logits, gradients and how they lie, with rows on two ranks; what was fused."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    import fx_fusion
    from fx_fusion.testing import rewriting_backend

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 17, 64, generator=generator)
    labels = torch.randint(256, (2, 17), generator=generator)
    if backend == "alone":  # in one process, without the backend
        model, backend = InSequence(), None
        x.requires_grad_()
    else:
        model, mesh = in_sequence()
        x = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    how = {"backend": "fx_fusion", "options": {"select": "always", "strict": True}} if backend == "inductor" else {
        "backend": rewriting_backend()
    }  # fmt: skip
    with fx_fusion.recording() as report:
        loss, logits = (torch.compile(model, **how) if backend else model)(x, labels)
        loss.backward()
    placements = {n: str(p.grad.placements) for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    grads = {n: whole(p.grad) for n, p in [("x", x), *model.named_parameters()]}
    return loss.detach(), logits.detach() + 0, grads, placements, report


def rows_on_two_ranks(rank):
    loss, logits, grads, placements, _ = norms_in_parts(rank, None)
    of_one = norms_in_parts(rank, "alone")[:3]
    found = {}
    for backend in ("eager", "inductor"):
        our_loss, our_logits, our_grads, our_placements, report = norms_in_parts(rank, backend)
        errors = {n: (grads[n] - our_grads[n]).abs().max().item() for n in grads}
        errors |= {"loss": abs(loss - our_loss).item(), "logits": (logits - our_logits).abs().max().item()}
        errors |= {f"{n}, alone": (g - our_grads[n]).abs().max().item() for n, g in of_one[2].items()}
        errors["loss, alone"] = abs(of_one[0] - our_loss).item()
        errors["logits, alone"] = (of_one[1] - our_logits).abs().max().item()
        fused = sorted(s.fusion for s in report.sites if s.status == "fused")
        found[backend] = (
            errors,
            placements == our_placements,
            fused,
            [g.fallback for g in report.graphs if g.fallback],
            str(report),
        )
    return found


@pytest.mark.slow
def test_rows_that_lie_on_two_ranks_are_normalized_where_they_lie():
    for found in on_ranks(rows_on_two_ranks).values():
        for errors, alike, fused, fallbacks, said in found.values():
            assert not fallbacks
            wanted = ["add_layer_norm", "add_rms_norm", "linear_cross_entropy", "rms_norm", "swiglu", "swiglu"]
            assert fused == wanted, said
            assert worst_of(errors.values()) < 2e-5, errors
            assert alike, "gradients lie as in eager"


class Stream(torch.nn.Module):
    """Norms and a gate of a residual stream whose batch and length lie on a mesh of two dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = Norm(), Norm(), torch.nn.LayerNorm(64)

    def forward(self, x):
        x = x + F.silu(self.first(x)) * x
        x = x + self.second(x).sin()
        return self.third(x).square().mean()


def on_a_mesh_of_two_dims(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    import fx_fusion
    from fx_fusion.testing import rewriting_backend

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    x = torch.randn(4, 10, 64, generator=torch.Generator().manual_seed(2))

    def alone():
        model, rows = Stream(), x.clone().requires_grad_()
        loss = model(rows)
        loss.backward()
        return loss.detach(), {n: t.grad for n, t in [("x", rows), *model.named_parameters()]}

    def step(backend):
        torch._dynamo.reset()
        model = distribute_module(Stream(), mesh)
        rows = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
        with fx_fusion.recording() as report:
            loss = (torch.compile(model, backend=backend) if backend else model)(rows)
            loss.full_tensor().backward()
        grads = {n: t.grad for n, t in [("x", rows), *model.named_parameters()]}
        return whole(loss), {n: whole(g) for n, g in grads.items()}, {n: str(g.placements) for n, g in grads.items()}, report

    loss, grads, placements, _ = step(None)
    our_loss, our_grads, our_placements, report = step(rewriting_backend())
    errors = {n: (grads[n] - our_grads[n]).abs().max().item() for n in grads} | {"loss": abs(loss - our_loss).item()}
    loss, grads = alone()
    errors |= {f"{n}, alone": (g - our_grads[n]).abs().max().item() for n, g in grads.items()}
    errors["loss, alone"] = abs(loss - our_loss).item()
    return errors, placements == our_placements, sorted(s.fusion for s in report.sites if s.status == "fused"), str(report)


@pytest.mark.slow
def test_rows_on_a_mesh_of_two_dims():
    for errors, alike, fused, said in on_ranks(on_a_mesh_of_two_dims, ranks=4).values():
        assert fused == ["add_layer_norm", "add_rms_norm", "rms_norm", "swiglu"], said
        assert worst_of(errors.values()) < 2e-5, errors
        assert alike, "gradients lie as in eager"


def run(name, rank, compiled, parallel=True, dtype=None):
    """Loss, gradients and logits of a padded batch; what was fused, and whether the logits waited."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import fx_fusion
    from fx_fusion.runtime.deferred_tensor import DeferredTensor
    from fx_fusion.testing import rewriting_backend

    torch._dynamo.reset()
    setup = name.removesuffix(", Inductor")
    options = {"select": "always", "strict": True}
    compiles = setup == "inductor" or setup != name
    how = {"backend": "fx_fusion", "options": options} if compiles else {"backend": rewriting_backend()}
    how |= {"dynamic": True} if setup == "dynamic" else {}
    ids = tokens()
    labels = ids.clone()
    labels[0, 10:] = -100
    if setup == "none_of_a_row":
        labels[:] = -100
        labels[1, 3] = 200  # on the second rank alone
    with fx_fusion.recording() as report:
        if setup == "sequence":
            model = HalfRows()
            x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2))
            if parallel:
                given = {"lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
                model = parallelize_module(model, init_device_mesh("cpu", (2,)), given)
                x = x.chunk(2, 1)[rank].clone()
            call = torch.compile(model, **how) if compiled else model
            loss, logits = call(x.requires_grad_(), labels)
            inputs = {"x": x}
        else:
            model = build(setup, parallel)
            model = model.to(dtype) if dtype else model
            call = torch.compile(model, **how) if compiled else model
            assert hasattr(model.lm_head.weight, "placements") == parallel
            if setup in OF_ROWS:

                def of_logits(ids, labels):
                    logits = model(input_ids=ids).logits
                    return OF_ROWS[setup](logits.view(-1, 256), labels.view(-1)), logits

                loss, logits = (torch.compile(of_logits, **how) if compiled else of_logits)(ids, labels)
            else:
                given = {}
                if setup == "ignored class":  # of the second rank
                    labels[labels == -100] = 200
                    given["ignore_index"] = 200
                out = call(input_ids=ids, labels=labels, **given)
                loss, logits = out.loss, out.logits
            inputs = {}
        lazy = isinstance(logits, DeferredTensor)
        loss.backward()
    grads = {name: whole(p.grad) for name, p in [*inputs.items(), *model.named_parameters()]}
    if setup == "sequence" and parallel:
        dist.all_reduce(grads["scale"])  # of the rows of this rank
    if setup == "sequence" and not parallel:
        grads["x"] = grads["x"].chunk(2, 1)[rank]
    return loss.detach(), grads, logits.detach() + 0, lazy, report


def read_alone(rank):
    """Return what rank 0 is told that reads logits which rank 1 does not read, or other ones; and the errors of what all
    ranks read after that."""
    from fx_fusion.runtime import recipe
    from fx_fusion.testing import rewriting_backend

    torch._dynamo.reset()
    model = torch.compile(build("columns"), backend=rewriting_backend())
    first, second = tokens(4)[:2], tokens(4)[2:]
    whole_model = build("columns", parallel=False)
    expected = [whole_model(input_ids=ids).logits.detach() for ids in (first, second)]

    def error(out, i):
        return (out.logits.detach() - expected[i]).abs().max().item()

    recipe._PATIENCE = 1
    for _ in range(3):  # two in a row that had counted as reads changed what rank 0 runs, in which rank 1 takes no part
        out = model(input_ids=first, labels=first)
        if rank == 0:
            with pytest.raises(RuntimeError, match="gathered from 2 ranks then; 1 of them read it") as raised:
                out.logits.sum()
    dist.barrier()
    recipe._PATIENCE = 300
    errors = [error(out, 0)]  # the same again, on both
    a, b = model(input_ids=first, labels=first), model(input_ids=second, labels=second)
    recipe._PATIENCE = 1
    with pytest.raises(RuntimeError, match="1 of them read it"):  # neither may take the other's for its own
        (a if rank == 0 else b).logits.sum()
    dist.barrier()
    recipe._PATIENCE = 300
    errors += [error(a, 0), error(b, 1), error(model(input_ids=second, labels=second), 1)]
    return str(raised.value) if rank == 0 else "", errors


def of_each(*runs):
    """Loss, logits and each gradient of several runs."""
    yield "loss", *(loss for loss, *_ in runs)
    yield "logits", *(logits for _, _, logits, *_ in runs)
    for name in runs[0][1]:
        yield name, *(grads[name] for _, grads, *_ in runs)


def worker(rank, folder, setups=SETUPS):
    os.environ["CHECKPOINTS"] = folder
    found = {}
    for setup in setups:
        dtype = torch.bfloat16 if setup == "bfloat16" else None
        eager = run(setup, rank, False, dtype=dtype)
        *ours, lazy, report = run(setup, rank, True, dtype=dtype)
        # The same model and batch in one process.
        alone = run(setup, rank, False, parallel=False, dtype=torch.float64 if dtype else None)
        if dtype:  # how many times eager's error, in the same plan
            errors = {}
            for what, ref, theirs, our in of_each(alone, eager, ours):
                # The loss is one number, whose error in eager may be next to none by chance: a rounding of it is allowed.
                chance = 2**-8 * ref.abs() if what == "loss" else 0
                errors[what] = ((our - ref).norm() / ((theirs - ref).norm() + chance)).item()
        else:
            errors = {what: (our - theirs).abs().max().item() for what, _, theirs, our in of_each(alone, eager, ours)}
            errors |= {f"{what}, alone": (our - ref).abs().max().item() for what, ref, _, our in of_each(alone, eager, ours)}
        sites = [
            (s.fusion, s.status, s.reason) for s in report.sites if "cross_entropy" in s.fusion or "log_probs" in s.fusion
        ]
        fused = Counter(s.fusion for s in report.sites if s.status == "fused")
        found[setup] = (errors, lazy, sites, [g.fallback for g in report.graphs], fused)
    if setups == SETUPS:
        found["alone"] = read_alone(rank)
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp("checkpoints")
    tiny_llama().save_pretrained(folder / "llama")
    sizes = {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "use_cache": False,
    }  # fmt: skip

    def save(name, model, **changes):
        torch.manual_seed(0)
        made = getattr(transformers, f"{model}ForCausalLM")
        made(made.config_class(**sizes, **changes)).save_pretrained(folder / name)

    experts = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    save("qwen3_moe", "Qwen3Moe", moe_intermediate_size=32, num_experts=4, **experts)
    sizes |= {"intermediate_size": 128, "max_position_embeddings": 64, "sliding_window": 8}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    save("gpt_oss", "GptOss", num_local_experts=4, **experts)
    save("gemma3", "Gemma3", layer_types=["sliding_attention", "full_attention"])
    return str(folder)


@pytest.fixture(scope="module")
def found(checkpoints):
    """Return what both processes found, by rank."""
    return on_ranks(worker, checkpoints)


@pytest.fixture(scope="module")
def found_slowly(checkpoints):
    return on_ranks(worker, checkpoints, SLOW)


LLAMA = {"embedding": 1, "causal_mask": 2, "rms_norm": 1, "rope": 2, "repeat_kv": 2, "add_rms_norm": 4, "swiglu": 2}


def check(setup, result, ranks=2):
    errors, lazy, sites, fallbacks, fused = result
    fusion = "token_log_probs" if setup == "entropy" else "linear_cross_entropy"
    assert sites == [(fusion, "fused", "")], sites
    assert not any(fallbacks)
    assert worst_of(errors.values()) < (2 if setup == "bfloat16" else 2e-5), errors
    assert lazy
    if setup in ("columns", "transformers", "inductor", "transformers, Inductor"):
        wanted = {**LLAMA, fusion: 1}
        if ranks == 4:  # as many heads of keys as of queries, for each rank to have one
            del wanted["repeat_kv"]
        assert fused == wanted


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_the_loss_over_classes_of_two_ranks(setup, found):
    for of_rank in found.values():
        check(setup, of_rank[setup])


@pytest.mark.slow
@pytest.mark.parametrize("setup", SLOW)
def test_more_losses_over_classes_of_two_ranks(setup, found_slowly):
    for of_rank in found_slowly.values():
        check(setup, of_rank[setup])


@pytest.mark.slow
def test_four_ranks():
    """Also two groups of two, whose parameters are sharded over the groups by FSDP2."""
    setups = ("columns", "odd_vocabulary", "sharded too", "smoothing", "weights", "z_loss", "entropy")
    for of_rank in on_ranks(worker, "", setups, ranks=4).values():
        for setup in setups:
            check(setup, of_rank[setup], ranks=4)


@pytest.mark.slow
def test_a_rank_that_reads_alone_is_told_so(found):
    assert "on every rank, in the same order" in found[0]["alone"][0]


@pytest.mark.slow
def test_reads_on_all_ranks_go_on_behind_one_that_was_alone(found):
    for rank in (0, 1):
        assert worst_of(found[rank]["alone"][1]) < 1e-5, found[rank]["alone"][1]


class ScatteredHead(torch.nn.Module):
    """A head whose logits stay a DTensor, for ``loss_parallel``; with the logits as a second output where asked for."""

    def __init__(self, loss, returns_logits):
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.returns_logits = loss, returns_logits
        self.lm_head = torch.nn.Linear(64, 257, bias=True)

    def forward(self, x, labels):
        logits = self.lm_head(x)
        rows, labels = logits.flatten(0, 1), labels.flatten(0, 1)
        if self.loss == "weights":
            loss = F.cross_entropy(rows, labels, torch.linspace(0.1, 2, 257))
        elif self.loss == "z_loss":
            loss = F.cross_entropy(rows, labels) + 1e-2 * rows.logsumexp(-1).square().mean()
        else:
            loss = F.cross_entropy(rows, labels, reduction=self.loss)
        return loss, logits if self.returns_logits else None


def parallel_loss(rank, kind, returns_logits, how, parallel=True):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    import fx_fusion

    torch._dynamo.reset()
    model = ScatteredHead(kind, returns_logits)
    if parallel:
        given = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        model = parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), given)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 16, 64, generator=generator).requires_grad_()
    labels = torch.randint(257, (2, 16), generator=generator)
    if kind != "weights":  # with which torch's own loss_parallel indexes the weights by -100
        labels[0, 5:9] = -100
    with fx_fusion.recording() as report, loss_parallel() if parallel else contextlib.nullcontext():
        loss, logits = (torch.compile(model, **how) if how else model)(x, labels)
        (loss if loss.dim() == 0 else (loss * loss).sum()).backward()
    assert logits is None or not parallel or logits.placements == (Shard(2),)
    grads = [x.grad, *(whole(p.grad) for p in model.parameters())]
    return whole(loss).detach(), grads, (type(loss).__name__, str(getattr(loss, "placements", None))), report


def loss_parallel_worker(rank):
    from fx_fusion.testing import rewriting_backend

    found = {}
    kinds = [
        ("mean", False, "rewrite"), ("sum", False, "rewrite"), ("none", False, "rewrite"), ("mean", True, "rewrite"),
        ("mean", False, "inductor"), ("weights", False, "rewrite"), ("z_loss", False, "rewrite"),
    ]  # fmt: skip
    for kind, returns_logits, backend in kinds:
        options = {"select": "always", "strict": True}
        how = {"backend": "fx_fusion", "options": options} if backend == "inductor" else {"backend": rewriting_backend()}
        loss, grads, lies, _ = parallel_loss(rank, kind, returns_logits, None)
        our_loss, our_grads, our_lies, report = parallel_loss(rank, kind, returns_logits, how)
        loss_alone, grads_alone, _, _ = parallel_loss(rank, kind, returns_logits, None, parallel=False)
        expected = [(loss, *grads), (loss_alone, *grads_alone)]
        pairs = [pair for of in expected for pair in zip(of, (our_loss, *our_grads), strict=True)]
        errors = [((a - b).abs().max() / a.abs().max().clamp(min=1)).item() for a, b in pairs]  # a sum of rows is 170
        sites = [(s.status, s.reason) for s in report.sites if s.fusion == "linear_cross_entropy"]
        found[kind, returns_logits, backend] = errors, lies, our_lies, sites, [g.fallback for g in report.graphs]
    return found


class RoundedLogits(torch.nn.Module):
    """Logits that are rounded, or whose gradient is, on the way to all ranks."""

    def __init__(self, **dtypes):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head, self.dtypes = torch.nn.Linear(64, 256, bias=False), dtypes

    def forward(self, x, labels):
        from torch.distributed.tensor import Replicate

        logits = self.lm_head(x).redistribute(placements=[Replicate()], **self.dtypes).to_local()
        return F.cross_entropy(logits.float(), labels)


def rounded_logits(rank):
    """Of each dtype that is asked for: how far our loss and gradient are from eager's, and what fused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import fx_fusion
    from fx_fusion.testing import rewriting_backend

    found = []
    for dtypes in ({}, {"forward_dtype": torch.bfloat16}, {"backward_dtype": torch.bfloat16}):
        results = []
        for backend in ("eager", rewriting_backend()):
            torch._dynamo.reset()
            model = RoundedLogits(**dtypes)
            plan = {"lm_head": ColwiseParallel(use_local_output=False)}
            parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
            with fx_fusion.recording() as report:
                loss = torch.compile(model, backend=backend)(x, torch.arange(16))
                loss.backward()
            results.append((loss.item(), whole(model.lm_head.weight.grad)))
        (loss, grad), (ours, our_grad) = results
        errors = abs(loss - ours) / loss, ((grad - our_grad).abs().max() / grad.abs().max()).item()
        found.append((errors, [(s.fusion, s.status, s.reason) for s in report.sites]))
    return found


@pytest.mark.slow
def test_logits_that_are_rounded_between_ranks():
    for found in on_ranks(rounded_logits).values():
        for number, (errors, sites) in enumerate(found):
            assert worst_of(errors) < 2e-6, number
            assert (("linear_cross_entropy", "fused", "") in sites) == (number == 0), sites


def check_loss_parallel(ranks):
    for results in on_ranks(loss_parallel_worker, ranks=ranks).values():
        for (kind, returns_logits, _), (errors, lies, our_lies, sites, fallbacks) in results.items():
            assert worst_of(errors) < 2e-5, (kind, errors)
            assert our_lies == lies
            assert not any(fallbacks)
            if returns_logits:
                assert [status for status, _ in sites] == ["declined"], sites
            else:
                assert sites == [("fused", "")], (kind, sites)


@pytest.mark.slow
def test_loss_parallel():
    """The loss of logits that stay on their ranks: fused, and what comes out is the DTensor that eager returns."""
    check_loss_parallel(2)


@pytest.mark.slow
def test_loss_parallel_on_four_ranks():
    check_loss_parallel(4)
