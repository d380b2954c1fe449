"""The prompts of each step: from a file of rollouts, or of the text task."""

from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import numpy as np

from experiments import pydoc_text
from experiments.fit_check import Extent
from experiments.settings import Settings
from experiments.tokenizer import load_tokenizer
from experiments.turns import turns
from lstraw_jax.record_reader import ChoiceLimits
from lstraw_jax.rollout_reader import read_rollout_groups
from lstraw_jax.train_step import Request
from modeling.glm_moe_dsa_config import GlmMoeDsaConfig


class Requests(NamedTuple):
  """The groups of each step."""

  at: Callable[[int], list[Request]]  # data position -> one step's
  extent: Extent  # of the largest

  def __call__(self, position: int) -> list[Request]:
    return self.at(position)


def make_requests(config: Any, settings: Settings) -> Requests:
  """Returns the groups of each step, by position in the endless data.

  A request holds as many prompts as the mesh has replicas. What stands at a
  position depends on the seed alone, so that all processes have the same data.
  """
  if config.data.rollouts:
    groups = read_rollout_groups(
        config.data.rollouts,
        vocab_size=settings.model.vocab_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.data.max_response_tokens,
        choices=_choices(settings.model),
    )
    if settings.update.old_log_probs == "rollouts":
      _require_log_probs(groups, config.data.rollouts)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    extent = Extent(
        prompt_tokens=max(group.prompt_tokens.size for group in groups),
        response_tokens=max(rollout.tokens.size for rollout in rollouts),
        group_size=max(len(group.rollouts) for group in groups),
    )
    data = grain.MapDataset.source(groups).shuffle(seed=config.seed).repeat()
    make = lambda groups, _: Request(
        tuple(group.prompt_tokens for group in groups), lambda *_: groups
    )
  else:
    tokenizer = load_tokenizer(config.model.checkpoint)
    extent = Extent(
        prompt_tokens=config.data.prompt_tokens,
        response_tokens=config.sampling.max_tokens,
        group_size=config.train.group_size,
    )
    data = pydoc_text.prompts(
        tokenizer,
        prompt_tokens=config.data.prompt_tokens,
        vocab_size=settings.model.vocab_size,
        seed=config.seed,
    )
    make = lambda prompts, start: pydoc_text.request(
        [np.asarray(prompt) for prompt in prompts],
        group_ids=[f"text-{start + row}" for row in range(len(prompts))],
        tokenizer=tokenizer,
        group_size=config.train.group_size,
        sampling=settings.sampling,
    )
  at = lambda position: [
      make([data[place] for place in turn], turn.start)
      for turn in turns(config, settings.mesh, position)
  ]
  return Requests(at, extent)


def _choices(model) -> dict[str, ChoiceLimits]:
  """Returns what a record of the model's choices may hold."""
  if not isinstance(model, GlmMoeDsaConfig):
    return {}
  return dict(
      selections=ChoiceLimits(model.num_indexers, model.index_topk, None),
      experts=ChoiceLimits(
          model.mlp_layer_types.count("sparse"),
          model.num_experts_per_tok,
          model.n_routed_experts,
      ),
  )


def _require_log_probs(groups, path) -> None:
  for group in groups:
    if any(rollout.log_probs is None for rollout in group.rollouts):
      raise ValueError(
          f"{path}: group_id={group.group_id!r} has no log_probs, which"
          " train.old_log_probs='rollouts' wants. Store them when sampling, or"
          " set train.old_log_probs=policy"
      )
