"""Rules about the sources that no linter knows.

1. Imports point left: pallas_kernels <- modeling <- lstraw_jax <- experiments.
2. Only one file, compat.py, touches `jax._src`.
3. No triangular solve: it deadlocks on the CPU of jaxlib 0.10.2.
4. No path that exists on one machine only.
5. An experiment is read in one sitting: at most 150 lines.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LAYERS = ("pallas_kernels", "modeling", "lstraw_jax", "experiments")
MAX_EXPERIMENT_LINES = 150
SOLVES = {"triangular_solve", "solve_triangular"}
# Written so that this file does not match itself.
LOCAL_PATH = re.compile(r"\.\./shared|(?<!\w)[/]work/")


def imports(source: str, package: str = "") -> Iterator[str]:
  """Yields in full what `source`, a module of `package`, imports."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      parents = package.split(".")
      base = parents[: len(parents) - node.level + 1] if node.level else []
      prefix = ".".join(base + ([node.module] if node.module else []))
      yield from (f"{prefix}.{alias.name}" for alias in node.names)


def names(source: str) -> Iterator[str]:
  """Yields every dotted name that `source` imports or mentions in its code."""
  yield from imports(source)
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Name | ast.Attribute):
      yield ast.unparse(node)


def upward_imports(source: str, package: str) -> list[str]:
  """Returns the imports from layers to the right of that of `package`."""
  layer = package.partition(".")[0]
  above = {*LAYERS[LAYERS.index(layer) + 1 :], "tests"}
  return [x for x in imports(source, package) if x.partition(".")[0] in above]


def uses_private_jax(source: str) -> bool:
  return any(f"{name}.".startswith("jax._src.") for name in names(source))


def uses_triangular_solve(source: str) -> bool:
  return any(SOLVES & set(name.split(".")) for name in names(source))


def local_paths(text: str) -> list[str]:
  return LOCAL_PATH.findall(text)


def is_too_long(source: str) -> bool:
  return len(source.splitlines()) > MAX_EXPERIMENT_LINES


def modules(*folders: str) -> list[pathlib.Path]:
  return [
      path.relative_to(ROOT)
      for folder in folders
      for path in sorted((ROOT / folder).rglob("*.py"))
  ]


def test_every_layer_is_found():
  assert {path.parts[0] for path in modules(*LAYERS)} == set(LAYERS)


@pytest.mark.parametrize("path", modules(*LAYERS), ids=str)
def test_imports_point_one_way(path):
  package = ".".join(path.parent.parts)
  assert not upward_imports((ROOT / path).read_text(), package)


def test_only_one_file_touches_private_jax():
  private = [
      path
      for path in modules(*LAYERS, "tests")
      if uses_private_jax((ROOT / path).read_text())
  ]
  assert len(private) <= 1
  assert all(path.name == "compat.py" for path in private), private


@pytest.mark.parametrize("path", modules(*LAYERS), ids=str)
def test_no_triangular_solve(path):
  assert not uses_triangular_solve((ROOT / path).read_text())


def test_no_path_of_one_machine():
  paths = [
      *modules(*LAYERS, "tests"),
      *(path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"}),
      "Makefile",
      ".ci/run",
  ]
  found = {str(path): local_paths((ROOT / path).read_text()) for path in paths}
  assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize("path", modules("experiments"), ids=str)
def test_experiments_are_short(path):
  assert not is_too_long((ROOT / path).read_text())


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import modeling.norm", "pallas_kernels.index_topk"),
        ("from lstraw_jax import replay", "modeling"),
        ("def f():\n  from experiments.configs import tiny", "lstraw_jax"),
        ("import jax, tests.conftest", "experiments"),
    ],
)
def test_upward_imports_are_seen(source, package):
  assert upward_imports(source, package)


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("from lstraw_jax import replay", "experiments"),
        ("from . import capture", "lstraw_jax"),
        ("from .. import shapes", "pallas_kernels.index_topk"),
        ("import modeling_tools", "pallas_kernels"),
    ],
)
def test_imports_inside_and_below_are_allowed(source, package):
  assert not upward_imports(source, package)


def test_relative_imports_are_resolved():
  source = "from ..shapes import typed\nfrom . import api"
  assert list(imports(source, "pallas_kernels.index_topk")) == [
      "pallas_kernels.shapes.typed",
      "pallas_kernels.index_topk.api",
  ]


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax import _src",
        "from jax._src import core as c",
        "import jax\njax._src.core.foo()",
    ],
)
def test_private_jax_is_seen(source):
  assert uses_private_jax(source)
  assert not uses_private_jax("import jax\njax.lax.psum  # not jax._src")


@pytest.mark.parametrize(
    "source",
    [
        "from jax.scipy.linalg import solve_triangular as solve",
        "jax.lax.linalg.triangular_solve(a, b)",
    ],
)
def test_triangular_solve_is_seen(source):
  assert uses_triangular_solve(source)
  assert not uses_triangular_solve("'''why not triangular_solve'''")


def test_local_paths_are_seen():
  assert local_paths("see .." + "/shared/DESIGN.md")
  assert local_paths("open('" + "/work" + "/runs')")
  assert not local_paths("--workdir=runs/work/demo ./shared")


def test_a_long_experiment_is_seen():
  assert is_too_long("x = 1\n" * (MAX_EXPERIMENT_LINES + 1))
  assert not is_too_long("x = 1\n" * MAX_EXPERIMENT_LINES)
