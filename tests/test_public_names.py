"""The names that the packages export."""

import pkgutil
from types import ModuleType

import pytest

import cost_model
import executor
import planner


@pytest.mark.parametrize("package", [cost_model, executor, planner], ids=lambda package: package.__name__)
def test_no_exported_name_is_that_of_a_module(package: ModuleType) -> None:
    """Importing the module would replace what is exported under the same name."""
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)
