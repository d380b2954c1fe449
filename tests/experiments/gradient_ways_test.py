"""The ways to a gradient, for the architecture that no benchmark test runs."""

import numpy as np
import pytest

from experiments.gradient_ways import WAYS
from experiments.random_group import make_problem
from tests import tiny

pytestmark = pytest.mark.first_class


def test_the_exact_gradient_of_sparse_attention_is_that_of_one_graph():
  problem = make_problem(
      model="tiny-glm",
      prompt_tokens=80,
      response_tokens=8,
      group_size=2,
      chunk_tokens=32,
  )
  graph, exact = (
      tiny.copied(WAYS[way](problem).run()) for way in ("graph", "exact")
  )
  distance = tiny.largest_difference(exact, graph)
  print(f"{distance:.1e}")
  assert distance < 1e-3  # float32
  assert np.abs(graph["lm_head"]["kernel"]).max() > 1e-3
