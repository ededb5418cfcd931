"""Do something to a module as soon as somebody imports it."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

AfterImport = Callable[[ModuleType], None]


def after_import(wanted: Mapping[str, AfterImport]) -> None:
    """Call `wanted[name](module)` once for each module: now if it is imported, else when it is.

    A module whose own import fails is not passed on.
    """
    later = dict(wanted)
    for name in wanted:
        if name in sys.modules:
            later.pop(name)(sys.modules[name])
    if later:
        sys.meta_path.insert(0, _Finder(later))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find, and adds what is to be done after loading."""

    def __init__(self, wanted: dict[str, AfterImport]) -> None:
        self._wanted = wanted

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._wanted:
            return None
        for finder in sys.meta_path:
            found = finder.find_spec(fullname, path, target) if finder is not self else None
            if found is not None and found.loader is not None:
                found.loader = _Loader(found.loader, self._wanted)
                return found
        return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, and then the action."""

    def __init__(self, loader: Any, wanted: dict[str, AfterImport]) -> None:  # noqa: ANN401 - any loader
        self._loader, self._wanted = loader, wanted

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # What asks the module for its files must find the loader that has them.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        # Once only, and not before it is loaded: to look for a module is not to import it.
        if (action := self._wanted.pop(module.__name__, None)) is not None:
            action(module)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the loader has
        return getattr(self._loader, name)
