"""Actions that wait for another package's module, and what is done to Dynamo's registry of backends."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from fx_fusion.after_import import _WAITING, after_import
from fx_fusion.torch_internals.backend_names import add_ours


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported and is not; what it executes can be written into its file."""
    name = "waited_for"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)
    _WAITING.actions.pop(name, None)


def test_after_import_acts_once_when_the_module_is_imported(module):
    seen = []
    after_import(module, lambda found: seen.append(found.value))
    assert importlib.util.find_spec(module) is not None
    assert seen == []
    importlib.import_module(module)
    assert seen == [1]
    del sys.modules[module]
    importlib.import_module(module)
    assert seen == [1]


def test_after_import_acts_now_on_an_imported_module(module):
    seen = []
    imported = importlib.import_module(module)
    after_import(module, seen.append)
    assert seen == [imported]


def test_after_import_waits_on_after_a_failed_import(module, tmp_path):
    seen = []
    after_import(module, lambda found: seen.append(found.other))
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(module)
    (tmp_path / f"{module}.py").write_text("other = 'longer, so that no stale bytecode is found'\n")
    importlib.invalidate_caches()
    assert importlib.import_module(module).other in seen


def test_after_import_failing_action_warns_and_import_succeeds(module):
    after_import(module, lambda found: found.missing)
    with pytest.warns(UserWarning, match="could not register its backend with `waited_for`: AttributeError"):
        assert importlib.import_module(module).value == 1


def test_after_import_missing_module_raises_as_before():
    after_import("waited_for_in_vain", print)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("waited_for_in_vain")
    _WAITING.actions.pop("waited_for_in_vain")


def test_add_ours_new_name_loads_the_backend():
    registry = SimpleNamespace(_BACKENDS={})
    add_ours(registry)
    assert registry._BACKENDS["fx_fusion"].value == "fx_fusion.backend:fx_fusion"


def test_add_ours_known_name_is_kept():
    registry = SimpleNamespace(_BACKENDS={"fx_fusion": None})
    add_ours(registry)
    assert registry._BACKENDS == {"fx_fusion": None}


def test_add_ours_without_a_table_does_nothing():
    add_ours(SimpleNamespace())
