"""The text task: real prompts and a reward that cannot be fooled cheaply."""

import numpy as np
import pytest

from experiments import pydoc_text
from experiments.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def prompts(**changes):
  settings = dict(prompt_tokens=4096, vocab_size=256, seed=0) | changes
  return pydoc_text.prompts(BYTES, **settings)


def test_prompts_are_windows_of_real_text():
  text = BYTES.decode(np.asarray(prompts()[0])).decode(errors="ignore")
  assert len(text) > 4000 and " the " in text


def test_prompts_depend_on_seed_and_position_alone():
  np.testing.assert_array_equal(prompts()[7], prompts()[7])
  assert (np.asarray(prompts()[7]) != prompts()[8]).any()
  assert (np.asarray(prompts()[7]) != prompts(seed=1)[7]).any()


def test_prompts_never_end():
  assert prompts()[10_000_000].shape == (4096,)


@pytest.mark.parametrize("prompt_tokens", [0, 10**9])
def test_an_impossible_prompt_length_is_refused(prompt_tokens):
  with pytest.raises(ValueError, match=r"data\.prompt_tokens="):
    prompts(prompt_tokens=prompt_tokens)


def test_a_vocabulary_too_small_for_the_text_is_refused():
  with pytest.raises(ValueError, match=r"vocabulary has 100 ids"):
    prompts(vocab_size=100)


def test_the_reward_is_one_for_text_of_the_prompt_and_zero_for_none():
  prompt = b"the quick brown fox jumps over the lazy dog"
  assert pydoc_text.overlap_reward(prompt, b"quick") == 1.0
  assert pydoc_text.overlap_reward(prompt, b"0123456") == 0.0
  # q, u and i are there; of qu, ui, iq the first two: (3/4 + 2/3) / 2,
  # where the second q is no new n-gram.
  assert pydoc_text.overlap_reward(prompt, b"quiq") == pytest.approx(17 / 24)


def test_repeating_one_byte_scores_little():
  assert pydoc_text.overlap_reward(b"a  b", b" " * 32) < 0.05


def test_an_empty_response_scores_zero():
  assert pydoc_text.overlap_reward(b"abc", b"") == 0.0
