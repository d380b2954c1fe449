"""What a dump says of one compiled stage, and the files that say it."""

import dataclasses
import json
import pathlib
from typing import Any

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageReport:
  """Facts of a compiled program, each field a JSON file of its name."""

  compiled: Fields  # seconds, and versions of jax and jaxlib
  memory: dict[str, int]  # bytes on a device, see `hlo_dump`
  cost: Fields  # see `hlo_dump`
  buffers: list[Fields]  # `hlo_buffers.Buffer`, the largest
  collectives: list[Fields]  # `hlo_collectives.Collective`
  sent: list[Fields]  # `hlo_collectives.Sent`
  ops: dict[str, dict[str, int]]  # `hlo_ops.OpCounts`

  def write(self, folder: pathlib.Path) -> None:
    """Writes the files into a folder that is there."""
    for name, content in vars(self).items():
      text = json.dumps(content, indent=2)
      (folder / f"{name}.json").write_text(text + "\n")

  @classmethod
  def read(cls, folder: pathlib.Path) -> "StageReport":
    """Reads what `write` wrote."""
    names = [field.name for field in dataclasses.fields(cls)]
    texts = {name: (folder / f"{name}.json").read_text() for name in names}
    return cls(**{name: json.loads(text) for name, text in texts.items()})
