"""tokenspeed-engine: an inference engine for coding agents, composed from tokenspeed-kernel's public ops."""

from tokenspeed_engine._version import __version__

__all__ = ["__version__"]
