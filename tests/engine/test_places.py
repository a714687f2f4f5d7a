"""Paths of modules as the report says them: as a user would write them, whatever wraps the model."""

import functools
import types

import pytest
import torch
from torch import nn

from fx_fusion.graph.places import module_of, named


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(8)])

    def forward(this, x):
        return this.norms[0](x)


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Decorated(Norms):
    """As transformers' models, whose forward has a decorator."""

    forward = decorated(Norms.forward)


class Holds(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def by_a_method(model):
    """As TRL wraps a forward, and many a patch."""
    forward = model.forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: forward(*args, **kwargs), model)
    return model


def by_a_function(model):
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return model


def by_accelerate(model):
    """As accelerate's hooks for device_map and offloading."""
    model._old_forward = model.forward

    def new_forward(module, *args, **kwargs):
        return module._old_forward(*args, **kwargs)

    model.forward = functools.update_wrapper(functools.partial(new_forward, model), model._old_forward)
    return model


class Teaches(nn.Module):
    """Another model's forward, which is no wrapper of its own."""

    def __init__(self, teacher):
        super().__init__()
        self.teacher_forward = teacher.forward

    def forward(self, x):
        return self.teacher_forward(x)


MODEL, MODELS = Norms(), [Norms()]


def of_a_closure(model):
    return lambda x: model(x)


@pytest.mark.parametrize(
    ("called", "path"),
    [
        (Norms(), "norms.0"),
        (Decorated(), "norms.0"),
        (Holds(Norms()), "inner.norms.0"),
        (Holds(torch.compile(Norms(), backend="eager")), "inner.norms.0"),
        (lambda x: MODEL(x), "norms.0"),
        (of_a_closure(Norms()), "norms.0"),
        (lambda x: MODELS[0](x), "MODELS.0.norms.0"),
        (Teaches(Norms()), "teacher_forward.__self__.norms.0"),
        *((wrap(Norms()), "norms.0") for wrap in (by_a_method, by_a_function, by_accelerate)),
        *((Holds(wrap(Norms())), "inner.norms.0") for wrap in (by_a_method, by_a_function, by_accelerate)),
    ],
    ids=["self has another name", "decorated", "inside", "compiled inside", "global", "closure", "in a list", "a teacher",
         *(f"wrapped by {how}{where}" for where in ("", ", inside") for how in ("a method", "a function", "accelerate"))],
)
def test_a_path_is_what_a_user_would_write(called, path):
    seen = []

    def backend(gm, inputs):
        seen.extend(module_of(node) for node in gm.graph.nodes if node.op == "call_function")
        return gm

    torch.compile(called, backend=backend)(torch.randn(2, 8))
    assert set(seen) == {path}


@pytest.mark.parametrize(
    ("target", "name"),
    [("L_attention_mask_", "attention_mask"), ("L_kwargs_attention_mask_", "attention_mask"), ("L_args_2_", "args[2]"), ("mask", "mask")],
)
def test_an_input_is_called_as_the_model_calls_it(target, name):
    assert named(torch.fx.Graph().placeholder(target)) == name


def test_what_is_no_input_has_the_name_of_its_node():
    graph = torch.fx.Graph()
    assert named(graph.call_function(torch.relu, (graph.placeholder("L_x_"),))) == "relu"
