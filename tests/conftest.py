"""Strict JAX on eight virtual CPU devices, for every test.

There is no persistent compilation cache: a program read back from it has
another HLO text than one just compiled (some tests read it), a bad entry is a
warning and so an error here, and a fresh clone starts without one anyway.

A test file that needs the `reference` extra carries `pytest.mark.reference`
and takes torch from `pytest.importorskip("torch")`: an unmarked import would
fail at collection where the extra is not installed.
"""

import importlib.metadata
import os
import sys

assert "jax" not in sys.modules, "a plugin imported jax: these come too late"
# A default, so that kernel tests can be sent to a GPU: JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A test's program runs a few times: little time goes into making it fast. A
# gradient of the tiny model compiles in 2 s instead of 14 s.
_XLA_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
]
if importlib.metadata.version("jax").startswith("0.10."):
  _XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # 0.11 has no such
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS]
)
# OpenMP (torch) and BLAS (numpy) would take all cores in each xdist worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tests make the checkpoints they read; none may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import gc
import pathlib
from collections.abc import Iterator

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "lstraw_jax",
    deadline=None,  # an example's first run includes its compilation
    derandomize=True,  # a change fails for what it does, not for its seed
    # `x64` below is the one such fixture, and examples do not disturb it.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("lstraw_jax")

_MAPS = pathlib.Path("/proc/self/maps")
_MOST_MAPS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
      "--one-case",
      action="store_true",
      help="run one case of each test, the first that is left: other versions"
      " of packages break interfaces, not one value of many",
  )


@pytest.hookimpl(trylast=True)  # once -k and -m have chosen
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
  if config.getoption("--one-case"):
    first, others = {}, []
    for item in items:
      if first.setdefault(item.nodeid.partition("[")[0], item) is not item:
        others.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = first.values()


@pytest.fixture
def x64() -> Iterator[None]:
  """Makes 64-bit types the default while the test runs."""
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_file() -> Iterator[None]:
  """Frees the programs that a test file compiled."""
  yield
  _free_programs()


@pytest.fixture(autouse=True)
def _programs_stay_few() -> Iterator[None]:
  """Frees programs within a file that compiles very many.

  Each holds some tens of memory maps. When they exceed the number that Linux
  allows a process (vm.max_map_count, 65,530), XLA crashes in whatever test
  runs.
  """
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
    _free_programs()


def _free_programs() -> None:
  jax.clear_caches()
  gc.collect()
