"""Text to token ids and back: the tokenizer of a checkpoint, or bytes."""

import pathlib
from typing import Protocol

import numpy as np
import tokenizers


class Tokenizer(Protocol):
  """Text to ids and back."""

  def encode(self, text: str) -> np.ndarray:
    """Returns the token ids of a text."""
    ...

  def decode(self, tokens: np.ndarray) -> bytes:
    """Returns the text of some token ids, as bytes."""
    ...


class ByteTokenizer:
  """Every byte is a token. An id above 255 decodes to nothing."""

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def decode(self, tokens: np.ndarray) -> bytes:
    return bytes(token for token in tokens.tolist() if token < 256)


class FileTokenizer:
  """The tokenizer of a checkpoint, from its `tokenizer.json`."""

  def __init__(self, path: pathlib.Path):
    self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

  def encode(self, text: str) -> np.ndarray:
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(encoding.ids, np.int32)

  def decode(self, tokens: np.ndarray) -> bytes:
    return self._tokenizer.decode(tokens.tolist()).encode()


def load_tokenizer(checkpoint: str) -> Tokenizer:
  """Returns the checkpoint's tokenizer, or bytes where it has none."""
  path = pathlib.Path(checkpoint, "tokenizer.json")
  if checkpoint and path.exists():
    return FileTokenizer(path)
  return ByteTokenizer()
