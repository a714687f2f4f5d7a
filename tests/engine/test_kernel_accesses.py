"""The memory of which arguments a kernel writes to."""

import torch

from fx_fusion.torch_internals.kernel_accesses import remembered


class Kernel:
    def __init__(self, fn):
        self.fn = fn


def kernel_of(module):
    def body():
        pass

    body.__module__ = module
    return Kernel(body)


def asked(calls):
    seen = []

    def ask(kernel, kwargs, metadata):
        seen.append(kwargs)
        return [name for name in kwargs if name.startswith("y")]

    answer = remembered(ask)
    return [answer(*call) for call in calls], len(seen)


def test_the_same_question_is_asked_once_and_its_answer_is_the_callers_own():
    ours = kernel_of("fx_fusion.kernels.rms_norm")
    x, y = torch.ones(2), torch.ones(3)
    (first, second), count = asked([(ours, {"x": x, "y": y, "n": 3}, {}), (ours, {"x": y, "y": x, "n": 3}, {})])
    assert count == 1
    assert first == second == ["y"]
    assert first is not second


def test_a_kernel_that_is_wrapped_anew_at_each_launch_is_asked_about_once():
    """PyTorch wraps a kernel with ``num_warps`` into an autotuner, whose first configuration may hold constants."""

    class Wrapped(Kernel):
        def __init__(self, kernel, **constants):
            super().__init__(kernel)
            self.configs = [Configuration(constants)]

    class Configuration:
        def __init__(self, constants):
            self.kwargs = constants

    ours = kernel_of("fx_fusion.kernels.rope")
    ours.__module__ = "fx_fusion.kernels.rope"
    assert asked([(Wrapped(ours), {"n": 3}, {})] * 2 + [(Wrapped(ours), {"n": 3}, {})])[1] == 1
    assert asked([(Wrapped(ours, BLOCK=block), {"n": 3}, {}) for block in (16, 32, 16)])[1] == 2


def test_another_constant_dtype_or_kernel_is_another_question():
    ours, other = kernel_of("fx_fusion.kernels.rope"), kernel_of("fx_fusion.kernels.rope")
    x = torch.ones(2)
    questions = [{"x": x, "n": 3}, {"x": x, "n": 4}, {"x": x.half(), "n": 3}, {"x": None, "n": 3}, {"x": x, "n": True}]
    assert asked([(k, q, {}) for k in (ours, other) for q in questions])[1] == 10


def test_kernels_of_others_and_unknown_arguments_are_asked_every_time():
    theirs, ours = kernel_of("somebody.kernels"), kernel_of("fx_fusion.kernels.rope")
    assert asked([(theirs, {"n": 3}, {})] * 2)[1] == 2
    assert asked([(ours, {"n": object()}, {})] * 2)[1] == 2
    assert asked([(ours, {"n": 3}, {"n": "a descriptor"})] * 2)[1] == 2
