"""The rules of the house as pure functions over source text, so that each can be shown a snippet it must reject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "samerun"

LINES = (
    ("errors",), ("core",), ("storage",), ("plan",), ("ranks",), ("format",), ("state",), ("data",), ("checkpoint",),
    ("dcp",), ("convert",), ("step",), ("preempt",), ("health",), ("run",), ("launch",), ("drill",),
    ("demo", "report", "integrations", "lessons"), ("cli",), ("testing",),
)  # fmt: skip
"""Low to high. A folder imports only from lines before its own; folders on one line never import each other."""
_LEVEL = {folder: level for level, line in enumerate(LINES) for folder in line}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 10
MAX_MODULES = 10

_PICKLERS = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})
_OBJECT_COLLECTIVES = frozenset({
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
})  # fmt: skip
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})


def modules() -> dict[str, Path]:
    """Dotted name → file of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def folder_of(module: str) -> str | None:
    """The line of the house that a module belongs to; None for the package itself."""
    return module.split(".")[1] if "." in module else None


def imported(source: str, module: str, *, is_package: bool, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything of ours that a module imports, also late, for typing only, or by a string."""
    here = module.split(".")
    tree = ast.parse(source)
    programs = set(_programs(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "samerun")
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                up = node.level - (1 if is_package else 0)
                base = here[: len(here) - up] + base
            if base[:1] == ["samerun"]:
                for alias in node.names:
                    full = ".".join([*base, alias.name])
                    yield node.lineno, full if full in known else ".".join(base)
        elif isinstance(node, ast.Constant) and node.value in known and node not in programs:
            yield node.lineno, str(node.value)


def _programs(tree: ast.AST) -> Iterator[ast.Constant]:
    """Names behind a "-m": started as a process of their own, which is no import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List):
            for word, following in pairwise(node.elts):
                if isinstance(word, ast.Constant) and word.value == "-m" and isinstance(following, ast.Constant):
                    yield following


def import_faults(source: str, module: str, *, is_package: bool = False, known: frozenset[str]) -> list[str]:
    own = folder_of(module)
    if own is None:
        return []
    if own not in _LEVEL:
        return [f"{module}: the folder {own!r} has no line in the order of the house"]
    faults = []
    for line, name in imported(source, module, is_package=is_package, known=known):
        other = folder_of(name)
        if other is None or other == own:
            continue
        if other not in _LEVEL or _LEVEL[other] >= _LEVEL[own]:
            faults.append(f"{module}:{line}: imports {name}, which is not on a line before {own!r}")
    return faults


def pickle_faults(source: str) -> list[str]:
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            faults += [f"line {node.lineno}: imports {name}" for name in names if name.split(".")[0] in _PICKLERS]
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                taken = [alias.name for alias in node.names if alias.name in ("save", "load")]
                faults += [f"line {node.lineno}: from torch import {name}" for name in taken]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.save":
            faults.append(f"line {node.lineno}: torch.save")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load" and not _is_weights_only(node):
            faults.append(f"line {node.lineno}: torch.load without weights_only=True")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            faults.append(f"line {node.value.lineno}: allow_pickle={ast.unparse(node.value)}")
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        if name in _OBJECT_COLLECTIVES:
            faults.append(f"line {node.lineno}: {name} pickles")
    return faults


def _is_weights_only(call: ast.Call) -> bool:
    return any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)


def environment_faults(source: str) -> list[str]:
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in _ENVIRONMENT and ast.unparse(node.value) == "os":
            faults.append(f"line {node.lineno}: os.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            taken = [alias.name for alias in node.names if alias.name in _ENVIRONMENT]
            faults += [f"line {node.lineno}: from os import {name}" for name in taken]
    return faults


def size_faults(source: str, module: str) -> dict[str, int]:
    """Everything over a limit: `module`, `module:function` (lines), `module:function()` (parameters)."""
    over = {}
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        over[module] = num_lines
    for name, node in _functions(ast.parse(source), ""):
        first = node.body[1] if len(node.body) > 1 and ast.get_docstring(node) is not None else node.body[0]
        length = (node.end_lineno or 0) - first.lineno + 1
        if length > MAX_FUNCTION_LINES:
            over[f"{module}:{name}"] = length
        given = node.args
        names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")]
        if len(names) > MAX_PARAMETERS:
            over[f"{module}:{name}()"] = len(names)
    return over


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from _functions(node, f"{prefix}{node.name}." if named else prefix)


def list_faults(over: dict[str, int], allowed: dict[str, tuple[int, str]]) -> list[str]:
    """A shrink-only list: nothing new, nothing that grew, nothing that is no longer needed."""
    faults = []
    for name, size in sorted(over.items()):
        limit = allowed.get(name, (0, ""))[0]
        if size > limit:
            faults.append(f"{name}: {size}" + (f", at most {limit} is allowed" if limit else " is over the limit"))
    faults += [f"{name}: no longer over the limit; take it off the list" for name in sorted(set(allowed) - set(over))]
    return faults


def tree_of_readme(text: str) -> dict[str, str]:
    """Folder or file → its line, from the first code block under the heading 'The house'."""
    block = re.search(r"^## The house.*?^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    if block is None:
        return {}
    found = (re.match(r"(\w+/|\w+\.py)\s+(\S.*)", line) for line in block.group(1).splitlines())
    return {match.group(1): match.group(2) for match in found if match}


def tree_on_disk() -> set[str]:
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/*.py")}
    return folders | {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
