"""Large numbers as a person reads them."""

_UNITS = ("", "k", "M", "G", "T", "P", "E")


def quantity(value: float, unit: str = "") -> str:
  """Returns a number in four digits: 1.234 GB, or 12 B, or 3.4 TFLOP."""
  size = abs(value)
  power = 0
  while size >= 1000 and power + 1 < len(_UNITS):
    size /= 1000
    power += 1
  number = f"{value / 1000**power:.4g}"
  return f"{number} {_UNITS[power]}{unit}".rstrip()


def change(before: float | None, after: float | None) -> str:
  """Returns how far one number is from another: +12.5 %, new, gone, or ""."""
  if before == after:
    return ""
  if not before or not after:
    return "gone" if before else "new"
  percent = 100 * (after - before) / before
  return f"{percent:+,.0f} %" if percent >= 1000 else f"{percent:+.3g} %"
