"""Fails when the Python code has a shape that readers get lost in: `python .ci/shape.py`, part of `make check`.

| rule | what it forbids |
|---|---|
| lines | a function of more than 60 lines, from `def` to its last line |
| parameters | a function with more than 8 parameters, without `self` and `cls` |
| folder | a folder with more than 20 Python files, without `__init__.py` |
| circle | folders of the product that import each other, directly or through others |
| packed | arguments that are packed into a tuple or list only to be unpacked: `f(*(1, 2))` |
| format | a comment that turns the formatter off |

What an entry of `EXCUSED` names may stand, for its reason. An entry that excuses nothing any more fails, too.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

MAX_LINES = 60
MAX_PARAMETERS = 8
MAX_FILES = 20
PRODUCT = ("engine", "loadgen", "router")
"""Packages between whose folders the imports are checked."""


@dataclass(frozen=True)
class Excused:
    """What may stand although a rule forbids it."""

    rule: str
    where: str
    """Pattern of `Finding.where`, as in a shell: `*` stands for any text."""
    reason: str


EXCUSED = (
    Excused("parameters", "engine/server/choices.py::AnswerChoice.__init__", "the API's fields: still to be grouped"),
    Excused(
        "lines",
        "engine/backend/cuda/kernels/*",
        "a kernel: Triton compiles a function as a whole, and calls inside have no cost to save",
    ),
    Excused(
        "parameters",
        "engine/backend/cuda/kernels/*",
        "a kernel: pointers, strides and sizes are its only possible arguments, Triton has no structs",
    ),
    Excused(
        "parameters",
        "tests/engine/cuda/kernels/test_attention_seam.py::Wrapper.plan",
        "stands in for a function of another library, which has these parameters",
    ),
    Excused(
        "parameters",
        "tests/engine/cuda/kernels/test_attention_seam.py::flash_attn_with_kvcache",
        "stands in for a function of another library, which has these parameters",
    ),
    Excused(
        "parameters",
        "tests/engine/tiers/test_shared_stateful.py::SharedMachine.start",
        "a rule of a state machine: hypothesis draws each parameter by its name",
    ),
    Excused(
        "parameters",
        "tests/engine/tiers/test_tiers_stateful.py::TiersMachine.start",
        "a rule of a state machine: hypothesis draws each parameter by its name",
    ),
    Excused(
        "parameters",
        "tests/loadgen/output/results.py::summary",
        "a fixture with defaults: each test names only what it is about",
    ),
    Excused(
        "parameters",
        "tests/router/kubernetes/kube.py::pod",
        "a fixture with defaults: each test names only what it is about",
    ),
)


@dataclass(frozen=True)
class Finding:
    """One place that a rule forbids."""

    rule: str
    where: str
    """`path`, `path::name` of a function, or the folders of a circle with `<->` between them."""
    line: int
    text: str

    def __str__(self) -> str:
        place = self.where.partition("::")[0]
        return f"{place}:{self.line}: {self.text}" if self.line else f"{place}: {self.text}"


def check(files: Mapping[str, str]) -> list[Finding]:
    """Return what the rules forbid in `files`, from path to text. Paths are relative to the root, with `/`."""
    trees = {path: ast.parse(text, path) for path, text in files.items()}
    found = list(_folders(files))
    for path, tree in trees.items():
        found += [*_functions(path, tree), *_packed(path, tree), *_unformatted(path, files[path])]
    return found + list(_circles(trees))


def judge(findings: Sequence[Finding], excused: Sequence[Excused]) -> list[str]:
    """Return a line for each finding that no entry excuses, and for each entry that excuses none."""
    used: set[Excused] = set()
    lines = []
    for finding in findings:
        entries = [entry for entry in excused if entry.rule == finding.rule and fnmatchcase(finding.where, entry.where)]
        used.update(entries)
        if not entries:
            lines.append(str(finding))
    unused = [entry for entry in excused if entry not in used]
    return lines + [f".ci/shape.py: nothing needs the exception {entry.rule} {entry.where}" for entry in unused]


def _folders(paths: Mapping[str, str]) -> Iterator[Finding]:
    counts: defaultdict[str, int] = defaultdict(int)
    for path in paths:
        counts[str(PurePosixPath(path).parent)] += not path.endswith("__init__.py")
    for folder, count in sorted(counts.items()):
        if count > MAX_FILES:
            yield Finding("folder", folder, 0, f"{count} files, more than {MAX_FILES}: split the folder by idea")


def _functions(path: str, tree: ast.Module) -> Iterator[Finding]:
    for name, function in _named(tree, ""):
        where = f"{path}::{name}"
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > MAX_LINES:
            yield Finding("lines", where, function.lineno, f"{name} has {lines} lines, more than {MAX_LINES}")
        count = _parameters(function)
        if count > MAX_PARAMETERS:
            text = f"{name} has {count} parameters, more than {MAX_PARAMETERS}"
            yield Finding("parameters", where, function.lineno, text)


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield all functions below the node with their names: `Class.method`, `outer.inner`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    bound = positional[:1] in (["self"], ["cls"])
    return len(positional) - bound + len(arguments.kwonlyargs)


def _packed(path: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        for argument in node.args if isinstance(node, ast.Call) else ():
            if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List):
                yield Finding("packed", path, argument.lineno, "arguments are packed and unpacked: leave out *( )")


def _unformatted(path: str, text: str) -> Iterator[Finding]:
    if "fmt:" not in text and "yapf:" not in text:
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and re.match(r"#\s*(fmt|yapf):\s*(off|skip|disable)", token.string):
            yield Finding("format", path, token.start[0], f"the formatter is turned off: {token.string}")


def _circles(trees: Mapping[str, ast.Module]) -> Iterator[Finding]:
    """Yield circles between the folders that files stand in, then between folders with all that is below them."""
    modules = {_module(path): path for path in trees if path.split("/")[0] in PRODUCT}
    imports = [
        (path, modules[target])
        for path in modules.values()
        for target in _imported(_package(path), trees[path], modules)
    ]
    found: set[str] = set()
    for edges in (_between_folders(imports), *_between_siblings(imports)):
        for circle in _components({folder: set(targets) for folder, targets in edges.items()}):
            where = " <-> ".join(sorted(circle))
            if where not in found:
                found.add(where)
                examples = (
                    f"{source} imports {target}"
                    for folder in sorted(circle)
                    for other, (source, target) in sorted(edges[folder].items())
                    if other in circle
                )
                yield Finding("circle", where, 0, f"import each other: {'; '.join(examples)}")


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _package(path: str) -> str:
    return str(PurePosixPath(path).parent).replace("/", ".")


def _imported(package: str, tree: ast.Module, modules: Mapping[str, str]) -> set[str]:
    """Return the modules of `modules` that the tree imports. `package`: the one that it stands in."""
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (above, node.module) if part)
            names = [f"{origin}.{alias.name}" for alias in node.names]
        for name in names:
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules:
                found.add(target)
    return found


Edges = Mapping[str, Mapping[str, tuple[str, str]]]
"""From folder to the folders that it imports, each with an import as an example: the file, and the file it imports."""


def _between_folders(imports: Sequence[tuple[str, str]]) -> Edges:
    edges: defaultdict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for source, target in imports:
        above, below = str(PurePosixPath(source).parent), str(PurePosixPath(target).parent)
        if above != below:
            edges[above].setdefault(below, (source, target))
    return edges


def _between_siblings(imports: Sequence[tuple[str, str]]) -> Iterator[Edges]:
    """Yield a graph for each folder: between its folders, each with all that is below it."""
    graphs: defaultdict[str, defaultdict[str, dict[str, tuple[str, str]]]] = defaultdict(lambda: defaultdict(dict))
    for source, target in imports:
        ours, theirs = source.split("/")[:-1], target.split("/")[:-1]
        common = 0
        while common < min(len(ours), len(theirs)) and ours[common] == theirs[common]:
            common += 1
        if common < min(len(ours), len(theirs)):
            above, below = "/".join(ours[: common + 1]), "/".join(theirs[: common + 1])
            graphs["/".join(ours[:common])][above].setdefault(below, (source, target))
    yield from graphs.values()


def _components(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of two or more folders that all reach each other."""
    reached = {folder: _reached(folder, edges) for folder in edges}
    groups = {
        frozenset(other for other in reach if folder in reached.get(other, ())) for folder, reach in reached.items()
    }
    return sorted((set(group) for group in groups if len(group) > 1), key=sorted)


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def main() -> int:
    """Check the files that git tracks or would track; return the exit status."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = {path: Path(path).read_text() for path in sorted(set(listed)) if Path(path).exists()}
    lines = judge(check(files), EXCUSED)
    print("".join(f"{line}\n" for line in lines), end="")
    print(f"shape: {len(files)} files, {len(EXCUSED)} exceptions, {len(lines)} errors")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
