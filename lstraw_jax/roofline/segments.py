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


class Keys(NamedTuple):
  """Slots of one layer that segments meet, striped over `context` by frames."""

  seen: tuple[int, ...]  # by the last query of each segment, over all shards
  frame: int  # slots of a frame, over all shards
  shards: int
  room: int  # slots of a shard, filled or not
  sum_bytes: int  # of an element of their cotangent; 0: they are constants
  on_host: bool = False

  @property
  def filled(self) -> tuple[int, ...]:
    """Those of `seen` on the first shard."""
    share = self.frame // self.shards
    frames = (divmod(seen, self.frame) for seen in self.seen)
    return tuple(whole * share + min(rest, share) for whole, rest in frames)

  def in_blocks(self, count: int, size: int) -> int:
    """Returns the slots of the blocks that hold the first `count` of a shard.

    Args:
      count: of a shard's slots.
      size: of a block, unless a shard has less room.
    """
    block = min(size, self.room)
    return -(-count // block) * block


class Segments(NamedTuple):
  """Segments of one shape, which run one after the other."""

  count: int
  tokens: int  # of each, over all shards of `context`, padding included
  pulled_back: bool
  keys: tuple[Keys, ...]  # their own, the prompt's, those of earlier blocks
  head_chunks: int = 0  # runs of the head in all of them
  head_tokens: int = 0  # of each run


def segments_of(stage: str, workload: Workload) -> list[Segments]:
  """Returns what a stage runs.

  The first shard is the busiest: the end of a prompt may leave others without a
  token.
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
  size, last = workload.chunk_tokens, workload.prompt_tokens - 1
  own = [min(last - i * size, size) for i in frames]
  return Segments(
      count=len(frames),
      tokens=size,
      pulled_back=pulled_back,
      keys=(
          _own(workload, size, own),
          _prompt(workload, [i * size for i in frames]),
      ),
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
  real = [
      max(min(workload.response_tokens - j * size, size), 0) for j in blocks
  ]
  # Those of padding alone see nothing.
  earlier = [j * size * (tokens > 0) for j, tokens in enumerate(real)]
  prompt = [(workload.prompt_tokens - 1) * (tokens > 0) for tokens in real]
  head = min(workload.update.replay.head_chunk_tokens, size)
  return Segments(
      count=group * len(blocks),
      tokens=size,
      pulled_back=pulled_back,
      keys=(
          _own(workload, size, group * real),
          _prompt(workload, group * prompt),
          Keys(
              seen=tuple(group * earlier),
              frame=size,
              shards=workload.context,
              room=_blocks(workload) * size // workload.context,
              sum_bytes=widths(workload.model).wide,
          ),
      ),
      head_chunks=group * sum(-(-tokens // head) for tokens in real),
      head_tokens=head,
  )


def _own(workload: Workload, size: int, seen: Sequence[int]) -> Keys:
  return Keys(
      seen=tuple(seen),
      frame=size,
      shards=workload.context,
      room=size // workload.context,
      sum_bytes=widths(workload.model).narrow,
  )


def _prompt(workload: Workload, seen: Sequence[int]) -> Keys:
  return Keys(
      seen=tuple(seen),
      frame=workload.chunk_tokens,
      shards=workload.context,
      room=workload.capacity // workload.context,
      sum_bytes=cotangent_bytes(workload) if workload.exact else 0,
      on_host=not workload.slots_on_device,
  )


def cotangent_bytes(workload: Workload) -> int:
  """Returns the bytes of an element of the sums over the prompt's slots."""
  narrow = workload.update.cotangent_dtype == "bfloat16"
  return 2 if narrow else widths(workload.model).wide


def _blocks(workload: Workload) -> int:
  return -(-workload.response_slots // workload.block_tokens)
