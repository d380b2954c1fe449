"""The segments that each stage runs, and the keys that they attend to.

    capture          each chunk of the prompt, forward
    score            each block of each response, forward, with the head
    replay           all blocks but a response's last, forward; and each block,
                     pulled back, with the head
    prompt_gradient  chunks whose next one has no boundary on the tape, forward;
                     and each chunk, pulled back

Pulled back is a forward, the same again layer by layer (rematerialisation), and
a backward. All responses are as long as the longest, and all of their tokens
carry loss.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lstraw_jax.capacity.workload import Workload
from lstraw_jax.roofline.widths import widths
from pallas_kernels.prefix_attention import KEY_BLOCK


class Keys(NamedTuple):
  """Keys of one layer on one shard, summed over the segments that meet them.

  A block of keys is read before it is known whether a query sees it, and scored
  if one does.
  """

  read: int
  scored: int
  sum_bytes: int  # of an element of their cotangent; 0: they are constants
  on_host: bool = False


class Segments(NamedTuple):
  """Segments of one shape, which run one after the other."""

  count: int
  tokens: int  # of each, over all shards of `context`, padding included
  pulled_back: bool
  keys: tuple[Keys, ...]  # their own, the prompt's, those of earlier blocks
  head_chunks: int = 0  # runs of the head in all of them
  head_tokens: int = 0  # of each run


def segments_of(stage: str, workload: Workload) -> list[Segments]:
  """Returns what a stage runs, as seen by the busiest shard.

  That is the first one: the end of a prompt may leave others without a token.
  """
  frames = range(workload.chunks)
  blocks = range(_blocks(workload))
  if stage == "capture":
    return [_chunks(workload, frames, pulled_back=False)]
  if stage == "score":
    return [_blocks_of_group(workload, blocks, pulled_back=False)]
  if stage == "replay":
    walked = _blocks_of_group(workload, blocks[:-1], pulled_back=False)
    return [
        walked._replace(head_chunks=0),
        _blocks_of_group(workload, blocks, pulled_back=True),
    ]
  assert stage == "prompt_gradient", stage
  every = workload.update.tape.boundary_every
  again = [frame for frame in frames[:-1] if (frame + 1) % every]
  swept = _chunks(workload, frames, pulled_back=True)
  if workload.supervised:
    swept = _with_loss(workload, swept)
  return [_chunks(workload, again, pulled_back=False), swept]


def _chunks(
    workload: Workload, frames: Sequence[int], *, pulled_back: bool
) -> Segments:
  """Chunk i attends to itself and to the i chunks before it."""
  size, shards = workload.chunk_tokens, workload.context
  share, room = size // shards, workload.capacity // shards
  last = workload.prompt_tokens - 1
  own = [_in_blocks(min(last - i * size, share), share) for i in frames]
  before = [_in_blocks(i * share, room) for i in frames]
  return Segments(
      count=len(frames),
      tokens=size,
      pulled_back=pulled_back,
      keys=(_own(workload, share, own), _prompt(workload, before)),
  )


def _with_loss(workload: Workload, swept: Segments) -> Segments:
  """Each token that is evaluated predicts the next one."""
  size = workload.chunk_tokens
  head = min(workload.update.replay.head_chunk_tokens, size)
  whole, rest = divmod(workload.prompt_tokens - 1, size)
  chunks = whole * -(-size // head) + -(-rest // head)
  return swept._replace(head_chunks=chunks, head_tokens=head)


def _blocks_of_group(
    workload: Workload, blocks: Sequence[int], *, pulled_back: bool
) -> Segments:
  """Block j attends to itself, to the prompt, and to the j blocks before it."""
  group, size = workload.group_size, workload.block_tokens
  share = size // workload.context
  room = _blocks(workload) * share
  # Those of padding alone see nothing.
  real = [min(workload.response_tokens - j * size, size) for j in blocks]
  seeing = [j for j, tokens in zip(blocks, real, strict=True) if tokens > 0]
  own = [_in_blocks(min(real[j], share), share) for j in seeing]
  prompt = _in_blocks(_filled(workload), workload.capacity // workload.context)
  head = min(workload.update.replay.head_chunk_tokens, size)
  idle = [0] * (len(blocks) - len(seeing))
  return Segments(
      count=group * len(blocks),
      tokens=size,
      pulled_back=pulled_back,
      keys=(
          _own(workload, share, group * (own + idle)),
          _prompt(workload, group * ([prompt] * len(seeing) + idle)),
          Keys(
              read=group * len(blocks) * _in_blocks(room, room),
              scored=group * sum(_in_blocks(j * share, room) for j in seeing),
              sum_bytes=widths(workload.model).wide,
          ),
      ),
      head_chunks=group * sum(-(-real[j] // head) for j in seeing),
      head_tokens=head,
  )


def _own(workload: Workload, share: int, scored: Sequence[int]) -> Keys:
  return Keys(
      read=len(scored) * _in_blocks(share, share),
      scored=sum(scored),
      sum_bytes=widths(workload.model).narrow,
  )


def _prompt(workload: Workload, scored: Sequence[int]) -> Keys:
  """Those of all slots are read, filled or not."""
  room = workload.capacity // workload.context
  return Keys(
      read=len(scored) * _in_blocks(room, room),
      scored=sum(scored),
      sum_bytes=cotangent_bytes(workload) if workload.exact else 0,
      on_host=not workload.slots_on_device,
  )


def cotangent_bytes(workload: Workload) -> int:
  """Returns the bytes of an element of the sums over the prompt's slots."""
  narrow = workload.update.cotangent_dtype == "bfloat16"
  return 2 if narrow else widths(workload.model).wide


def _in_blocks(filled: int, room: int) -> int:
  """Returns the keys of the blocks that hold the first `filled` of `room`."""
  block = min(KEY_BLOCK, room)
  return -(-filled // block) * block


def _filled(workload: Workload) -> int:
  """Returns the slots of the first shard that the prompt fills."""
  share = workload.chunk_tokens // workload.context
  whole, rest = divmod(workload.prompt_tokens - 1, workload.chunk_tokens)
  return whole * share + min(rest, share)


def _blocks(workload: Workload) -> int:
  return -(-workload.response_slots // workload.block_tokens)
