"""Do the tensors of some files make up the model? Known from headers alone."""

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np

from modeling.checkpoint_files import StoredTensor
from modeling.checkpoint_names import Place, places, plain_name
from modeling.qwen3_5_config import Qwen3_5Config

_FLOATS = ("BF16", "F16", "F32", "F64")
_SKIPPED = {"vision": ("model.visual.", "visual."), "mtp": ("mtp.",)}
_LISTED = 20  # names of each kind that an error lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
  """What to read and where it goes, and what is left in the files."""

  pairs: tuple[tuple[StoredTensor, Place], ...]
  vision: tuple[str, ...]
  mtp: tuple[str, ...]


def match(
    directory: pathlib.Path,
    stored: Mapping[str, StoredTensor],
    config: Qwen3_5Config,
) -> Match:
  """Pairs each tensor of the decoder with its place in the model.

  Args:
    directory: named in errors.
    stored: the tensors of the files.
    config: the model.

  Raises:
    ValueError: names every tensor that is missing, unexpected, or of another
      shape or dtype than the model wants.
  """
  text, skipped = _without_skipped(stored)
  per_expert = any(".experts.0." in name for name in text)
  wanted = places(config, per_expert=per_expert)
  # Some writers store the head of a tied model: a copy of the embedding.
  copy = (
      text.pop("lm_head.weight", None) if config.tie_word_embeddings else None
  )
  pairs = tuple((text[n], place) for n, place in wanted.items() if n in text)
  unexpected = text.keys() - wanted.keys()
  problems = {
      "missing": [name for name in wanted if name not in text],
      "unexpected": sorted(text[name].name for name in unexpected),
      "misshaped": [
          f"{tensor.name} {tensor.shape}, want {place.shape}"
          for tensor, place in pairs
          if tensor.shape != place.shape
      ],
      "of an unsupported dtype": [
          f"{tensor.name} {tensor.dtype}, want one of {', '.join(_FLOATS)}"
          for tensor, _ in pairs
          if tensor.dtype not in _FLOATS
      ],
  }
  if any(problems.values()):
    raise ValueError(
        f"directory={str(directory)!r} does not fit the model:"
        + "".join(_listed(kind, names) for kind, names in problems.items())
    )
  if copy is not None:
    _check_copy(directory, copy, text["embed_tokens.weight"])
  return Match(pairs=pairs, **skipped)


def _without_skipped(stored):
  """Returns the decoder's tensors by plain name, and the skipped names."""
  text: dict[str, StoredTensor] = {}
  skipped = {kind: [] for kind in _SKIPPED}
  for name, tensor in stored.items():
    for kind, prefixes in _SKIPPED.items():
      if name.startswith(prefixes):
        skipped[kind].append(name)
        break
    else:
      plain = plain_name(name)
      if plain in text:
        raise ValueError(
            f"tensors {text[plain].name!r} and {name!r} are both {plain!r}"
        )
      text[plain] = tensor
  return text, {kind: tuple(names) for kind, names in skipped.items()}


def _listed(kind, names):
  if not names:
    return ""
  more = len(names) - _LISTED
  lines = [*names[:_LISTED], *([f"and {more} more"] if more > 0 else [])]
  return f"\n  {len(names)} {kind}:" + "".join(f"\n    {x}" for x in lines)


def _check_copy(directory, head, embedding):
  if not np.array_equal(head.read(), embedding.read()):
    raise ValueError(
        f"directory={str(directory)!r}: tie_word_embeddings=True, but"
        f" {head.name} differs from {embedding.name}: load with"
        " tie_word_embeddings=False"
    )
