"""FSDP's parameters: whole while a module runs, freed behind it, gathered again; FSDP2's into the same parameter."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Owner:
    """The owner of a whole parameter: the module that gathers it (weakly), this rank's part, and the process group."""

    module: weakref.ref[Any]
    sharded: Tensor
    group: Any


_OWNERS: Any = WeakTensorKeyDictionary()  # of the parameters that were asked for


def owner_of(parameter: Any) -> Owner | None:
    """Return who gathers a whole parameter; None for any other tensor. Gone: None, and a read behind a reshard raises."""
    if "torch.distributed.fsdp" not in sys.modules or not isinstance(parameter, nn.Parameter):
        return None
    if parameter not in _OWNERS:
        _OWNERS.update(_owners())
    return _OWNERS.get(parameter)


def _owners() -> Iterator[tuple[Tensor, Owner]]:
    try:
        from torch.distributed._composable_state import _module_state_mapping as states
    except ImportError:
        return
    for module, reference in list(states.items()):
        state = reference() if callable(reference) else reference
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                whole, part = (getattr(parameter, name, None) for name in ("_unsharded_param", "sharded_param"))
                if isinstance(whole, Tensor) and isinstance(part, Tensor):
                    yield whole, Owner(weakref.ref(module), part, getattr(group, "_all_gather_process_group", None))


def is_freed(tensor: Any) -> bool:
    """Return True if a tensor's memory was given back, as FSDP2 does behind a module; of a DTensor, this rank's part."""
    own = getattr(tensor, "_local_tensor", tensor)
    return isinstance(own, Tensor) and own.numel() > 0 and own.untyped_storage().size() == 0


def is_gathered_for_its_module_alone(tensor: Any) -> bool:
    """Return True if a parameter's memory is given back, and gathered again, by somebody whom nobody can ask for it: FSDP1,
    whose parameters are views of a flat one, or DeepSpeed. Gone: False, and a read behind the backward raises."""
    flat = isinstance(tensor, Tensor) and getattr(tensor._base, "_is_flat_param", False)
    return flat or hasattr(tensor, "ds_id")


def is_its_hook(function: Any) -> bool:
    """Return True if a hook on a gradient is FSDP's own, which it puts on each output of a module to gather parameters
    before the backward. Gone: False, and a model that FSDP wraps and that computes its loss behind a compiled head
    raises."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.fsdp.")


@contextlib.contextmanager
def gathered(owners: Iterable[Owner]) -> Iterator[None]:
    """Whole parameters inside, as while their modules run; every rank of their groups has to come here."""
    modules = list({id(m): m for owner in owners if (m := owner.module()) is not None}.values())
    try:
        for module in modules:
            module.unshard()
        yield
    finally:
        for module in modules:
            module.reshard()
