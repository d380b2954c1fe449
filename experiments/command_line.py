"""How a binary starts, and how it says what is wrong with its input."""

import os
import sys
import traceback
from collections.abc import Callable

import jax
from absl import app, flags, logging


def run(main: Callable[[list[str]], None]) -> None:
  """Runs `main` after the flags are read.

  A mistake in a flag, a setting or a file is one line on standard error and
  exit status 1, without a traceback: those are for mistakes of ours. So is the
  loss of another process, of several.
  """
  app.run(lambda argv: _main(main, argv), flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
  except (flags.Error, AttributeError, KeyError, TypeError, OSError) as error:
    # ml_collections answers a misspelt setting by AttributeError, with a
    # suggestion on a line of its own.
    sys.exit(f"error: {_message(error)}")
  if len(rest) > 1:
    sys.exit(f"error: unknown arguments: {' '.join(rest[1:])}")
  return rest


def _main(main, argv):
  logging.set_verbosity(logging.WARNING)
  try:
    main(argv)
  except BaseException as error:
    line = _line(error)
    if jax.distributed.is_initialized():
      print(line, file=sys.stderr) if line else traceback.print_exc()
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(1)  # at an ordinary exit jax would wait for the others
    if line:
      sys.exit(line)
    raise


def _line(error: BaseException) -> str | None:
  """Says in one line what is wrong, if it is no mistake of ours."""
  # Gloo's errors come as one type or another, ValueError among them.
  lost = ("Gloo", "Connection closed by peer", "Connection reset by peer")
  if jax.distributed.is_initialized() and any(x in str(error) for x in lost):
    return (
        "error: another process has ended or cannot be reached; its output"
        " says why. Started again on the same --workdir, the run goes on from"
        f" its last checkpoint ({str(error).splitlines()[0]})"
    )
  if isinstance(error, ValueError | OSError | FloatingPointError):
    return f"error: {error}"
  return None


def _message(error: BaseException) -> str:
  """Returns the innermost message: an error may wrap another, or its repr."""
  inner = error.args[0] if error.args else ""
  if isinstance(inner, BaseException):
    return _message(inner)
  return str(inner) if isinstance(error, KeyError) else str(error)
