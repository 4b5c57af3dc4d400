"""These tests compare with PyTorch's dispatcher, so only the backends that PyTorch has may exist while they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchport import dispatch
from torchport.dispatch import keys as dispatch_keys


@pytest.fixture(scope="module", autouse=True)
def _only_built_in_backends() -> Iterator[None]:
    """Hide the backends that other tests of this process bound to devices; they come back with their bits."""
    registry = dispatch.backends
    hidden = [component for component in registry if not component.builtin]
    instances = {k: v for k, v in dispatch_keys._instances.items() if v.backend in hidden}
    names = {key.name: dispatch_keys._keys[key.name] for key in instances.values()}
    for component in hidden:
        del registry._by_name[component.name]
        registry._slots[component.index] = None
    for place, key in instances.items():
        del dispatch_keys._instances[place]
        del dispatch_keys._keys[key.name]
    registry._refresh()
    yield
    for component in hidden:
        registry._by_name[component.name] = component
        registry._slots[component.index] = component
    dispatch_keys._instances.update(instances)
    dispatch_keys._keys.update(names)
    registry._refresh()
