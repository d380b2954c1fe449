"""Large numbers in few letters."""

import pytest

from lstraw_jax.hlo.quantities import change, quantity


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"),
        (12, "B", "12 B"),
        (999, "B", "999 B"),
        (1000, "B", "1 kB"),
        (143_771 << 20, "B", "150.8 GB"),
        (1.5e15, "FLOP", "1.5 PFLOP"),
        (-2048, "B", "-2.048 kB"),
        (3e22, "B", "3e+04 EB"),
        (5, "", "5"),
        (2.5e6, "", "2.5 M"),
    ],
)
def test_a_number_has_four_digits_and_a_unit(value, unit, text):
  assert quantity(value, unit) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (8, 9, "+12.5 %"),
        (8, 4, "-50 %"),
        (1, 31, "+3,000 %"),
        (7, 7, ""),
        (0, None, "new"),
        (None, 3, "new"),
        (0, 3, "new"),
        (3, 0, "gone"),
        (3, None, "gone"),
    ],
)
def test_a_change_is_relative(before, after, text):
  assert change(before, after) == text
