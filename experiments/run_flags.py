"""The flags of every binary with settings and a folder.

Defined once: a process may import several of these binaries.
"""

from absl import flags
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Settings of the run, e.g. experiments/configs/tiny.py."
)
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run. Default: runs/ and the time of the start.",
)
flags.mark_flag_as_required("config")
