"""Kernels, candidates and plugins as text and as plain data for JSON."""

from __future__ import annotations

from typing import Any

from tokenspeed_kernel.platform import Platform
from tokenspeed_kernel.registry import PluginRecord, Registry
from tokenspeed_kernel.selection import Candidate
from tokenspeed_kernel.spec import Band, KernelSpec

__all__ = [
    "candidate_facts",
    "formats_text",
    "platform_facts",
    "platform_text",
    "platforms_text",
    "plugin_facts",
    "plugin_lines",
    "spec_facts",
    "verified_text",
]


def platforms_text(spec: KernelSpec) -> str:
    """What the kernel was built for, with the features that it needs."""
    features = "".join(f"+{feature}" for feature in sorted(spec.capability.features))
    return ", ".join(target + features for target in spec.capability.targets)


def formats_text(spec: KernelSpec) -> str:
    """All formats that some operand may have, in order; the exact combinations are in the JSON output."""
    names = dict.fromkeys(str(fmt) for signature in spec.formats for _, fmt in signature)
    return ", ".join(names) or "any"


def verified_text(spec: KernelSpec) -> str:
    """How the kernel was verified."""
    return ", ".join(str(one) for one in spec.verified) or ("the truth" if spec.band is Band.REFERENCE else "not verified yet")


def spec_facts(registry: Registry, spec: KernelSpec) -> dict[str, Any]:
    """A kernel as plain data."""
    return {
        "op": spec.op,
        "kernel": spec.name,
        "solution": spec.solution,
        "band": spec.band.name,
        "priority": spec.priority,
        "origin": registry.origin(spec.name),
        "targets": list(spec.capability.targets),
        "features": sorted(spec.capability.features),
        "interpreter": spec.capability.interpreter,
        "formats": [{operand: str(fmt) for operand, fmt in signature} for signature in spec.formats],
        "traits": [constraint.describe(name) for name, constraint in spec.traits.items()],
        "requires": [library.requirement for library in spec.libraries],
        "graph_safe": spec.graph_safe,
        "verified": [{"by": str(one.by), "on": one.on, "note": one.note} for one in spec.verified],
    }


def candidate_facts(registry: Registry, candidate: Candidate) -> dict[str, Any]:
    """A kernel's outcome as plain data."""
    return {
        **spec_facts(registry, candidate.spec),
        "verdict": str(candidate.verdict),
        "reasons": [reason.text for reason in candidate.reasons],
        "conditions": list(candidate.conditions),
        "tuned": candidate.tuned,
    }


def platform_facts(platform: Platform) -> dict[str, Any]:
    """A platform as plain data."""
    return {"arch": platform.arch, "vendor": str(platform.vendor), "features": sorted(platform.features)}


def platform_text(platform: Platform) -> str:
    """A platform and its features."""
    return str(platform) + (f" with {', '.join(sorted(platform.features))}" if platform.features else "")


def plugin_facts(record: PluginRecord) -> dict[str, str]:
    """A plugin and what became of it."""
    return {"name": record.name, "distribution": record.distribution, "status": record.status}


def plugin_lines(registry: Registry) -> list[str]:
    """One line for each installed plugin."""
    facts = [plugin_facts(record) for record in registry.plugins]
    return [f"plugin {one['name']} ({one['distribution']}): {one['status']}" for one in facts]
