"""How a binary starts, and how it says what is wrong with its input."""

import sys
from collections.abc import Callable

from absl import app, flags, logging


def run(main: Callable[[list[str]], None]) -> None:
  """Runs `main` after the flags are read.

  A mistake in a flag, a setting or a file is one line on standard error and
  exit status 1, without a traceback: those are for mistakes of ours.
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
  except (ValueError, OSError, FloatingPointError) as error:
    sys.exit(f"error: {error}")


def _message(error: BaseException) -> str:
  """Returns the innermost message: an error may wrap another, or its repr."""
  inner = error.args[0] if error.args else ""
  if isinstance(inner, BaseException):
    return _message(inner)
  return str(inner) if isinstance(error, KeyError) else str(error)
