"""The stub against the extension: the same classes, members, parameters, defaults and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import tokenspeed_engine.scheduler as package
from tokenspeed_engine.scheduler import _scheduler as extension

STUB = Path(package.__file__).parent / "_scheduler.pyi"
CLASSES = {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)}
INHERITED = {"__doc__", "__module__", "__repr__", "__new__", "__bool__"}


def functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def parameters(signature: str) -> list[tuple[str, str]]:
    """(name, default) of each parameter of ``def f(...)``; annotations of the extension are not Python, so they are cut away."""
    inner = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    flat = re.sub(r"ndarray\[[^\]]*\]", "array", inner)
    found = []
    for part in flat.split(", "):
        name, _, default = part.partition(" = ")
        found.append((name.split(":")[0], default))
    return found


def test_same_classes() -> None:
    public = {name for name, value in vars(extension).items() if isinstance(value, type)}
    assert public == set(CLASSES) == set(package.__all__)


def test_same_members() -> None:
    for name, node in CLASSES.items():
        kind = getattr(extension, name)
        enum_members = {t.id for item in node.body if isinstance(item, ast.Assign) for t in item.targets if isinstance(t, ast.Name)}
        if enum_members:
            values = {item.targets[0].id: item.value.value for item in node.body if isinstance(item, ast.Assign)}  # type: ignore
            assert {member.name: member.value for member in kind} == values
            continue
        ours = set(functions(node))
        theirs = {key for key in vars(kind) if not key.startswith("_")}
        assert ours - {"__init__"} == theirs, name
        for member, function in functions(node).items():
            is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list)
            assert isinstance(vars(kind)[member], property) == is_property, f"{name}.{member}"


def nanobind_signature(function: Any) -> tuple[str, str, tuple[Any, ...]]:
    (overload,) = function.__nb_signature__
    return overload


def test_same_parameters() -> None:
    checked = 0
    for name, node in CLASSES.items():
        for member, function in functions(node).items():
            bound = vars(getattr(extension, name)).get(member)
            if isinstance(bound, property) or bound is None:
                continue
            signature, _, defaults = nanobind_signature(bound)
            theirs = [
                (key, repr(defaults[int(default[1:])]) if default.startswith("\\") else default)
                for key, default in parameters(signature)
            ]
            ours = parameters(f"def f({arguments(function)}) -> None")
            assert ours == theirs, f"{name}.{member}"
            checked += 1
    assert checked >= 10


def arguments(function: ast.FunctionDef) -> str:
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    parts = [a.arg + (f" = {ast.unparse(d)}" if d is not None else "") for a, d in zip(args.args, defaults, strict=True)]
    if args.kwonlyargs:
        parts.append("*")
        parts += [
            a.arg + (f" = {ast.unparse(d)}" if d is not None else "")
            for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        ]
    return ", ".join(parts)


def test_same_docstrings() -> None:
    for name, node in CLASSES.items():
        kind = getattr(extension, name)
        assert inspect.cleandoc(kind.__doc__) == ast.get_docstring(node), name
        for member, function in functions(node).items():
            bound = vars(kind)[member]
            text = bound.__doc__ if isinstance(bound, property) else nanobind_signature(bound)[1]
            assert inspect.cleandoc(text) == ast.get_docstring(function), f"{name}.{member}"
