"""Host types of rollouts, and the batch made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lstraw_jax import rollouts
from lstraw_jax.rollouts import Rollout, RolloutGroup
from modeling.sharding import make_mesh

NAN, INF = float("nan"), float("inf")


def make_group(*lengths, prompt=(1, 2, 9), log_probs=True):
  """A host group with responses of given lengths and random contents."""
  rng = np.random.default_rng(0)
  return RolloutGroup(
      group_id="a",
      prompt_tokens=np.array(prompt, np.int32),
      rollouts=tuple(
          Rollout(
              tokens=rng.integers(1, 100, n).astype(np.int32),
              reward=float(rng.normal()),
              log_probs=-rng.random(n, np.float32) if log_probs else None,
              loss_mask=rng.random(n) < 0.5,
          )
          for n in lengths
      ),
  )


def batch_of(*groups, multiple=4, from_rollouts=True, mesh=None):
  """A batch of some groups; the advantages of each are 1, 2, ..."""
  return rollouts.to_branch_batch(
      groups,
      advantages=[1.0 + np.arange(len(group.rollouts)) for group in groups],
      multiple=multiple,
      old_log_probs_from_rollouts=from_rollouts,
      mesh=mesh or make_mesh(),
  )


@pytest.mark.parametrize("field", ["log_probs", "loss_mask"])
def test_a_rollout_of_unequal_lengths_is_refused(field):
  arrays = {"log_probs": np.zeros(2, np.float32), "loss_mask": np.ones(2, bool)}
  arrays[field] = arrays[field][:1]
  with pytest.raises(ValueError, match=rf"{field}.shape=\(1,\)"):
    Rollout(tokens=np.zeros(2, np.int32), reward=0.0, **arrays)


@pytest.mark.parametrize("prompt,lengths", [((), (1, 2)), ((1,), ())])
def test_a_group_without_prompt_or_rollouts_is_refused(prompt, lengths):
  with pytest.raises(ValueError, match=r"group_id='a'.*at least one"):
    make_group(*lengths, prompt=prompt)


@pytest.mark.parametrize(
    "groups", [[(3, 1, 4)], [(5, 9)], [(1, 1)], [(2, 7, 4), (9,), (1, 3)]]
)
def test_a_ragged_batch_holds_every_response_and_zeros(groups):
  hosts = [
      make_group(*lengths, prompt=(1, 2, 9 + row))
      for row, lengths in enumerate(groups)
  ]
  batch = jax.device_get(batch_of(*hosts))
  length = rollouts.bucket(max(map(max, groups)), multiple=4)
  most = max(map(len, groups))
  assert batch.inputs.shape == (len(groups), most, length)
  assert batch.ref_log_probs is None
  for b, host in enumerate(hosts):
    missing = [0] * (most - len(host.rollouts))
    counts = [rollout.tokens.size for rollout in host.rollouts]
    assert batch.valid[b].sum(1).tolist() == counts + missing
    advantages = [*range(1, len(counts) + 1), *missing]
    assert batch.advantages[b].tolist() == advantages
    for padded in jax.tree.leaves(batch):
      assert not padded[b, len(counts) :].any()
    for i, rollout in enumerate(host.rollouts):
      n = rollout.tokens.size
      tokens = rollout.tokens.tolist()
      assert batch.inputs[b, i, :n].tolist() == [9 + b, *tokens[:-1]]
      for padded, row in [
          (batch.targets, rollout.tokens),
          (batch.loss_mask, rollout.loss_mask),
          (batch.old_log_probs, rollout.log_probs),
      ]:
        np.testing.assert_array_equal(padded[b, i, :n], row)
      for padded in jax.tree.leaves(batch)[:5]:
        assert not padded[b, i, n:].any()


def test_every_branch_starts_with_the_last_token_of_its_prompt():
  batch = batch_of(make_group(3, 1, 4), make_group(2, 5, 1, prompt=(7, 8)))
  assert batch.inputs[..., 0].tolist() == [[9, 9, 9], [8, 8, 8]]


def test_a_batch_lies_whole_on_every_device_of_its_mesh():
  """A process reads its rows of it, and so may any other."""
  mesh = make_mesh(data=2, context=4)
  for leaf in jax.tree.leaves(batch_of(*[make_group(2, 3)] * 2, mesh=mesh)):
    assert leaf.sharding.device_set == set(mesh.devices.flat)
    assert leaf.is_fully_replicated


def test_batch_dtypes_do_not_depend_on_x64(x64):
  batch = batch_of(make_group(2, 3))
  assert [leaf.dtype for leaf in jax.tree.leaves(batch)] == [
      jnp.int32,
      jnp.int32,
      jnp.bool_,
      jnp.bool_,
      jnp.float32,
      jnp.float32,
  ]


def test_old_log_probs_are_left_out_unless_asked_for():
  batch = batch_of(make_group(2, 3), from_rollouts=False)
  assert batch.old_log_probs is None
  with pytest.raises(ValueError, match="old_log_probs_from_rollouts=True"):
    batch_of(make_group(2, 3), make_group(2, 3, log_probs=False))


def test_a_batch_passes_through_jit_as_a_pytree():
  batch = batch_of(make_group(2, 3))
  out = jax.jit(lambda b: jax.tree.map(lambda x: x, b))(batch)
  assert isinstance(out, rollouts.BranchBatch) and out.ref_log_probs is None
  np.testing.assert_array_equal(out.inputs, batch.inputs)


@pytest.mark.parametrize(
    "advantages,message",
    [([1.0], r"shape \(1,\), wanted \(2,\)"), ([0.0, NAN], "finite")],
)
def test_bad_advantages_are_refused(advantages, message):
  with pytest.raises(ValueError, match=message):
    rollouts.to_branch_batch(
        [make_group(1), make_group(2, 3)],
        advantages=[np.zeros(1), np.array(advantages)],
        multiple=4,
        old_log_probs_from_rollouts=False,
        mesh=make_mesh(),
    )


def test_the_ladder_is_the_documented_one():
  steps = sorted({rollouts.bucket(n, multiple=1) for n in range(1, 33)})
  assert steps == [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32]


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.integers(1, 5000))
def test_buckets_are_monotone(a, b, multiple):
  low, high = sorted((a, b))
  assert rollouts.bucket(low, multiple=multiple) <= rollouts.bucket(
      high, multiple=multiple
  )


@given(st.integers(1, 2**40), st.integers(1, 5000))
def test_buckets_hold_n_waste_under_a_quarter_and_are_stable(n, multiple):
  length = rollouts.bucket(n, multiple=multiple)
  rounded = -(-n // multiple) * multiple
  assert length % multiple == 0
  assert n <= rounded <= length
  assert 4 * length < 5 * rounded
  assert rollouts.bucket(length, multiple=multiple) == length


@given(st.integers(1, 2000), st.integers(1, 3))
def test_an_octave_has_at_most_four_buckets(start, multiple):
  octave = range(start, 2 * start)
  lengths = {rollouts.bucket(n, multiple=multiple) for n in octave}
  assert sum(start <= length < 2 * start for length in lengths) <= 4


@pytest.mark.parametrize("name", ["n", "multiple"])
def test_a_bucket_below_one_is_refused(name):
  sizes = {"n": 1, "multiple": 1} | {name: 0}
  with pytest.raises(ValueError, match=f"{name}=0"):
    rollouts.bucket(sizes["n"], multiple=sizes["multiple"])
