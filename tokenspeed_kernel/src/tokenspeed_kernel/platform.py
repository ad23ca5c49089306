"""Platforms (the CPU is one) and the build targets that cover them.

A platform is what a kernel runs on: vendor, architecture, features. A target is what a kernel was built for. Whether a
target covers a platform follows the rule of the vendor's tool chain and not the family name: code for `sm_100a` runs on
10.0 alone, code for `sm_120f` on 12.0 and 12.1. Importing this module initialises no device.

Source: CUDA programming guide, "Compute Capabilities" (architecture- and family-specific features); `ptxas --help`
for `--gpu-name`.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from tokenspeed_kernel.errors import PlatformError

__all__ = ["KNOWN_PLATFORMS", "Platform", "Target", "Vendor", "current_platform", "parse_platform", "platform_of"]


_LEAST_TORCH = (2, 9)


def _check_torch(version: str) -> None:
    """Refuse a torch that this package cannot run on; pip does, unless it was told to leave dependencies alone.

    Raises:
        ImportError: it is older.
    """
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        raise ImportError(f"tokenspeed_kernel: expected torch {least} or later, got {version}\nFix: pip install 'torch>={least}'.")


_check_torch(torch.__version__)


class Vendor(StrEnum):
    """Who made the device."""

    CPU = "cpu"
    NVIDIA = "nvidia"
    AMD = "amd"


@dataclass(frozen=True, slots=True)
class Platform:
    """What a kernel runs on.

    Args:
        vendor: maker of the device; `Vendor.CPU` for the host processor.
        arch: `cpu`, `sm_90`, `gfx950`, ...
        features: optional abilities, lower case: `avx2`, `avx512`, `bf16_dot` (bf16 dot products in hardware).
    """

    vendor: Vendor
    arch: str
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def capability(self) -> tuple[int, int]:
        """NVIDIA compute capability (major, minor); (0, 0) elsewhere."""
        return _sm_version(self.arch) if self.vendor is Vendor.NVIDIA else (0, 0)

    def __str__(self) -> str:
        return self.arch


KNOWN_PLATFORMS = (
    "cpu", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_107", "sm_110", "sm_120",
    "sm_121", "gfx90a", "gfx942", "gfx950",
)  # fmt: skip
"""Names that `parse_platform` takes; a CPU may add features, as in `cpu+avx2`."""

# Devices that share family-specific code ("f" targets). 11.0 has a major of its own.
_FAMILIES = ({(10, 0), (10, 3), (10, 7)}, {(11, 0)}, {(12, 0), (12, 1)})
# CDNA in order of age. RDNA parts are not in this order: their wavefront has 32 lanes.
_CDNA_ORDER = ("gfx90a", "gfx942", "gfx950")
_SM = re.compile(r"sm_(\d{2,3})([af]?)")


def _sm_version(arch: str) -> tuple[int, int]:
    number = arch.removeprefix("sm_")
    return int(number[:-1]), int(number[-1])


def parse_platform(text: str) -> Platform:
    """Return the platform of that name, real or pretended.

    Args:
        text: one of `KNOWN_PLATFORMS`; `cpu` may carry features: `cpu+avx2`.
    Raises:
        PlatformError: the name is not known; the message suggests close ones.
    """
    arch, *features = text.strip().lower().split("+")
    if arch not in KNOWN_PLATFORMS or (features and arch != "cpu"):
        close = difflib.get_close_matches(arch, KNOWN_PLATFORMS, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise PlatformError(f"platform: unknown {text!r}\nFix: {hint}known: {', '.join(KNOWN_PLATFORMS)}.")
    vendor = Vendor.CPU if arch == "cpu" else Vendor.NVIDIA if arch.startswith("sm_") else Vendor.AMD
    return Platform(vendor, arch, frozenset(features))


@functools.cache
def _host_platform() -> Platform:
    level = torch.backends.cpu.get_cpu_capability().lower()  # "default", "avx2", "avx512", ...
    features = {level} - {"default"}
    if level.startswith("avx512"):
        features |= {"avx2", "avx512"}
    # Without one of these a bf16 product is converted number by number, 40 to 60 times slower than a float32 one.
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    if "avx512" in features and any(probe is not None and probe() for probe in probes):
        features.add("bf16_dot")
    return Platform(Vendor.CPU, "cpu", frozenset(features))


@functools.cache
def platform_of(device: torch.device) -> Platform:
    """Return the platform of a tensor's device.

    Raises:
        PlatformError: the device type has no kernels here (mps, xpu, ...).
    """
    if device.type in ("cpu", "meta"):
        return _host_platform()
    if device.type != "cuda":
        raise PlatformError(
            f"platform: device {str(device)!r} has no platform, expected cpu or cuda\nFix: move the tensors to cpu."
        )
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return Platform(Vendor.AMD, arch)
    major, minor = torch.cuda.get_device_capability(device)
    return Platform(Vendor.NVIDIA, f"sm_{major}{minor}")


def current_platform() -> Platform:
    """Return the platform of the current GPU, or of the host processor where there is none.

    This is the first call that may initialise CUDA.
    """
    if torch.cuda.is_available():
        return platform_of(torch.device("cuda", torch.cuda.current_device()))
    return _host_platform()


@dataclass(frozen=True, slots=True)
class Target:
    """What a kernel was built for.

    Text forms: `any`; `cpu`; `nvidia`, `amd` (built on the device by a JIT, any arch); `nvidia>=sm_80`,
    `amd>=gfx942` (JIT, from that arch on); `sm_80` (a binary: same major, this minor or later); `sm_90a` (that arch
    alone); `sm_100f` (this and later minors of the family); `gfx950` (that arch alone).
    """

    text: str

    def __post_init__(self) -> None:
        base = self.text.split(">=")
        known = base[0] in ("any", "cpu", "nvidia", "amd") if len(base) == 1 else base[0] in ("nvidia", "amd")
        if len(base) == 1:
            match = _SM.fullmatch(self.text)
            known = known or bool(match) or self.text.startswith("gfx")
            if match and match[2] == "f" and self._family() is None:
                known = False
        elif len(base) == 2:
            least = base[1]
            known = known and (least in _CDNA_ORDER if base[0] == "amd" else bool(re.fullmatch(r"sm_\d{2,3}", least)))
        else:
            known = False
        if not known:
            raise PlatformError(
                f"target: unknown {self.text!r}\n"
                "Fix: use any, cpu, nvidia, amd, nvidia>=sm_80, amd>=gfx942, sm_90, sm_90a, sm_100f or gfx950."
            )

    def _family(self) -> set[tuple[int, int]] | None:
        version = _sm_version(self.text.rstrip("af"))
        return next((family for family in _FAMILIES if version in family), None)

    def covers(self, platform: Platform) -> bool:
        """Say whether code for this target runs on `platform`."""
        if self.text in ("any", platform.vendor):
            return True
        if ">=" in self.text:
            vendor, least = self.text.split(">=")
            if vendor != platform.vendor:
                return False
            if platform.vendor is Vendor.NVIDIA:
                return platform.capability >= _sm_version(least)
            return platform.arch in _CDNA_ORDER and _CDNA_ORDER.index(platform.arch) >= _CDNA_ORDER.index(least)
        match = _SM.fullmatch(self.text)
        if match is None or platform.vendor is not Vendor.NVIDIA:
            return self.text == platform.arch
        built, device = _sm_version(f"sm_{match[1]}"), platform.capability
        if match[2] == "a":
            return device == built
        same_line = device in (self._family() or ()) if match[2] == "f" else device[0] == built[0]
        return same_line and device[1] >= built[1]

    def __str__(self) -> str:
        return self.text
