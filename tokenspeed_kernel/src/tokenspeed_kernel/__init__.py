"""Stand-alone kernels for language-model inference, chosen per call with an explanation.

    from tokenspeed_kernel.ops.norm import rms_norm

Importing this package starts no device and imports no kernel.
"""

from tokenspeed_kernel._version import __version__
from tokenspeed_kernel.errors import (
    ConfigError,
    ConfigWarning,
    FormatError,
    GroupError,
    KernelLoadError,
    NoKernelError,
    PlatformError,
    PluginError,
    PluginWarning,
    RegistrationError,
    ShapeError,
    TokenSpeedKernelError,
    UnknownOpError,
)
from tokenspeed_kernel.platform import Platform, Vendor, current_platform, parse_platform
from tokenspeed_kernel.plugins import API_VERSION, Plugin
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.spec import (
    ANYWHERE,
    CPU,
    TRITON_PORTABLE,
    Band,
    Capability,
    KernelSpec,
    Library,
    OpContract,
    Verified,
    VerifiedBy,
)
from tokenspeed_kernel.traits import Multiple, OneOf, PowerOfTwo, Range, Trait

__all__ = [
    "ANYWHERE",
    "API_VERSION",
    "CPU",
    "TRITON_PORTABLE",
    "Band",
    "Capability",
    "ConfigError",
    "ConfigWarning",
    "Format",
    "FormatError",
    "GroupError",
    "KernelLoadError",
    "KernelSpec",
    "Library",
    "Multiple",
    "NoKernelError",
    "OneOf",
    "OpContract",
    "Platform",
    "PlatformError",
    "Plugin",
    "PluginError",
    "PluginWarning",
    "PowerOfTwo",
    "QuantizedTensor",
    "Range",
    "RegistrationError",
    "ShapeError",
    "Signature",
    "TokenSpeedKernelError",
    "Trait",
    "UnknownOpError",
    "Vendor",
    "Verified",
    "VerifiedBy",
    "__version__",
    "current_platform",
    "parse_platform",
]
