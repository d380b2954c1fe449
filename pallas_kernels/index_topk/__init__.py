"""The keys that an indexer scores highest, exactly, over sources and shards."""

from pallas_kernels.index_topk.api import index_topk as index_topk
from pallas_kernels.index_topk.candidates import NO_POSITION as NO_POSITION
from pallas_kernels.index_topk.candidates import Candidates as Candidates
from pallas_kernels.index_topk.choice import choose as choose
from pallas_kernels.index_topk.choice import look_up as look_up
from pallas_kernels.index_topk.xla import KEY_TILE as KEY_TILE
