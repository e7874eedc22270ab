"""svdq: offline W4A4 quantization of transformers."""

from typing import TYPE_CHECKING, Any

from svdq import hook

__version__ = "0.1.0"

if TYPE_CHECKING:
    from svdq.calibration.recorded import recording
    from svdq.hf import SvdqConfig
    from svdq.linear import W4A4Linear, load_quantized
    from svdq.packed import PackedRunner

__all__ = ["PackedRunner", "SvdqConfig", "W4A4Linear", "__version__", "load_quantized", "recording"]


def __getattr__(name: str) -> Any:
    """The runtime names are imported when they are asked for: `import svdq` itself loads no torch."""
    if name in ("load_quantized", "W4A4Linear"):
        from svdq import linear

        return getattr(linear, name)
    if name == "recording":
        from svdq.calibration.recorded import recording

        return recording
    if name == "PackedRunner":
        from svdq.packed import PackedRunner

        return PackedRunner
    if name == "SvdqConfig":
        from svdq.hf import SvdqConfig

        return SvdqConfig
    raise AttributeError(f"module 'svdq' has no attribute {name!r}")


hook.install()
