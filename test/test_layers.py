"""Who may import whom, and how large a piece of source may grow: read off the syntax trees.

Every rule is also fed a small package that breaks it, so that a rule which went blind fails here.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import ratio_kl

PACKAGE = Path(ratio_kl.__file__).parent

# layer -> layers it may import. A layer is a module or package directly below ratio_kl; "" is
# ratio_kl/__init__.py.
MAY_IMPORT = {
    "field_docs": set(),
    "host_copy": set(),
    "config": {"field_docs"},
    "checks": {"host_copy"},
    "distributed": {"distributed"},
    "kernels": {"kernels"},
    "ops": {"ops", "kernels", "distributed", "checks", "config", "field_docs", "host_copy"},
    "objective": {"objective", "ops", "distributed", "checks", "config", "field_docs"},
    "module": {"objective", "ops", "checks", "config"},
    "compat": {"compat", "module", "objective", "ops", "distributed", "checks", "config", ""},
    "reference": {"config"},
    "": {"module", "objective", "ops", "config"},
}
PUBLIC_NAMES_ONLY = ("compat.transformers", "compat.heads", "compat.trl")  # as these start
OBJECTIVE_OVER_OPS = {"objective.loss", "objective.ratio_kl", "objective.stash"}
BACKENDS = ("torch", "triton")  # ops/torch/ and ops/triton/
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

MAX_FILE, MAX_FUNCTION, MAX_KERNEL, MAX_LINE, MAX_POSITIONAL = 300, 60, 90, 100, 5
# The long-hand oracle is one file with one long function, so that it reads beside the formulas.
LONG_FILES = {"reference"}
LONG_FUNCTIONS = {"reference.reference_loss"}


class Import(NamedTuple):
    target: str
    lazy: bool
    line: int


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Dotted name below ratio_kl ("" for the package itself) and file of each module."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(name: str, path: Path, known: set[str]) -> Iterator[Import]:
    """Every import of a module, as absolute names; lazy if it runs only in a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    in_function = {id(inner) for function in functions for inner in ast.walk(function)}
    here = ["ratio_kl", *filter(None, name.split("."))]
    package = here if path.stem == "__init__" else here[:-1]
    for node in ast.walk(tree):
        lazy = id(node) in in_function
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, lazy, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield Import(submodule if submodule in known else source, lazy, node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            yield Import(_dynamic_target(node, package), lazy, node.lineno)


def _dynamic_target(call: ast.Call, package: list[str]) -> str:
    """The module named by a literal or by the literal start of an f-string, else "?"."""
    argument = call.args[0] if call.args else None
    if isinstance(argument, ast.JoinedStr):
        argument = argument.values[0]
    if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
        return "?"
    relative = argument.value.lstrip(".")
    level = len(argument.value) - len(relative)
    return ".".join([*package[: len(package) - level + 1], relative]) if level else relative


def backend_of(name: str) -> str | None:
    """The backend to which a module of ops belongs, None for what they share."""
    layer, _, below = name.partition(".")
    folder = below.split(".")[0]
    return folder if layer == "ops" and folder in BACKENDS else None


def fault(name: str, found: Import) -> str | None:
    """What is wrong with this import, or None."""
    layer = name.split(".")[0]
    top, _, ours = found.target.partition(".")
    if top != "ratio_kl":
        return _foreign_fault(name, layer, top)
    target = ours.split(".")[0]
    if target not in MAY_IMPORT[layer]:
        return f"{layer or 'ratio_kl/__init__'} may not import {found.target}"
    if name.startswith(PUBLIC_NAMES_ONLY) and target not in ("compat", ""):
        return f"{name} may import ratio_kl's public names only; it imports {found.target}"
    if layer == "objective" and target == "ops" and name not in OBJECTIVE_OVER_OPS:
        return f"only loss, ratio_kl and stash may import ops; it imports {found.target}"
    mine, its = backend_of(name), backend_of(ours)
    if mine and its and mine != its:
        return f"backends may not import each other; it imports {found.target}"
    if target == "kernels" and layer != "kernels" and mine != "triton":
        return f"only the Triton backend may import {found.target}"
    if its and not mine and not found.lazy:
        return f"{found.target} must be imported in a function, at first use"
    return None


def _foreign_fault(name: str, layer: str, top: str) -> str | None:
    if top in sys.stdlib_module_names:
        return None
    if top == "torch" and layer not in ("config", ""):
        return None
    if top == "triton" and (layer == "kernels" or backend_of(name) == "triton"):
        return None
    if layer == "compat" and top.isidentifier() and top != "triton":
        return None
    return f"may not import {top}"


def import_faults(package: Path) -> list[str]:
    """Every broken import rule of a package laid out as ratio_kl."""
    found = dict(modules(package))
    known = {".".join(filter(None, ["ratio_kl", name])) for name in found}
    faults = []
    for name, path in found.items():
        where = path.relative_to(package)
        if name.split(".")[0] not in MAY_IMPORT:
            faults.append(f"{where}: no layer of this name")
            continue
        if VAGUE_NAMES & set(name.split(".")):
            faults.append(f"{where}: a name that says nothing")
        for item in imports(name, path, known):
            problem = fault(name, item)
            if problem:
                faults.append(f"{where}:{item.line}: {problem}")
    return list(dict.fromkeys(faults))


def map_faults(package: Path) -> list[str]:
    """Folders whose docstring does not name just the files and folders that lie there."""
    faults = []
    for init in sorted(package.glob("*/**/__init__.py")):
        there = {path.name for path in init.parent.glob("*.py")} - {init.name}
        there |= {f"{path.parent.name}/" for path in init.parent.glob("*/__init__.py")}
        docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        named = set(re.findall(r"\b\w+(?:\.py\b|/(?!\w))", docstring))
        if named != there:
            where, odd = init.relative_to(package), ", ".join(sorted(named ^ there))
            faults.append(f"{where}: its docstring and the folder differ in {odd}")
    return faults


def functions(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function below a node with its qualified name."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{scope}.{child.name}" if named else scope
        if isinstance(child, ast.FunctionDef):
            yield inner, child
        yield from functions(child, inner)


def size_faults(package: Path) -> list[str]:
    """Every file, function, line or signature that is larger than the guide allows."""
    faults = []
    for name, path in modules(package):
        where = path.relative_to(package)
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        if len(lines) > MAX_FILE and name not in LONG_FILES:
            faults.append(f"{where}: {len(lines)} lines")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE:
                faults.append(f"{where}:{number}: {len(line)} columns")
        for full_name, function in functions(ast.parse(source), name):
            for problem in _function_faults(full_name, function):
                faults.append(f"{where}:{function.lineno}: {problem}")
    return faults


def _function_faults(full_name: str, function: ast.FunctionDef) -> Iterator[str]:
    decorators = " ".join(ast.unparse(d) for d in function.decorator_list)
    kernel = "triton.jit" in decorators
    length = _lines_without_docstring(function)
    if length > (MAX_KERNEL if kernel else MAX_FUNCTION) and full_name not in LONG_FUNCTIONS:
        yield f"{function.name} has {length} lines without its docstring"
    if kernel or any(mark in decorators for mark in ("custom_op", "operator", "register_fake")):
        return  # flat signatures by nature
    if full_name.startswith("compat."):
        return  # another package's signature
    count = _counted_positional(function)
    if count > MAX_POSITIONAL:
        yield f"{function.name} takes {count} positional parameters"


def _lines_without_docstring(function: ast.FunctionDef) -> int:
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        length -= function.body[0].end_lineno - function.body[0].lineno + 1
    return length


def _counted_positional(function: ast.FunctionDef) -> int:
    """Positional parameters but self; a public function's tensors do not count."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    first = parameters[0].arg if parameters else None
    if first == "ctx":
        return 0  # autograd calls it, and by position
    if first in ("self", "cls"):
        parameters = parameters[1:]
    if not function.name.startswith("_"):
        parameters = [p for p in parameters if not _is_tensor(p)]
    return len(parameters)


def _is_tensor(parameter: ast.arg) -> bool:
    return parameter.annotation is not None and "Tensor" in ast.unparse(parameter.annotation)


def test_imports_go_downward():
    assert import_faults(PACKAGE) == []


def test_pieces_stay_small():
    assert size_faults(PACKAGE) == []


def test_each_folder_says_what_lies_in_it():
    assert map_faults(PACKAGE) == []


@pytest.mark.parametrize(
    ("docstring", "complaint"), [("kl.py", "loss.py"), ("kl.py, loss.py, old.py", "old.py")]
)
def test_a_map_that_is_wrong_is_found(tmp_path, docstring, complaint):
    files = {"objective/__init__.py": f'"""{docstring}"""\n', "objective/kl.py": ""}
    (found,) = map_faults(plant(tmp_path, files | {"objective/loss.py": ""}))
    assert found.endswith(complaint)


def test_exceptions_still_exist():
    oracle = PACKAGE / "reference.py"
    names = {name for name, _ in functions(ast.parse(oracle.read_text("utf-8")), "reference")}
    assert names >= LONG_FUNCTIONS
    assert {name for name, _ in modules(PACKAGE)} >= LONG_FILES


# One sound package: each case below adds one file to it and names the complaint expected.
SOUND = {
    "__init__.py": "from .module import Loss\n",
    "config.py": "import math\n",
    "module.py": "from .config import C\nfrom .objective.loss import f\n",
    "objective/loss.py": "import torch\nfrom ..ops.contract import Head\nfrom . import kl\n",
    "objective/kl.py": "from ..distributed import sum_over\n",
    "ops/contract.py": "from torch import Tensor\n",
    "ops/torch/linear.py": "from ..contract import Head\n",
    "ops/triton/__init__.py": "",
    "ops/triton/linear.py": "import triton\nfrom ratio_kl.kernels.score import score\n",
    "ops/operators.py": "def pick():\n    from .triton.linear import run\n",
    "kernels/score.py": "import triton.language as tl\n",
    "distributed/__init__.py": "import torch.distributed as dist\n",
    "compat/trl.py": "import trl\nfrom .. import Loss\nfrom . import heads\n",
    "compat/heads.py": "import torch\nfrom ratio_kl import Loss\n",
    "reference.py": "import torch\nfrom ratio_kl.config import C\n",
}
BROKEN_IMPORTS = [
    ("config.py", "import torch\n", "may not import torch"),
    ("config.py", "from .ops import contract\n", "config may not import ratio_kl.ops.contract"),
    ("__init__.py", "from .reference import loss\n", "may not import ratio_kl.reference"),
    ("__init__.py", "from .compat import trl\n", "may not import ratio_kl.compat.trl"),
    ("objective/kl.py", "from ..ops.contract import Head\n", "only loss, ratio_kl and stash"),
    ("objective/kl.py", "from ..module import Loss\n", "objective may not import"),
    ("objective/kl.py", "import triton\n", "may not import triton"),
    ("objective/kl.py", "def f():\n    import numpy\n", "may not import numpy"),
    ("ops/contract.py", "from ..objective import kl\n", "ops may not import ratio_kl.objective.kl"),
    ("ops/contract.py", "from ..kernels import score\n", "only the Triton backend"),
    ("ops/contract.py", "import ratio_kl\n", "ops may not import ratio_kl"),
    ("ops/operators.py", "from .triton.linear import run\n", "in a function, at first use"),
    ("ops/operators.py", "from . import triton\n", "in a function, at first use"),
    ("ops/operators.py", "import_module('.triton.linear', __package__)\n", "at first use"),
    ("ops/operators.py", "import_module(f'.triton.{op}', __package__)\n", "at first use"),
    ("ops/operators.py", "import importlib\nimportlib.import_module(name)\n", "may not import ?"),
    ("objective/kl.py", "import_module(f'..{name}', __package__)\n", "may not import ratio_kl."),
    ("ops/torch/linear.py", "def f():\n    from ..triton import linear\n", "each other"),
    ("ops/triton/linear.py", "from ..torch.tiles import g\n", "each other"),
    ("kernels/score.py", "from ..ops.contract import Head\n", "kernels may not import"),
    ("distributed/__init__.py", "from ..config import C\n", "distributed may not import"),
    ("module.py", "from .reference import loss\n", "module may not import ratio_kl.reference"),
    ("reference.py", "from .objective import kl\n", "reference may not import"),
    ("compat/trl.py", "from ratio_kl.reference import loss\n", "compat may not import"),
    ("compat/trl.py", "from ..ops.linear_logprob import f\n", "public names only"),
    ("compat/trl.py", "from ..module import Loss\n", "public names only"),
    ("ops/utils.py", "", "a name that says nothing"),
    ("extras/__init__.py", "", "no layer of this name"),
]
BODY = "    x = 1\n"
BROKEN_SIZES = [
    ("config.py", "x = 1\n" * 301, "301 lines"),
    ("config.py", f"x = '{'a' * 100}'\n", "106 columns"),
    ("config.py", "def f():\n" + BODY * 60, "61 lines without"),
    ("config.py", "def f():\n    '''Doc.'''\n" + BODY * 60, "61 lines without"),
    ("kernels/score.py", "@triton.jit\ndef f():\n" + BODY * 90, "91 lines without"),
    ("config.py", "def f(a, b, c, d, e, f): ...\n", "6 positional"),
    ("config.py", f"def _f({', '.join(f'{x}: Tensor' for x in 'abcdef')}): ...\n", "6 positional"),
    ("module.py", "class A:\n    def f(self, a, b, c, d, e, f): ...\n", "6 positional"),
    ("compat/trl.py", "def f():\n" + BODY * 60, "61 lines without"),
]
WITHIN_SIZES = [
    "x = 1\n" * 300,
    "def f():\n    '''Doc.\n" + "\n" * 60 + "    '''\n" + BODY * 59,
    "@triton.jit\ndef f(a, b, c, d, e, f):\n" + BODY * 89,
    "def f(a, b, c, d, e, *, f): ...\n",
    "def f(a: Tensor, b: Tensor | None, c, d, e, f, g): ...\n",
    "class A:\n    def f(self, a, b, c, d, e): ...\n",
    "class A:\n    def forward(ctx, a, b, c, d, e, f): ...\n",
]


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


def test_a_sound_package_has_no_faults(tmp_path):
    plant(tmp_path, SOUND)
    assert import_faults(tmp_path) == []
    assert size_faults(tmp_path) == []


@pytest.mark.parametrize(("name", "source", "complaint"), BROKEN_IMPORTS)
def test_a_planted_import_is_found(tmp_path, name, source, complaint):
    (found,) = import_faults(plant(tmp_path, SOUND | {name: source}))
    assert found.startswith(name)
    assert complaint in found


@pytest.mark.parametrize(("name", "source", "complaint"), BROKEN_SIZES)
def test_a_planted_size_is_found(tmp_path, name, source, complaint):
    (found,) = size_faults(plant(tmp_path, {name: source}))
    assert found.startswith(name)
    assert complaint in found


@pytest.mark.parametrize("source", WITHIN_SIZES, ids=range(len(WITHIN_SIZES)))
def test_the_allowed_sizes_pass(tmp_path, source):
    assert size_faults(plant(tmp_path, {"config.py": source})) == []


COLD_IMPORT = """
import sys
for absent in {absent!r}:
    sys.modules[absent] = None
import ratio_kl
optional = {{"triton", "transformers", "trl", "verl", "liger_kernel"}}
loaded = {{name.split(".")[0] for name, module in sys.modules.items() if module is not None}}
assert not loaded & optional, loaded & optional
ours = [name for name in sys.modules if name.startswith(("ratio_kl.kernels", "ratio_kl.compat"))]
assert not ours, ours
import torch
{then}
"""
FIRST_CALL = """
hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4)
loss_fn = ratio_kl.FusedLinearRatioKLLoss()
ones = torch.ones(2, 3, dtype=torch.int64)
loss_fn(hidden, weight, ones, ones, torch.ones(2)).loss.backward()
assert hidden.grad.isfinite().all()
"""


@pytest.mark.parametrize("absent", [[], ["triton"]], ids=["as installed", "no triton"])
def test_cold_import_needs_no_triton_and_no_gpu(absent):
    """In a fresh process without a visible GPU; a first loss works, too, and loads no kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PACKAGE.parent)}
    script = COLD_IMPORT.format(absent=absent, then=FIRST_CALL)
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_a_cold_import_that_loads_triton_is_found():
    pytest.importorskip("triton")
    script = COLD_IMPORT.format(absent=[], then="").replace("import ratio_kl\n", "import triton\n")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode != 0
    assert "AssertionError: {'triton'}" in run.stderr
