"""Small wrong versions of a Python file, and how to put one into a module that is already imported."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""Operator to the operator that replaces it."""


@dataclass(frozen=True)
class Mutant:
    """One change at one place of a file."""

    line: int
    change: str
    """``before -> after``, the expression as text."""
    tree: ast.Module
    lines: tuple[int, int] = (0, 0)
    """First and last line of the statement around it (of a compound statement: of its head)."""
    text: str = ""
    """The source line without its indentation, by which a mutant is recognised after the code has moved."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.change}"


def mutants(source: str) -> list[Mutant]:
    """All mutants of a file, in order of their lines.

    Operators are exchanged, one is added to numbers, truth values are inverted, and ``not``, ``~`` and unary minus are
    removed. Annotations, texts, ``raise`` statements and assertions are not changed.
    """
    tree = ast.parse(source)
    outside, heads, text = _outside(tree), _heads(tree), source.splitlines()
    found = [
        replace(one, lines=heads.get(id(node), (one.line, one.line)), text=text[one.line - 1].strip())
        for place, node in enumerate(ast.walk(tree))
        if id(node) not in outside
        for number in range(_ways(node))
        for one in [_mutant(tree, place, number)]
    ]
    return sorted(found, key=lambda one: one.line)


def _heads(tree: ast.AST) -> dict[int, tuple[int, int]]:
    """Id of each node to the lines of the innermost statement around it; of a compound statement, those of its head."""
    found: dict[int, tuple[int, int]] = {}

    def walk(node: ast.AST, lines: tuple[int, int]) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
            lines = (node.lineno, max(node.lineno, last or 0))
        found[id(node)] = lines
        for child in ast.iter_child_nodes(node):
            walk(child, lines)

    walk(tree, (1, 1))
    return found


def _mutant(tree: ast.Module, place: int, number: int) -> Mutant:
    wrong = copy.deepcopy(tree)
    nodes = list(ast.walk(wrong))
    node: Any = nodes[place]
    before = ast.unparse(node)
    changed = _changed(node, number)
    if changed is not node:
        _replace(nodes, node, changed)
    return Mutant(node.lineno, f"{before}  ->  {ast.unparse(changed)}", ast.fix_missing_locations(wrong))


def _ways(node: ast.AST) -> int:
    """The number of ways in which a node can be changed."""
    if isinstance(node, ast.Compare):
        return len(node.ops)
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        return int(type(node.op) in OPERATORS)
    constant = isinstance(node, ast.Constant) and type(node.value) in (int, float, bool)
    return int(constant or isinstance(node, ast.UnaryOp))


def _changed(node: Any, number: int) -> Any:
    """Change the node in place and return it, or return another node that replaces it."""
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, ast.Constant):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        return ast.copy_location(ast.Constant(value), node)
    if isinstance(node, ast.Compare):
        node.ops[number] = OPERATORS[type(node.ops[number])]()
    else:
        node.op = OPERATORS[type(node.op)]()
    return node


def _replace(nodes: list[ast.AST], old: ast.AST, new: ast.AST) -> None:
    for parent in nodes:
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
                return
            if isinstance(value, list) and any(item is old for item in value):
                value[[item is old for item in value].index(True)] = new
                return


def _outside(tree: ast.Module) -> frozenset[int]:
    """Ids of the nodes that are not changed, because they are for readers only."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            roots.append(node)
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
            roots.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            roots += [*node.decorator_list, *([node.returns] if node.returns else [])]
        elif isinstance(node, ast.ClassDef):
            roots += node.decorator_list
    return frozenset(id(inner) for root in roots for inner in ast.walk(root))


# ---- into a living module ------------------------------------------------------------------------------------------


def put_into(module: ModuleType, mutant: Mutant) -> None:
    """Give the module's functions the mutant's code in place, so that it runs wherever they are referenced; likewise
    set the module's constants.
    """
    name, file = module.__name__, str(module.__file__)
    wrong: dict[str, Any] = {"__name__": name, "__file__": file, "__package__": name.rpartition(".")[0]}
    # `__name__` must be right: dataclasses look up their module while they are made.
    exec(compile(mutant.tree, file, "exec"), wrong)
    for key, new in wrong.items():
        old = vars(module).get(key)
        if inspect.isclass(new) and new.__module__ == name:
            for attribute, value in list(vars(new).items()):
                _exchange(vars(old).get(attribute), value)
        elif inspect.isfunction(new) and new.__module__ == name:
            _exchange(old, new)
        elif isinstance(new, int | float | tuple | str | dict) and not key.startswith("__"):
            for holder in [m for n, m in list(sys.modules.items()) if n.startswith(name.split(".")[0])]:
                if vars(holder).get(key) is old:
                    setattr(holder, key, new)


def _exchange(old: Any, new: Any) -> None:
    for before, after in zip(_functions(old), _functions(new), strict=True):
        before.__code__ = after.__code__
        before.__defaults__, before.__kwdefaults__ = after.__defaults__, after.__kwdefaults__


def _functions(value: Any) -> Iterator[Any]:
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    value = inspect.unwrap(value) if callable(value) else value
    if inspect.isfunction(value):
        yield value
