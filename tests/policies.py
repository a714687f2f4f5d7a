"""Log-probabilities and entropies as policies write them, for the tests of token_log_probs and of log_probs_entropy."""

import torch
import torch.nn.functional as F

import fx_fusion
from fx_fusion.testing import rewriting_backend, run, run_oracle, worst_excess
from tests.helpers import reasons, rewritten

B, S, H, V = 2, 7, 16, 301


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    return {
        "x": torch.randn(B, S, H).to(dtype), "w": torch.randn(V, H).to(dtype), "t": torch.randint(0, V, (B, S)),
    }  # fmt: skip


def chosen(log_p, t):
    return log_p.gather(-1, t.unsqueeze(-1)).squeeze(-1)


def exp_of_log(logits, t):
    log_p = logits.log_softmax(-1)
    return chosen(log_p, t), -(log_p.exp() * log_p).sum(-1)


def softmax_times_log(logits, t):
    log_p = F.log_softmax(logits, dim=-1)
    return chosen(log_p, t), -torch.sum(log_p * F.softmax(logits, dim=-1), dim=-1)


def difference(logits, t):
    """logsumexp - sum(p · l), and the log-probabilities by logsumexp too."""
    log_p = logits.gather(-1, t.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    return log_p, torch.logsumexp(logits, dim=-1) - torch.sum(torch.softmax(logits, dim=-1) * logits, dim=-1)


def negative(logits, t):
    """The sum itself, without a sign, and a bonus made of it."""
    log_p = logits.log_softmax(-1)
    return chosen(log_p, t) * 2, 0.01 * (torch.exp(log_p) * log_p).sum(dim=-1).mean()


def divided_twice(logits, t):
    log_p = (logits / 0.7).log_softmax(-1)
    return chosen((logits / 0.7).log_softmax(-1), t), -(log_p.exp() * log_p).sum(-1)


def gathered_flat(logits, t):
    flat = logits.reshape(-1, logits.shape[-1])
    log_p = chosen(flat.log_softmax(-1), t.reshape(-1)).view(t.shape)
    return log_p, -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def entropy_of_flat(logits, t):
    flat = logits.view(-1, logits.shape[-1])
    return chosen(logits.log_softmax(-1), t), torch.logsumexp(flat, -1) - (flat.softmax(-1) * flat).sum(-1)


SPELLINGS = {
    f.__name__: f
    for f in (exp_of_log, softmax_times_log, difference, negative, divided_twice, gathered_flat, entropy_of_flat)
}
HEADS = {
    "plain": lambda x, w: F.linear(x, w),
    "float": lambda x, w: F.linear(x, w).float(),
    "temperature": lambda x, w: F.linear(x, w).float() / 0.7,
    "softcap": lambda x, w: 30 * torch.tanh(F.linear(x, w).float() / 30),
}


def check_spelling(fusion, name, head, dtype):
    """With the lm_head (token_log_probs), or of logits that exist (log_probs_entropy): it fires, by the accuracy rule."""
    options = {"fusions": [fusion], "select": "always"}

    def function(x, w, t):
        return SPELLINGS[name](HEADS[head](x, w), t)

    inputs = tensors(dtype)
    with fx_fusion.recording() as report:
        fused = run(torch.compile(function, backend=rewriting_backend(**options), dynamic=False), inputs)
    if (fusion, name, head) == ("token_log_probs", "divided_twice", "softcap"):  # a temperature above a softcap
        assert "expected linear, found tanh" in reasons(report, fusion)
        return
    assert report.count(fusion) == 1, str(report)
    assert "softmax" not in report.graphs[-1].after
    used = worst_excess(fused, run(function, inputs), run_oracle(function, inputs), dtype)
    assert used[1] <= 1, used


def after_the_entropy(x, w, t):
    """The logits that are gathered from are a copy, made behind the entropy and used elsewhere."""
    logits = F.linear(x, w)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    copy = logits.clone()
    return chosen(copy.log_softmax(-1), t), entropy, copy * 2


def one_row(x, w, t):
    return exp_of_log(F.linear(x[0, 0], w), t[0, 0])


def by_keywords(x, w, t):
    logits = F.linear(x, w)
    log_p = torch.squeeze(input=logits.gather(-1, t.unsqueeze(-1)), dim=-1) - torch.logsumexp(input=logits, dim=-1)
    return log_p, torch.logsumexp(input=logits, dim=-1) - torch.sum(torch.softmax(logits, dim=-1) * logits, dim=-1)


def check_that_it_never_breaks(function, fusion):
    """Fused or declined, with eager's numbers."""
    inputs = tensors()
    found, report = rewritten(function, **inputs, options={"fusions": [fusion], "select": "always"})
    assert report.graphs, "the graph fell back"
    for ours, expected in zip(found, function(**inputs), strict=True):
        torch.testing.assert_close(ours, expected)
    if function is not after_the_entropy:
        assert report.count(fusion) == 1, str(report)


def check_that_results_are_no_views(fusion):
    """Return what is returned may be written to."""

    def function(x, w, t):
        log_p, entropy = exp_of_log(F.linear(x, w), t)
        log_p += 1
        return log_p, entropy

    inputs = tensors()
    inputs["w"].requires_grad_()
    found, report = rewritten(function, **inputs, options={"fusions": [fusion], "select": "always"})
    assert report.count(fusion) == 1, str(report)
    for ours, expected in zip(found, function(**inputs), strict=True):
        torch.testing.assert_close(ours, expected)


def check_one_gradient_of_both(wanted, fusion):
    """The entropy for the log only, or the entropy alone."""

    def function(x, w, t):
        results = list(exp_of_log(F.linear(x, w), t))
        results[1 - wanted] = results[1 - wanted].detach()
        return tuple(results)

    inputs = tensors()
    ours, theirs = (inputs["x"].clone().requires_grad_() for _ in range(2))
    found, report = rewritten(function, ours, inputs["w"], inputs["t"], options={"fusions": [fusion], "select": "always"})
    assert report.count(fusion) == 1, str(report)
    found[wanted].sum().backward()
    function(theirs, inputs["w"], inputs["t"])[wanted].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
