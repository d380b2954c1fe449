"""Three ways to the gradient of one group, each with the memory it takes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from experiments.one_graph import whole_sequences
from experiments.random_group import Problem
from lstraw_jax.capacity.compiled_memory import memory_of
from lstraw_jax.capacity.stage_programs import StagePrograms, stages_of
from lstraw_jax.capacity.workload import Workload
from lstraw_jax.capture import TapeConfig, capture_with_tape
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.prompt_gradient import add_prompt_gradient
from lstraw_jax.replay import replay
from lstraw_jax.state_cotangent import zero_cotangent
from lstraw_jax.update_config import UpdateConfig


class Way(NamedTuple):
  """A way to the gradient."""

  run: Callable[[], nnx.State]  # the unnormalised sum
  peak_bytes: Callable[[], int]  # of its largest program, by the compiler


def one_graph(problem: Problem) -> Way:
  """The conventional update: G whole sequences, one batch, one graph."""
  prompt = jnp.asarray(problem.prompt_tokens)
  call = partial(whole_sequences, problem.policy, prompt, problem.branches)
  lower = lambda: whole_sequences.lower(
      problem.policy, prompt, problem.branches, config=problem.config
  )
  return Way(
      run=lambda: call(config=problem.config),
      peak_bytes=lambda: memory_of(lower().compile()).total,
  )


def ours(problem: Problem, *, exact: bool) -> Way:
  """Capture and replay; and the reverse sweep, if it is to be exact."""
  policy, config = problem.policy, problem.config

  def captured():
    return capture_with_tape(
        policy,
        [problem.prompt_tokens],
        tape=TapeConfig(),
        chunk_tokens=problem.chunk_tokens,
    )

  def run():
    prompt, tape = captured()
    replayed = replay(
        policy,
        prompt,
        problem.branches,
        zero_gradients(policy),
        zero_cotangent(policy, prompt) if exact else None,
        config=config,
    )
    if not exact:
      return replayed.gradients
    gradients, _ = add_prompt_gradient(
        policy,
        prompt,
        tape,
        replayed.gradients,
        replayed.cotangent,
        policy_step=0,
    )
    return gradients

  def peak_bytes():
    group, steps = problem.branches.inputs.shape[1:]
    workload = Workload(
        model=policy.config,
        prompt_tokens=problem.prompt_tokens.size,
        response_tokens=steps,
        group_size=group,
        update=UpdateConfig(
            prompt_gradient="exact" if exact else "dropped",
            replay=config,
            capture_chunk_tokens=problem.chunk_tokens,
            response_multiple=steps,
        ),
    )
    programs = StagePrograms(workload, policy.mesh)
    stages = set(stages_of(workload)) & {"capture", "replay", "prompt_gradient"}
    largest = max(
        memory_of(programs.lower(stage).compile()).total for stage in stages
    )
    kept = captured()[1].nbytes if exact else 0
    return kept + largest

  return Way(run, peak_bytes)


WAYS: Mapping[str, Callable[[Problem], Way]] = {
    "graph": one_graph,
    "dropped": partial(ours, exact=False),
    "exact": partial(ours, exact=True),
}
