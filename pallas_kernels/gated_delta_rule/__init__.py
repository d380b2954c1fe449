"""The gated delta rule: a linear-attention recurrence with decay."""

from pallas_kernels.gated_delta_rule.api import (
    gated_delta_rule as gated_delta_rule,
)
