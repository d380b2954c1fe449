"""Groups of devices as XLA writes them, and the mesh axes that they lie along.

The mesh has 2 x 2 x 2 devices, or 2 x 4: device 5 of the first is at data=1,
context=0, tensor=1.
"""

import pytest

from lstraw_jax.hlo.replica_groups import (
    axes_along,
    permuted_axes,
    permuted_pairs,
    replica_groups,
)

CUBE = {"data": 2, "context": 2, "tensor": 2}
FLAT = {"data": 2, "context": 4, "tensor": 1}

ALONG_CONTEXT = [[0, 2], [1, 3], [4, 6], [5, 7]]


def groups(text):
  found = replica_groups(f"channel_id=1, replica_groups={text}", devices=8)
  return sorted(sorted(group) for group in found)


@pytest.mark.parametrize(
    "text",
    [
        "{{0,2},{1,3},{4,6},{5,7}}, use_global_device_ids=true",
        "[4,2]<=[2,2,2]T(0,2,1), dimensions={1}",
        "mesh['data'=2,'context'=2,'tensor'=2] {'context'}, dimensions={0}",
        "mesh[a=2,b=2,c=2] {b}",
        "mesh['x'=8] {'x':(2)2}, use_global_device_ids=true",
        # The devices of a mesh whose first axis is context.
        "mesh['a'=2,'b'=4], device_ids=(0,1,4,5,2,3,6,7) {'a'}",
        "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]T(1,0,2)) {'a'}",
    ],
)
def test_every_form_gives_the_same_groups(text):
  assert groups(text) == ALONG_CONTEXT
  assert axes_along(groups(text), CUBE) == "context"


@pytest.mark.parametrize(
    ("text", "wanted", "axes"),
    [
        ("{}", [[*range(8)]], "data, context, tensor"),
        ("[1,8]<=[8]", [[*range(8)]], "data, context, tensor"),
        ("[8,1]<=[8]", [[x] for x in range(8)], "none"),
        ("mesh['a'=8] {}", [[x] for x in range(8)], "none"),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]], "context, tensor"),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]], "data, context"),
        (
            "mesh['a'=2,'b'=2,'c'=2] {'a','c'}",
            [[0, 1, 4, 5], [2, 3, 6, 7]],
            "data, tensor",
        ),
        (
            "mesh['a'=2,'b'=4] {'a','b':(2)2}",
            [[0, 1, 4, 5], [2, 3, 6, 7]],
            "data, tensor",
        ),
    ],
)
def test_groups_lie_along_axes(text, wanted, axes):
  assert groups(text) == wanted
  assert axes_along(groups(text), CUBE) == axes


def test_a_part_of_an_axis_is_said_to_be_one():
  assert axes_along(groups("[4,2]<=[8]"), FLAT) == "part of context"
  assert axes_along(groups("[2,4]<=[8]"), FLAT) == "context"
  # Opposite corners: each group has two of the four devices of its axes.
  corners = [[0, 6], [2, 4], [1, 7], [3, 5]]
  assert axes_along(corners, CUBE) == "part of data, context"


def test_a_permutation_runs_along_the_axes_in_which_its_ends_differ():
  ring = (
      "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{7,7}}, metadata={}"
  )
  pairs = permuted_pairs(ring)
  assert pairs == [[0, 1], [1, 2], [2, 3], [3, 0], [4, 5]]
  assert permuted_axes(pairs, FLAT) == "context"
  assert permuted_axes(pairs, CUBE) == "context, tensor"
  assert permuted_axes([[0, 4], [4, 0]], CUBE) == "data"
  assert permuted_axes([], CUBE) == "none"


def test_another_form_is_refused():
  with pytest.raises(ValueError, match=r"'<8>'.*: this form is not known"):
    groups("<8>")
