"""The names of backends that Dynamo knows. Imports nothing of torch, because ``import fx_fusion`` does not."""

from types import ModuleType

REGISTRY = "torch._dynamo.backends.registry"
_NAME = "fx_fusion"


def add_ours(registry: ModuleType) -> None:
    """Add the backend's name to Dynamo's registry, as the entry point of the installed package does.

    Dynamo loads the backend when it first looks up the name. The installed package's own entry point replaces this one,
    and a name that is already registered stays as it is. Gone (``_BACKENDS``): only the installed package has the name.
    """
    from importlib.metadata import EntryPoint  # here, because it takes most of the time of `import fx_fusion`

    names = getattr(registry, "_BACKENDS", None)
    if isinstance(names, dict):
        names.setdefault(_NAME, EntryPoint(_NAME, "fx_fusion.backend:fx_fusion", "torch_dynamo_backends"))
