"""Attention to chosen latents, which all heads share, in mergeable parts."""

from pallas_kernels.latent_attention.api import (
    latent_attention as latent_attention,
)
from pallas_kernels.latent_attention.api import (
    latent_attention_weights as latent_attention_weights,
)
