"""Three ways to the gradient of one group, each with the memory it takes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.one_graph import whole_sequences
from experiments.random_group import Problem
from lstraw_jax.capture import TapeConfig, capture_chunk, capture_with_tape
from lstraw_jax.gradient_sums import zero_gradients
from lstraw_jax.prompt_gradient import add_prompt_gradient, pull_back_chunk
from lstraw_jax.replay import replay
from lstraw_jax.state_cotangent import zero_cotangent


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
      peak_bytes=lambda: _bytes(lower().compile()),
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

  def sums(prompt):
    cotangent = zero_cotangent(policy, prompt) if exact else None
    return zero_gradients(policy), cotangent

  def run():
    prompt, tape = captured()
    replayed = replay(
        policy, prompt, problem.branches, *sums(prompt), config=config
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
    prompt, tape = captured()
    tokens = jnp.zeros((1, problem.chunk_tokens), jnp.int32)
    chunk = tokens, jnp.int32(0)
    lowered = [
        capture_chunk.lower(policy, prompt, *chunk, prompt.length),
        replay.lower(
            policy, prompt, problem.branches, *sums(prompt), config=config
        ),
    ]
    if exact:
      lowered.append(
          pull_back_chunk.lower(
              policy,
              prompt,
              prompt.recurrent,
              *chunk,
              None,
              *sums(prompt),
              jnp.zeros(()),
              head_chunk_tokens=0,
          )
      )
    kept = tape.nbytes if exact else 0
    return kept + max(_bytes(program.compile()) for program in lowered)

  return Way(run, peak_bytes)


WAYS: Mapping[str, Callable[[Problem], Way]] = {
    "graph": one_graph,
    "dropped": partial(ours, exact=False),
    "exact": partial(ours, exact=True),
}


def _bytes(compiled: jax.stages.Compiled) -> int:
  """Bytes of a program's inputs, outputs and temporaries at its peak."""
  memory = compiled.memory_analysis()
  assert memory is not None, "every backend that JAX supports has one"
  return (
      memory.argument_size_in_bytes
      + memory.temp_size_in_bytes
      + memory.output_size_in_bytes
      - memory.alias_size_in_bytes
  )
