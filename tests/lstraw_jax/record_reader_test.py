"""Reading what a sampler chose, and refusing every bad file by name."""

import json

import numpy as np
import pytest

from lstraw_jax.record_reader import ChoiceLimits
from lstraw_jax.rollout_reader import read_rollout_groups

P, R, TOPK, EXPERTS = 3, 4, 5, 6
CHOICES = {
    "selections": ChoiceLimits(layers=2, entries=TOPK, count=None),
    "experts": ChoiceLimits(layers=3, entries=2, count=EXPERTS),
}


def selections():
  """All tokens up to one's own, of which there are 3 to 6, and then none."""
  rows = [np.arange(P + r)[:TOPK] for r in range(R)]
  rows = [np.pad(x, (0, TOPK - x.size), constant_values=-1) for x in rows]
  return np.stack([np.stack([row, row[::-1]]) for row in rows])


def experts():
  rng = np.random.default_rng(0)
  draw = [rng.permutation(EXPERTS)[:2] for _ in range(R * 3)]
  return np.reshape(draw, (R, 3, 2))


def read(folder, *, choices=CHOICES, **arrays):
  """Reads a group whose second response names files of the arrays."""
  for name, array in arrays.items():
    np.save(folder / f"{name}.npy", array)
  plain = {"tokens": [1, 2], "reward": 0.0}
  files = {f"{name}_file": f"{name}.npy" for name in arrays}
  recorded = {"tokens": [4] * R, "reward": 1.0, **files}
  line = {
      "group_id": "a",
      "prompt_tokens": [7] * P,
      "responses": [plain, recorded],
  }
  path = folder / "groups.jsonl"
  path.write_text(json.dumps(line))
  (group,) = read_rollout_groups(
      path,
      vocab_size=10,
      max_prompt_tokens=8,
      max_response_tokens=8,
      choices=choices,
  )
  return group.rollouts[1].record


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_what_was_chosen_is_read_as_it_is(tmp_path, dtype):
  found = read(
      tmp_path, selections=selections().astype(dtype), experts=experts()
  )
  np.testing.assert_array_equal(found.selections, selections())
  np.testing.assert_array_equal(found.experts, experts())
  assert {x.dtype for x in found if x is not None} == {np.dtype(np.int32)}


def test_what_is_not_there_is_chosen_anew(tmp_path):
  found = read(tmp_path, experts=experts())
  assert found.selections is None and found.experts is not None
  assert read(tmp_path) == (None, None)


def changed(array, at, value):
  array = array.copy()
  array[at] = value
  return array


@pytest.mark.parametrize(
    "arrays,message",
    [
        (
            {"experts": experts()[:-1]},
            r"experts_file='experts.npy': got shape \(3, 3, 2\)",
        ),
        (
            {"experts": experts()[:, :2]},
            r"wanted a .npy of integers, \(4, 3, 2",
        ),
        ({"experts": experts().astype(float)}, "of float64"),
        (
            {"experts": changed(experts(), (1, 2, 0), EXPERTS)},
            r"experts_file\[1, 2, 0\]=6: .* wanted 0 to 5",
        ),
        (
            {"experts": changed(experts(), (1, 2, 0), -1)},
            r"experts_file\[1, 2, 0\]=-1",
        ),
        (
            {"experts": changed(experts(), (2, 1), (4, 4))},
            r"experts_file\[2, 1\]=\[4, 4\]: got one twice",
        ),
        (
            {"selections": changed(selections(), (0, 0, 3), P)},
            r"selections_file\[0, 0, 3\]=3: .* its token's position",
        ),
        (
            {"selections": changed(selections(), (0, 1, 0), -2)},
            r"selections_file\[0, 1, 0\]=-2",
        ),
        (
            {"selections": changed(selections(), (3, 0, 0), 1)},
            r"selections_file\[3, 0\]=.*: got one twice",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, arrays, message):
  with pytest.raises(ValueError, match=message) as caught:
    read(tmp_path, **arrays)
  assert "groups.jsonl:1: responses[1]." in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
  read(tmp_path, experts=experts())
  (tmp_path / "experts.npy").unlink()
  path = tmp_path / "groups.jsonl"
  with pytest.raises(ValueError, match="an unreadable file"):
    read_rollout_groups(
        path,
        vocab_size=10,
        max_prompt_tokens=8,
        max_response_tokens=8,
        choices=CHOICES,
    )


def test_a_model_that_chooses_nothing_has_no_record(tmp_path):
  with pytest.raises(ValueError, match="this model makes no such choice"):
    read(tmp_path, choices=None, experts=experts())
