"""Run an action right after a module is first imported.

verl loads its plugins while `verl` itself is half imported, in every process it starts. What a plugin adds to a module
of verl must wait for that module, and must not make a process that never uses it pay for the import.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds the one module it waits for through the other finders, and adds the action to its loading."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action, self.searching = name, action, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with the action added, or None for every other module."""
        if fullname != self.name or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, action: Action) -> None:
    """Call `action(module)` once the module `name` has been imported: now, if it already is."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, action))
