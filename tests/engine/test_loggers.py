"""Models that warn once through a logger: GPT-2, BERT and others do where their loss is chosen."""

import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fx_fusion
from fx_fusion.testing import rewriting_backend


class Logger(logging.Logger):
    """With the method that transformers gives to all loggers."""

    @functools.lru_cache(None)  # noqa: B019
    def warning_once(self, *args, **kwargs):
        self.warning(*args, **kwargs)


@pytest.fixture
def logger():
    made = Logger("a model that warns")
    made.records = []
    made.addFilter(lambda record: made.records.append(record.getMessage()) or False)
    return made


class Model(nn.Module):
    def __init__(self, say):
        super().__init__()
        self.embedding, self.head, self.say = nn.Embedding(128, 16), nn.Linear(16, 128, bias=False), say

    def forward(self, ids):
        logits = self.head(self.embedding(ids))
        self.say()
        return F.cross_entropy(logits[:, :-1].reshape(-1, 128), ids[:, 1:].reshape(-1))


IDS = torch.randint(128, (2, 9))


def train(model, backend):
    with fx_fusion.recording() as report:
        losses = [torch.compile(model, backend=backend)(IDS) for _ in range(2)]
    losses[0].backward()
    torch.testing.assert_close(losses[0], model(IDS))
    return report


def test_a_message_is_given_once_and_ends_no_graph(logger):
    report = train(Model(lambda: logger.warning_once("the loss is chosen")), rewriting_backend())
    assert len(report.graphs) == 1
    report.assert_fused(linear_cross_entropy=1)
    assert logger.records == ["the loss is chosen"]


def test_arguments_of_a_message(logger):
    report = train(Model(lambda: logger.warning_once("%s of %d", "one", 2)), "fx_fusion")
    assert len(report.graphs) == 1
    assert logger.records == ["one of 2"]


def test_other_backends_are_as_they_were(logger):
    model, graphs = Model(lambda: logger.warning_once("the loss is chosen")), []
    torch.compile(model, backend=lambda gm, inputs: graphs.append(gm) or gm)(IDS)
    assert len(graphs) == 2


def test_a_warning_that_is_given_each_time_is(logger):
    report = train(Model(lambda: logger.warning("again")), rewriting_backend())
    assert len(report.graphs) == 2
    assert "ignore_logging_functions" in str(report)
    assert logger.records == ["again"] * 3


def test_what_the_user_ignores_stays_ignored(logger):
    with torch._dynamo.config.patch(ignore_logging_functions={Logger.warning_once}):
        report = train(Model(lambda: logger.warning_once("ignored")), rewriting_backend())
    assert len(report.graphs) == 1
    assert logger.records == ["ignored"], "by eager alone"


@pytest.mark.parametrize("family", ["GPT2", "Bert"])
def test_models_of_transformers(family):
    import transformers

    settings = {"GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "use_cache": False}}.get(
        family,
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "is_decoder": True},
    )
    config = getattr(transformers, f"{family}Config")(vocab_size=128, **settings)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel"}[family])(config)
    with fx_fusion.recording() as report:
        torch.compile(model, backend=rewriting_backend())(input_ids=IDS, labels=IDS).loss.backward()
    assert len(report.graphs) == 1, str(report)
    report.assert_fused(linear_cross_entropy=1)
