"""An indexer's scores of the keys that were chosen, with a gradient."""

from pallas_kernels.index_scores.api import index_scores as index_scores
