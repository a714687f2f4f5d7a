"""Inductor: options, caches, compiling, and its own choice of layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config as config
import torch._inductor.utils
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

_PASS_SLOT = "post_grad_custom_pre_pass"
_CACHEABLE = "unsafe_marked_cacheable_functions"


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any],
    prepare: Callable[[fx.GraphModule, bool], None] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph with Inductor under these changes to its configuration.

    By its id AOTAutograd would keep what is compiled for Dynamo's ``caching_precompile``: another process would call it in
    place of the backend, with nothing of ours around it.

    Args:
        prepare: is called with each graph that is lowered, and whether it is a backward.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        if prepare is not None:
            prepare(gm, bool(options.get("is_backward", False)))
        return compile_fx_inner(gm, example_inputs, **options)

    vars(gm).pop("_backend_id", None)
    return compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=dict(patches))


def compile_with(
    mode: str | None, options: Mapping[str, Any], gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph as ``torch.compile(mode=mode, options=options)`` would."""
    return torch._TorchCompileInductorWrapper(mode, dict(options), None)(gm, example_inputs)


def modes() -> tuple[str, ...]:
    """The names that ``torch.compile(mode=...)`` takes. Gone: those of torch 2.11."""
    modes = getattr(torch._inductor, "list_mode_options", None)
    known = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs") if modes is None else tuple(modes())
    return ("default", *(m for m in known if m != "default"))


def option_names() -> frozenset[str]:
    """The names of Inductor's options. Gone: those of its configuration's attributes."""
    names = getattr(config, "get_config_copy", lambda: vars(config))()
    return frozenset(names)


def configuration(mode: str | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what Inductor's own wrapper makes of a mode and options, their types checked. Gone: the options as they are,
    and the mode is Inductor's to read."""
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    return dict(options) if wrapper is None else wrapper(mode, dict(options), None).config


def may_call_bodies() -> bool:
    """Return True if Inductor, as it is configured now, can compile calls of graphs. Gone: True, and it raises instead."""
    others = ("cpp_wrapper", "fx_wrapper", "freezing")
    return not any(getattr(config, name, False) for name in others) and not getattr(V, "aot_compilation", False)


def fuses_epilogues() -> bool:
    """Return True if Inductor may compute what follows a product in the product's kernel. Gone: False."""
    return bool(getattr(config, "max_autotune", False) or getattr(config, "max_autotune_gemm", False))


def captures_cuda_graphs(options: Mapping[str, Any]) -> bool:
    """Return True if Inductor will capture CUDA graphs under these options."""
    return bool(options.get("triton.cudagraphs", config.triton.cudagraphs))


def reset() -> None:
    """Do what ``torch.compile``'s reset does for Inductor (CUDA-graph trees). Gone: nothing."""
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        wrapper(None, None, None).reset()


def name_kernels_on_cpu() -> None:
    """From now on, kernels that are compiled for a CPU appear in profiles, by name. Gone: they do not."""
    if hasattr(config.cpp, "enable_kernel_profile"):
        config.cpp.enable_kernel_profile = True


def without_caches() -> contextlib.AbstractContextManager[Any]:
    """A context in which no compile cache is read or written. Gone: raises, and the graph goes to Inductor unchanged."""
    return config.patch(force_disable_caches=True)


def without_donated_buffers() -> contextlib.AbstractContextManager[Any]:
    """A context in which AOTAutograd lets no backward overwrite the tensors that it is given. Gone: raises, and the graph
    goes to Inductor unchanged."""
    return torch._functorch.config.patch(donated_buffer=False)


# -- the cache key -----------------------------------------------------------------------------------------------------
class KeyPass(CustomGraphPass):
    """A graph pass that changes nothing; its uuid is part of the key of both compile caches."""

    def __init__(self, key: str):
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        return

    def uuid(self) -> Any:
        return self.key, _donated()


class UsersPassAndKey(CustomGraphPass):
    """The user's own pass, whose key is ours too."""

    def __init__(self, users: CustomGraphPass, key: str):
        self.users, self.key = users, key

    def __call__(self, graph: fx.Graph) -> None:
        self.users(graph)

    def uuid(self) -> Any:
        theirs = self.users.uuid()
        return None if theirs is None else (theirs, self.key, _donated())


def _donated() -> tuple[int, ...]:
    """Return which of its arguments the backward that is compiled may overwrite. Inductor's key does not have them: code
    that does would be found for a backward that runs twice (``retain_graph``), and its second gradients were wrong. Gone:
    none, and so is what Inductor does with them."""
    context = torch._guards.TracingContext.try_get()
    return tuple(getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None) or ())


def with_key(options: Mapping[str, Any], key: str, functions: Mapping[str, str]) -> dict[str, Any]:
    """Inductor's options with ``key`` in the keys of the compile caches.

    Args:
        functions: qualified names of plain functions that graphs call, and what identifies their code.

    Gone (either option): raises AttributeError, and the graph goes to Inductor unchanged."""
    patches = dict(options)
    users = patches.get(_PASS_SLOT, getattr(config, _PASS_SLOT))
    known = dict(patches.get(_CACHEABLE, getattr(config, _CACHEABLE)) or {})
    patches[_CACHEABLE] = {**known, **functions}
    if users is None:
        patches[_PASS_SLOT] = KeyPass(key)
    elif isinstance(users, CustomGraphPass):
        patches[_PASS_SLOT] = UsersPassAndKey(users, key)
    return patches


# -- layouts -------------------------------------------------------------------------------------------------------------
def optimizes_layouts() -> bool:
    """Return True if Inductor may lay out convolutions channels last. Gone: False, and norms between them stay channels
    first."""
    return bool(getattr(config, "layout_optimization", False))


def forces_layouts() -> bool:
    """Return True if Inductor lays out every convolution channels last. Gone: False."""
    return bool(getattr(config, "force_layout_optimization", False))


# -- memory ----------------------------------------------------------------------------------------------------------------
_JOINT_SLOT = "joint_custom_post_pass"
_BYTES, _BYTES_OF_A_CPU = 4.0e12, 2e10  # a second: an H200's memory as copies reach it


class JointPass(CustomGraphPass):
    """A pass over joint graphs, behind the user's own ones; ``key`` is part of the key of both compile caches."""

    def __init__(self, run: Callable[[fx.Graph], None], key: str, users: Sequence[Any]):
        self._run, self._key, self._users = run, key, users

    def __call__(self, graph: fx.Graph) -> None:
        for users in self._users:
            users(graph)
        self._run(graph)

    def uuid(self) -> Any:
        theirs = [users.uuid() if isinstance(users, CustomGraphPass) else None for users in self._users]
        return None if None in theirs else (self._key, *theirs)


def with_joint_pass(options: Mapping[str, Any], run: Callable[[fx.Graph], None], key: str) -> dict[str, Any]:
    """Inductor's options with a pass over joint graphs before they are partitioned. Gone: the options as they are, and only
    what the partitioner chooses by itself is computed again."""
    if not hasattr(config, _JOINT_SLOT):
        return dict(options)
    users = options.get(_JOINT_SLOT, getattr(config, _JOINT_SLOT))
    listed = users if isinstance(users, (list, tuple)) else [] if users is None else [users]
    return {**options, _JOINT_SLOT: JointPass(run, key, listed)}


def bytes_per_second(device: torch.device) -> float:
    """Return how fast a device reads and writes its memory, as large copies do: 0.85 of its peak. Gone, or not known: an
    H200's."""
    if device.type == "cpu":
        return _BYTES_OF_A_CPU
    known = getattr(torch._inductor.utils, "get_gpu_dram_gbps", None) if device.type == "cuda" else None
    if known is None or not torch.cuda.is_available():
        return _BYTES
    with torch.cuda.device(device):
        return 0.85e9 * known() or _BYTES


def cache_folder() -> str | None:
    """Return where Inductor keeps what it compiled. Gone: None."""
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir
    except ImportError:
        return None
    return cache_dir()


def triton_compiles() -> bool:
    """Return True if Triton can compile for the GPU that is here. Gone: yes, as far as anybody knows."""
    try:
        from torch.utils._triton import has_triton
    except ImportError:
        return True
    return has_triton()
