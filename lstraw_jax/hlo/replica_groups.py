"""Which devices a collective joins, and the mesh axes that they lie along.

XLA writes groups of devices in three forms, all of which can stand in one
program:

    {{0,1},{2,3}}                      as they are; {} is all devices
    [2,4]<=[4,2]T(1,0)                 of a numbering, reshaped and transposed
    mesh['x'=2,'y'=4] {'x','y':(1)2}   along axes of a mesh, or the part of an
                                       axis that is 2 devices behind 1
"""

import collections
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Groups = Sequence[Sequence[int]]


def replica_groups(attributes: str, *, devices: int) -> Groups:
  """Returns the groups of devices that a collective joins.

  Args:
    attributes: of the instruction, as written.
    devices: number of all devices.

  Raises:
    ValueError: for a form that is not known.
  """
  _, _, text = attributes.partition("replica_groups=")
  if text.startswith("{"):
    return _pairs_of_braces(text) or [range(devices)]
  if found := _NUMBERED.match(text):
    return _numbered(found).tolist()
  if found := _MESH.match(text):
    return _along_axes(found)
  raise ValueError(f"replica_groups={text[:60]!r}...: this form is not known")


def permuted_pairs(attributes: str) -> Groups:
  """Returns (source, target) of a permutation, without those that stay."""
  _, _, text = attributes.partition("source_target_pairs=")
  return [pair for pair in _pairs_of_braces(text) if pair[0] != pair[1]]


def axes_along(groups: Groups, sizes: Mapping[str, int]) -> str:
  """Returns the mesh axes that groups lie along.

  Args:
    groups: of devices, by their number in the mesh.
    sizes: of the mesh axes, by name and in order.

  Returns:
    Names as "data, context"; "part of context" if a group has some devices of
    these axes only; "none" if it has but one.
  """
  axes, whole = set(), True
  for group in groups:
    places = np.array(np.unravel_index(list(group), tuple(sizes.values())))
    moving = (places != places[:, :1]).any(axis=1)
    along = [axis for axis, moves in zip(sizes, moving, strict=True) if moves]
    whole &= len(group) == math.prod(sizes[axis] for axis in along)
    axes.update(along)
  names = ", ".join(axis for axis in sizes if axis in axes) or "none"
  return names if whole else f"part of {names}"


def permuted_axes(pairs: Groups, sizes: Mapping[str, int]) -> str:
  """Returns the mesh axes that a permutation sends along."""
  return axes_along(pairs, sizes).removeprefix("part of ")


def _pairs_of_braces(text: str) -> list[list[int]]:
  """Reads {{0,1},{2,3}}, and nothing behind it."""
  outer = re.match(r"\{(?:\{[\d,]*\},?)*\}", text)
  inner = re.findall(r"\{([\d,]+)\}", outer[0] if outer else "")
  return [_integers(group) for group in inner]


_NUMBERED = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>[^)]*(?:\)[^)]*)?)\))?"
    r" \{(?P<along>[^}]*)\}"
)
_AXIS = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_ALONG = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def _numbered(found: re.Match[str]) -> np.ndarray:
  """Returns the array of [4,2]<=[2,4]T(1,0), or of [2,4]T(1,0)."""
  shape, start, order = (_integers(part or "") for part in found.groups())
  numbers = np.arange(math.prod(shape)).reshape(start or shape)
  return numbers.transpose(order or range(numbers.ndim)).reshape(shape)


def _along_axes(found: re.Match[str]) -> Groups:
  sizes = {axis: int(size) for axis, size in _AXIS.findall(found["axes"])}
  ids = _device_ids(found["ids"], math.prod(sizes.values()))
  # Devices are together that differ in the digits of these axes alone.
  digits = []
  for axis, before, size in _ALONG.findall(found["along"]):
    size = int(size or sizes[axis])
    behind = sizes[axis] // (int(before or 1) * size)
    digits.append((list(sizes).index(axis), behind, size))
  groups = collections.defaultdict(list)
  places = itertools.product(*map(range, sizes.values()))
  for device, place in zip(ids, places, strict=True):
    rest = list(place)
    for axis, behind, size in digits:
      rest[axis] -= place[axis] // behind % size * behind
    groups[tuple(rest)].append(device)
  return list(groups.values())


def _device_ids(text: str | None, count: int) -> Iterable[int]:
  """Returns the devices of a mesh in order: a list, or a numbering."""
  if text is None:
    return range(count)
  if found := _NUMBERED.match(text):
    return _numbered(found).ravel().tolist()
  return _integers(text)


def _integers(text: str) -> list[int]:
  return [int(x) for x in text.split(",") if x]
