"""Makes transformers know quant_method "w4q", without importing it for those who do not use it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

_place = "transformers.quantizers.auto"  # where transformers keeps its quantizers


class _WhenImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands before the finder of one module, and registers behind its execution."""

    def find_spec(self, name, path=None, target=None):
        if name != _place:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        register()


def register() -> None:
    from . import transformers_quantizer  # noqa: F401


def install() -> None:
    if _place in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _WhenImported())
