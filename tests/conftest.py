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


@pytest.fixture
def x64() -> Iterator[None]:
  """Makes 64-bit types the default while the test runs."""
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module", autouse=True)
def _programs_end_with_their_file() -> Iterator[None]:
  """Frees the programs that a test file compiled.

  Each holds some tens of memory maps. Over the suite they exceed the number
  that Linux allows a process (vm.max_map_count, 65,530), and XLA then crashes
  in whatever test runs.
  """
  yield
  jax.clear_caches()
  gc.collect()
