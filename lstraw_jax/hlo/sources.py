"""Which line of our sources an instruction of a compiled program came from."""

import pathlib

from lstraw_jax.hlo.text import Instruction, Program


class SourceLines:
  """Finds source lines of the instructions of a program."""

  def __init__(self, program: Program, root: pathlib.Path):
    """Finds nothing yet.

    Args:
      program: read from text.
      root: the folder of our sources. What is installed below it, in an
        environment, is not ours.
    """
    self._program = program
    self._root = root
    self._computation = {
        instruction.name: name
        for name, body in program.computations.items()
        for instruction in body
    }
    # A loop's body is not among them: its parameter is all that it carries.
    self._caller = {
        name: instruction
        for instruction in program.instructions.values()
        for name in instruction.called("calls")
    }

  def __call__(self, name: str) -> str:
    """Returns file:line, relative to the root, or "" if there is none.

    It is the innermost frame of our own. What XLA added has none: a fusion is
    said to come from where its result does, all else from where its first
    operand does.
    """
    seen = set()
    while name in self._program.instructions and name not in seen:
      seen.add(name)
      instruction = self._program.instructions[name]
      if line := self._own_line(instruction):
        return line
      name = self._origin(instruction)
    return ""

  def _own_line(self, instruction: Instruction) -> str:
    number = instruction.frame
    while number is not None:
      frame = self._program.frames[number]
      path = pathlib.Path(frame.file)
      if path.is_relative_to(self._root):
        path = path.relative_to(self._root)
        if "site-packages" not in path.parts:
          return f"{path}:{frame.line}"
      number = frame.parent
    return ""

  def _origin(self, instruction: Instruction) -> str:
    """Returns the name of the instruction that a value came from, or ""."""
    if called := instruction.called("calls"):
      body = self._program.computations[called[0]]
      return next(x.name for x in body if x.is_root)
    if instruction.opcode == "parameter":
      caller = self._caller.get(self._computation[instruction.name])
      return caller.operands[int(instruction.arguments)] if caller else ""
    return instruction.operands[0] if instruction.operands else ""
