"""One update by its sizes: all that its memory, time and programs depend on."""

import dataclasses
import math

from lstraw_jax.branch import block_size
from lstraw_jax.optimizer import OptimizerConfig
from lstraw_jax.rollouts import bucket
from lstraw_jax.update_config import UpdateConfig
from modeling.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """An update on the responses to one prompt of each replica.

  Without responses (`group_size` 0) it is one of supervised training, whose
  prompts carry the loss.
  """

  model: DecoderConfig
  data: int = 1  # sizes of the mesh axes
  context: int = 1
  tensor: int = 1
  prompt_tokens: int  # P
  response_tokens: int  # R, of the longest response
  group_size: int  # G
  update: UpdateConfig
  optimizer: OptimizerConfig = dataclasses.field(
      default_factory=lambda: OptimizerConfig(learning_rate=1e-5)
  )

  def __post_init__(self):
    wanted = ["data", "context", "tensor", "prompt_tokens"]
    if not self.supervised:
      wanted += ["response_tokens", "group_size"]
    elif not self.exact:
      raise ValueError(
          "group_size=0 is supervised training, which is exact: want"
          " prompt_gradient='exact', or responses"
      )
    for name in wanted:
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)}: want at least 1")
    for name, tokens in (
        ("chunk_tokens", self.chunk_tokens),
        ("block_tokens", self.update.replay.block_tokens),
    ):
      shared = name == "chunk_tokens" or not self.supervised
      if shared and tokens % self.context:
        whole = -(-tokens // self.context) * self.context
        raise ValueError(
            f"{name}={tokens}: want a multiple of the context={self.context}"
            f" devices that share it, e.g. {whole}"
        )

  @property
  def devices(self) -> int:
    """Devices of the mesh."""
    return self.data * self.context * self.tensor

  @property
  def chunk_tokens(self) -> int:
    """Tokens that a capture evaluates at once."""
    return self.update.capture_chunk_tokens

  @property
  def chunks(self) -> int:
    """Chunks that a capture takes: the last token of a prompt is held back."""
    return math.ceil((self.prompt_tokens - 1) / self.chunk_tokens)

  @property
  def capacity(self) -> int:
    """Slots of a row of the prompt state, as `capture` makes it."""
    return bucket(max(self.prompt_tokens - 1, 1), multiple=self.chunk_tokens)

  @property
  def response_slots(self) -> int:
    """Tokens that a response is padded to, as `to_branch_batch` does."""
    return bucket(self.response_tokens, multiple=self.update.response_multiple)

  @property
  def block_tokens(self) -> int:
    """Tokens of a response that have a graph at once."""
    return block_size(
        self.response_slots,
        block_tokens=self.update.replay.block_tokens,
        shards=self.context,
    )

  @property
  def supervised(self) -> bool:
    """Whether there are no responses, and the prompt carries the loss."""
    return self.group_size == 0

  @property
  def exact(self) -> bool:
    """Whether the gradient goes through the prompt."""
    return self.update.prompt_gradient == "exact"

  @property
  def with_kl(self) -> bool:
    """Whether a reference scores the responses, behind its own state."""
    return self.update.replay.objective.kl_coef > 0

  @property
  def slots_on_device(self) -> bool:
    """Whether keys, values and their cotangents lie in device memory."""
    return self.update.memory_kind == "device"

  @property
  def states_kept(self) -> int:
    """Prompt states that outlive their turn, for each replica."""
    refresh = self.update.refresh
    return 0 if refresh.rule == "every_step" else refresh.keep_prompts

  @property
  def boundaries(self) -> int:
    """Recurrent states that the tape of an exact gradient holds."""
    return math.ceil(self.chunks / self.update.tape.boundary_every)
