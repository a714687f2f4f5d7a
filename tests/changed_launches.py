"""Launches with other arguments, as passes over the joint graph change them."""

import contextlib
from unittest import mock


@contextlib.contextmanager
def changed(module, kernel, **arguments):
    """Launches of a kernel by a module get these arguments instead of its own. One that is callable is called with those."""
    own = module.launch

    def launch(launched, grid, *args, **options):
        if launched is kernel:
            given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
            given |= {name: value(given) if callable(value) else value for name, value in arguments.items()}
            args, options = (), given
        own(launched, grid, *args, **options)

    with mock.patch.object(module, "launch", launch):
        yield
