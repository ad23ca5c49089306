"""Plugin of `tokenspeed_kernel`: kernels for x86-64 processors. `plugin.PLUGIN` says what it offers."""

from tokenspeed_kernel_cpu._version import __version__

__all__ = ["__version__"]
