"""Attention to keys that are stored apart, in parts that merge exactly."""

from pallas_kernels.prefix_attention.api import Partial as Partial
from pallas_kernels.prefix_attention.api import merge as merge
from pallas_kernels.prefix_attention.api import merge_shards as merge_shards
from pallas_kernels.prefix_attention.api import (
    prefix_attention as prefix_attention,
)
from pallas_kernels.prefix_attention.api import (
    stored_attention as stored_attention,
)
from pallas_kernels.prefix_attention.xla import KEY_BLOCK as KEY_BLOCK
