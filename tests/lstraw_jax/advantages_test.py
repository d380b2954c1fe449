"""Group-relative advantages, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lstraw_jax.advantages import group_relative_advantages

FLOAT64_TOLERANCE = 1e-12


def test_advantages_use_the_sample_deviation():
  # Mean 2, squared deviations 1 + 0 + 1 over G - 1 = 2: deviation 1.
  advantages = group_relative_advantages(
      [1.0, 2.0, 3.0], normalize_std=True, eps=1e-15
  )
  np.testing.assert_allclose(advantages, [-1, 0, 1], rtol=FLOAT64_TOLERANCE)


def test_eps_is_added_to_the_deviation():
  advantages = group_relative_advantages(
      [1.0, 2.0, 3.0], normalize_std=True, eps=1.0
  )
  np.testing.assert_allclose(advantages, [-0.5, 0, 0.5])


def test_without_normalising_only_the_mean_is_taken_off():
  advantages = group_relative_advantages([0, 0, 1, 3], normalize_std=False)
  np.testing.assert_allclose(advantages, [-1, -1, 0, 2])


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(2, 20),
    st.booleans(),
)
def test_equal_rewards_give_exactly_zero(reward, group_size, normalize_std):
  advantages = group_relative_advantages(
      [reward] * group_size, normalize_std=normalize_std
  )
  assert not advantages.any()


@pytest.mark.parametrize(
    "rewards,dtype",
    [
        ([0, 1], np.float64),
        (np.array([0, 1], np.float32), np.float32),
        (np.array([0, 1], np.float64), np.float64),
    ],
)
def test_float32_rewards_stay_float32(rewards, dtype):
  assert group_relative_advantages(rewards, normalize_std=True).dtype == dtype


@pytest.mark.parametrize(
    "rewards,message",
    [
        ([1.0], r"rewards=\[1.0\].*G >= 2"),
        ([], "G >= 2"),
        (np.ones((2, 2)), r"shape \(2, 2\).*G >= 2"),
        ([0.0, float("nan")], r"rewards\[1\]=nan.*finite"),
        ([float("inf"), 0.0], r"rewards\[0\]=inf.*finite"),
    ],
)
def test_bad_groups_are_refused(rewards, message):
  with pytest.raises(ValueError, match=message):
    group_relative_advantages(rewards, normalize_std=True)


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_eps_is_refused(eps):
  with pytest.raises(ValueError, match="eps="):
    group_relative_advantages([0.0, 1.0], normalize_std=True, eps=eps)
