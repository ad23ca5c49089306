"""Reads a wheel file without installing it, and unpacks it into a folder of its own."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath

from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from tokenspeed_kernel.errors import PluginError

__all__ = ["Wheel", "read_wheel"]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel file.

    Args:
        path: the file.
        name: of the distribution, canonical.
        version: as text.
        tags: what it was built for.
        info: name of its `.dist-info` folder.
        metadata: METADATA, parsed.
        files: every path in it.
    """

    path: Path
    name: str
    version: str
    tags: frozenset[Tag]
    info: str
    metadata: Message
    files: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether this interpreter on this machine can install it."""
        return not self.tags.isdisjoint(sys_tags())

    def installed_path(self, file: str) -> str | None:
        """Where a file of the wheel lands below site-packages; None for what goes elsewhere (scripts, headers)."""
        parts = PurePosixPath(file).parts
        if parts[0].endswith(".data"):
            return str(PurePosixPath(*parts[2:])) if parts[1:2] in (("purelib",), ("platlib",)) else None
        return file

    def read(self, file: str) -> str:
        """Text of a file in it."""
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(file).decode("utf-8")

    def sources(self) -> Iterator[tuple[str, str]]:
        """Yield (installed path, text) of every Python file."""
        with zipfile.ZipFile(self.path) as archive:
            for file in self.files:
                place = self.installed_path(file)
                if place is not None and place.endswith(".py"):
                    yield place, archive.read(file).decode("utf-8", errors="replace")

    def top_level(self) -> tuple[str, ...]:
        """Names that it puts into site-packages, without its metadata."""
        places = [place for file in self.files if (place := self.installed_path(file)) is not None]
        names = {PurePosixPath(place).parts[0] for place in places}
        return tuple(sorted(name for name in names if name != self.info))

    def damage(self) -> list[str]:
        """What of its contents does not agree with its RECORD, one line each."""
        found = []
        with zipfile.ZipFile(self.path) as archive:
            rows = {row[0]: row[1] for row in csv.reader(io.StringIO(archive.read(f"{self.info}/RECORD").decode())) if row}
            for file in self.files:
                if file.startswith(f"{self.info}/RECORD"):
                    continue
                method, _, digest = rows.get(file, "").partition("=")
                if not digest:
                    found.append(f"{file} is not in RECORD with a digest")
                    continue
                actual = hashlib.new(method, archive.read(file)).digest()
                if base64.urlsafe_b64encode(actual).rstrip(b"=").decode() != digest:
                    found.append(f"{file} is not what RECORD says")
            found += [f"{file} is in RECORD alone" for file in rows if file not in self.files]
        return found

    def unpack(self, folder: Path) -> None:
        """Lay it out in a folder as an installer does in site-packages; what goes elsewhere is left out."""
        with zipfile.ZipFile(self.path) as archive:
            for file in self.files:
                place = self.installed_path(file)
                if place is not None:
                    target = folder / place
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(file))


def read_wheel(path: Path) -> Wheel:
    """Open a wheel.

    Raises:
        PluginError: it is no wheel, or one that an installer would refuse.
    """
    if not path.is_file():
        hint = f"build one with: pip wheel --no-deps --wheel-dir dist {path}" if path.is_dir() else "give the path of a .whl file"
        raise PluginError(f"plugin check: {path} is not a file\nFix: {hint}.")
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            files = tuple(one.filename for one in archive.infolist() if not one.is_dir())
            _refuse_escapes(path, files)
            infos = sorted({file.partition("/")[0] for file in files if file.partition("/")[0].endswith(".dist-info")})
            if len(infos) != 1:
                raise PluginError(f"plugin check: {path.name} has {len(infos)} .dist-info folders, expected one")
            missing = [one for one in ("METADATA", "WHEEL", "RECORD") if f"{infos[0]}/{one}" not in files]
            if missing:
                raise PluginError(f"plugin check: {path.name} lacks {infos[0]}/{missing[0]}")
            metadata = email.message_from_string(archive.read(f"{infos[0]}/METADATA").decode("utf-8"))
    except (InvalidWheelFilename, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise PluginError(f"plugin check: {path.name} is no wheel: {error}\nFix: build one with pip wheel.") from error
    return Wheel(path, canonicalize_name(name), str(version), tags, infos[0], metadata, files)


def _refuse_escapes(path: Path, files: tuple[str, ...]) -> None:
    for file in files:
        parts = PurePosixPath(file).parts
        if file.startswith("/") or ".." in parts or "\\" in file or not parts:
            raise PluginError(f"plugin check: {path.name} would write outside of its folder: {file!r}")
