"""For those who write plugins: a project to start from, and the conformance suite for a wheel."""

from tokenspeed_kernel.plugin_kit.report import Finding, Outcome, Report
from tokenspeed_kernel.plugin_kit.scaffold import new_project
from tokenspeed_kernel.plugin_kit.suite import check_wheel

__all__ = ["Finding", "Outcome", "Report", "check_wheel", "new_project"]
