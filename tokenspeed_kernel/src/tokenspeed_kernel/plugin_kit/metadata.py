"""Checks of a wheel as a package: contents, metadata, licence, requirements."""

from __future__ import annotations

import configparser
import importlib.metadata
import platform

import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from tokenspeed_kernel.plugin_kit.report import Area, Report
from tokenspeed_kernel.plugin_kit.wheel import Wheel
from tokenspeed_kernel.plugins import ENTRY_POINT_GROUP

__all__ = ["check_metadata", "entry_points_of"]

# Names that many projects would install by mistake, and ours.
_NOT_THEIRS = ("tests", "test", "docs", "examples", "benchmarks", "setup", "tokenspeed_kernel", "torch", "triton")
_LIBRARIES = (".so", ".pyd", ".dylib", ".dll")


def check_metadata(wheel: Wheel, report: Report) -> None:
    """Add what there is to say of the wheel as a package."""
    _check_contents(wheel, report)
    _check_core(wheel, report)
    _check_licence(wheel, report)
    _check_requirements(wheel, report)


def entry_points_of(wheel: Wheel) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Its plugins, in order of name."""
    file = f"{wheel.info}/entry_points.txt"
    if file not in wheel.files:
        return ()
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(wheel.read(file))
    found = parser.items(ENTRY_POINT_GROUP) if parser.has_section(ENTRY_POINT_GROUP) else []
    return tuple(importlib.metadata.EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in sorted(found))


def _check_contents(wheel: Wheel, report: Report) -> None:
    damage = wheel.damage()
    if damage:
        more = f" (and {len(damage) - 3} more)" if len(damage) > 3 else ""
        report.fail(Area.WHEEL, "; ".join(damage[:3]) + more, "build the wheel anew, and do not edit it afterwards")
    size = wheel.path.stat().st_size
    names = wheel.top_level()
    foreign = [name for name in names if name.removesuffix(".py") in _NOT_THEIRS]
    if foreign:
        report.fail(
            Area.WHEEL,
            f"it installs {', '.join(foreign)} into site-packages, which is not its own",
            "list only your package in the build backend's settings",
        )
    native = any(file.endswith(_LIBRARIES) or ".so." in file for file in wheel.files)
    if native and any(tag.platform == "any" for tag in wheel.tags):
        what = "it holds machine code, yet its name says that it fits any platform"
        report.fail(Area.WHEEL, what, "let the build backend set the tag")
    if not wheel.fits:
        tags = ", ".join(sorted(map(str, wheel.tags))[:3])
        report.fail(
            Area.WHEEL,
            f"it is built for {tags}, and this is Python {platform.python_version()} on {platform.machine()}",
            "check it with the Python and on the machine that it is for",
        )
    if not (damage or foreign) and wheel.fits:
        report.ok(Area.WHEEL, f"{len(wheel.files)} files, {size:,} bytes, installs {', '.join(names) or 'nothing'}; RECORD agrees")


def _check_core(wheel: Wheel, report: Report) -> None:
    metadata = wheel.metadata
    wrong = []
    if canonicalize_name(str(metadata["Name"])) != wheel.name or str(metadata["Version"]) != wheel.version:
        wrong.append(f"METADATA says {metadata['Name']} {metadata['Version']}, the file's name {wheel.name} {wheel.version}")
    if not str(metadata["Summary"] or "").strip():
        wrong.append("no Summary (description in pyproject.toml)")
    if not str(metadata["Description"] or metadata.get_payload() or "").strip():
        wrong.append("no Description (readme in pyproject.toml)")
    python = metadata["Requires-Python"]
    try:
        if python is None:
            wrong.append("no Requires-Python (requires-python in pyproject.toml)")
        elif not SpecifierSet(str(python)).contains(platform.python_version(), prereleases=True):
            wrong.append(f"Requires-Python {python} does not admit this Python {platform.python_version()}")
    except InvalidSpecifier:
        wrong.append(f"Requires-Python {python!r} is no version specifier")
    for text in wrong:
        report.fail(Area.METADATA, text, "correct [project] in pyproject.toml")
    if not wrong:
        report.ok(Area.METADATA, f"{metadata['Name']} {metadata['Version']}, Python {python}: {metadata['Summary']}")


def _check_licence(wheel: Wheel, report: Report) -> None:
    metadata = wheel.metadata
    expression = str(metadata["License-Expression"] or "")
    classifiers = [str(one) for one in metadata.get_all("Classifier", []) if str(one).startswith("License ::")]
    said = expression or "; ".join(classifiers)
    if not said:
        fix = 'add license = "Apache-2.0", or the SPDX expression of yours, to [project]'
        report.fail(Area.METADATA, "no licence: users cannot know what they may do with it", fix)
        return
    if expression and (error := _spdx_error(expression)):
        report.fail(Area.METADATA, f"License-Expression {expression!r}: {error}", "write an SPDX expression")
        return
    texts = [
        file
        for file in wheel.files
        if file.startswith(f"{wheel.info}/") and file.rpartition("/")[2].upper().startswith(("LICEN", "COPYING", "NOTICE"))
    ]
    declared = [f"{wheel.info}/licenses/{one}" for one in metadata.get_all("License-File", [])]
    absent = [one for one in declared if one not in wheel.files and one.replace("/licenses/", "/") not in wheel.files]
    if absent or not any(wheel.read(file).strip() for file in texts):
        what = f"{absent[0]} is not in the wheel" if absent else f"it says {said}, and holds no text of that licence"
        report.fail(Area.METADATA, what, 'put a LICENSE file beside pyproject.toml and license-files = ["LICENSE"] into [project]')
        return
    report.ok(Area.METADATA, f"licence {said}, text in {', '.join(texts)}")


def _spdx_error(expression: str) -> str:
    try:
        from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
    except ImportError:  # packaging before 24.2 does not know the list of licences
        return ""
    try:
        canonicalize_license_expression(expression)
    except InvalidLicenseExpression as error:
        return str(error)
    return ""


def _check_requirements(wheel: Wheel, report: Report) -> None:
    wrong = False
    hard = []
    for text in wheel.metadata.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(str(text))
        except InvalidRequirement as error:
            report.fail(Area.METADATA, f"Requires-Dist {text!r}: {error}", "correct dependencies in pyproject.toml")
            wrong = True
            continue
        if requirement.marker is not None and "extra" in str(requirement.marker):
            continue
        hard.append(str(requirement))
        name = canonicalize_name(requirement.name)
        if name == "torch" and not requirement.specifier.contains(torch.__version__, prereleases=True):
            report.fail(
                Area.METADATA,
                f"requires {requirement}: installing it would replace the torch {torch.__version__} that is here",
                "leave the upper bound out, or build for a range that users have",
            )
            wrong = True
        if name == "torch" and any(one.operator in ("==", "===", "~=") for one in requirement.specifier):
            report.note(Area.METADATA, f"requires {requirement}: whoever has another torch gets it replaced")
        if name == "tokenspeed-kernel":
            report.note(
                Area.METADATA,
                f"requires {requirement}: where the package is not installed, pip takes the one of that name on the public index, "
                "which is another project",
            )
    if not wrong:
        report.ok(Area.METADATA, f"requires {', '.join(hard) or 'nothing'}")
