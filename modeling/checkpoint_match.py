"""Do the tensors of some files make up the model? Known from headers alone."""

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np

from modeling.checkpoint_family import family
from modeling.checkpoint_files import FP8, StoredTensor
from modeling.checkpoint_fp8 import (
    ScaledTensor,
    has_scale,
    scale_name,
    scale_shape,
    take_scales,
)
from modeling.checkpoint_names import Place, places, plain_name
from modeling.decoder_config import DecoderConfig

_FLOATS = ("BF16", "F16", "F32", "F64")
_VISION = ("model.visual.", "visual.")
_LISTED = 20  # names of each kind that an error lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
  """What to read and where it goes, and what is left in the files."""

  pairs: tuple[tuple[StoredTensor | ScaledTensor, Place], ...]
  vision: tuple[str, ...]
  mtp: tuple[str, ...]


def match(
    directory: pathlib.Path,
    stored: Mapping[str, StoredTensor],
    config: DecoderConfig,
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
  skipped = {"vision": _VISION, "mtp": family(config).mtp}
  text, names = _without(skipped, stored)
  scales = take_scales(text)
  per_expert = any(".experts.0." in name for name in text)
  wanted = places(config, per_expert=per_expert)
  # Some writers store the head of a tied model: a copy of the embedding.
  copy = (
      text.pop("lm_head.weight", None) if config.tie_word_embeddings else None
  )
  problems = _problems(text, wanted, scales)
  if any(problems.values()):
    raise ValueError(
        f"directory={str(directory)!r} does not fit the model:"
        + "".join(_listed(kind, names) for kind, names in problems.items())
    )
  if copy is not None:
    _check_copy(directory, copy, text["embed_tokens.weight"])
  pairs = tuple(
      (_scaled(text[name], scales.get(name)), place)
      for name, place in wanted.items()
  )
  return Match(pairs=pairs, **names)


def _problems(text, wanted, scales):
  """Returns what does not fit, by kind."""
  found = {name: text[name] for name in wanted if name in text}
  shapes = [(tensor, wanted[name].shape) for name, tensor in found.items()]
  shapes += [(scale, scale_shape(text[n].shape)) for n, scale in scales.items()]
  unexpected = text.keys() - wanted.keys()
  return {
      "missing": [name for name in wanted if name not in text]
      + [
          scale_name(name)
          for name, tensor in found.items()
          if has_scale(tensor) and name not in scales
      ],
      "unexpected": sorted(text[name].name for name in unexpected),
      "misshaped": [
          f"{tensor.name} {tensor.shape}, want {shape}"
          for tensor, shape in shapes
          if tensor.shape != shape
      ],
      "of an unsupported dtype": [
          f"{tensor.name} {tensor.dtype}, want one of {', '.join(_FLOATS)}, or"
          f" {FP8} for a matrix"
          for tensor, _ in shapes
          if tensor.dtype not in _FLOATS and not has_scale(tensor)
      ],
  }


def _without(skipped, stored):
  """Returns the decoder's tensors by plain name, and the skipped names."""
  text: dict[str, StoredTensor] = {}
  names = {kind: [] for kind in skipped}
  for name, tensor in stored.items():
    for kind, prefixes in skipped.items():
      if name.startswith(prefixes):
        names[kind].append(name)
        break
    else:
      plain = plain_name(name)
      if plain in text:
        raise ValueError(
            f"tensors {text[plain].name!r} and {name!r} are both {plain!r}"
        )
      text[plain] = tensor
  return text, {kind: tuple(found) for kind, found in names.items()}


def _scaled(tensor, scale):
  return tensor if scale is None else ScaledTensor(values=tensor, scale=scale)


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
