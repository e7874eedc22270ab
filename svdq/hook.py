"""`import svdq` makes transformers know svdq's directories, and does not import it.

transformers' registry of quantizers is a module, transformers.quantizers.auto, whose import takes seconds: it brings
torch. `import svdq` takes hundredths of one. So where that module is not loaded yet, a finder waits in sys.meta_path
for its import, steps aside, and registers svdq's quantizer when the module has run. transformers itself has imported
nothing of it before a model is asked for, so no order of the two imports is wrong.

Rejected: importing transformers here; an entry point, as transformers looks for none; a call that users would forget.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder

REGISTRY = "transformers.quantizers.auto"


def _register() -> None:
    import svdq.hf  # noqa: F401  # which registers; it may be what is importing the registry


class _Waiting(MetaPathFinder):
    """Finds the registry as the others do, and has svdq registered when it has run."""

    def find_spec(self, name, path=None, target=None):
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # until the module has run: its import may fail and be tried again
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        run = loader.exec_module

        def run_and_register(module) -> None:
            run(module)
            if module.__name__ == REGISTRY and self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        loader.exec_module = run_and_register  # type: ignore[method-assign]  # of this module's own loader
        return spec


def install() -> None:
    """Register now if the registry is loaded, else when it will be."""
    if REGISTRY in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Waiting())
