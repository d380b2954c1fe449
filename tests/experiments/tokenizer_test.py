"""A checkpoint's tokenizer, or bytes."""

import numpy as np
import tokenizers

from experiments import tokenizer


def test_a_checkpoint_with_a_tokenizer_is_read_by_it(tmp_path):
  words = tokenizers.Tokenizer(
      tokenizers.models.WordLevel({"?": 0, "the": 1, "fox": 2}, unk_token="?")
  )
  words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  words.save(str(tmp_path / "tokenizer.json"))
  loaded = tokenizer.load_tokenizer(str(tmp_path))
  assert loaded.encode("the fox ran").tolist() == [1, 2, 0]
  assert loaded.decode(np.array([1, 2])) == b"the fox"
  assert isinstance(tokenizer.load_tokenizer(""), tokenizer.ByteTokenizer)


def test_ids_beyond_bytes_decode_to_nothing():
  assert tokenizer.ByteTokenizer().decode(np.array([104, 300, 105])) == b"hi"
