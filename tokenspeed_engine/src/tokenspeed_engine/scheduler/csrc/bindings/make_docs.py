"""Write the docstrings of a stub as a C++ header, so that they are written once: ``make_docs.py STUB HEADER``."""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def docstrings(stub: str) -> dict[str, str]:
    """Docstrings of a module's classes and their members, by name: ``Class`` or ``Class_member``."""
    found: dict[str, str] = {}
    for item in ast.parse(stub).body:
        if not isinstance(item, ast.ClassDef):
            continue
        members = [member for member in item.body if isinstance(member, ast.FunctionDef)]
        for name, node in [(item.name, item), *((f"{item.name}_{member.name.strip('_')}", member) for member in members)]:
            text = ast.get_docstring(node)
            if text is None:
                raise SystemExit(f"make_docs: expected a docstring for {name}, got none. Fix: write one in the stub")
            found[name] = text
    return found


def main() -> None:
    """Convert the stub; leave the header alone when it would not change, so that nothing is compiled again."""
    stub, header = Path(sys.argv[1]), Path(sys.argv[2])
    lines = ["// Made from the stub by make_docs.py.", "#pragma once", "namespace tokenspeed::doc {"]
    lines += [f'inline constexpr const char* {name} = R"doc({text})doc";' for name, text in docstrings(stub.read_text()).items()]
    text = "\n".join([*lines, "}  // namespace tokenspeed::doc", ""])
    if not header.exists() or header.read_text() != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)


if __name__ == "__main__":
    main()
