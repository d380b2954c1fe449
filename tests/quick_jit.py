"""`jax.jit` for programs that run once: little time goes into making them fast.

A gradient of the tiny model compiles in 2 s instead of 14 s. Not for tests that
read the compiled program, and not inside another `jit`.
"""

from functools import partial

import jax

_OPTIONS: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later ones know no such option
  _OPTIONS["xla_cpu_use_fusion_emitters"] = False

quick_jit = partial(jax.jit, compiler_options=_OPTIONS)
