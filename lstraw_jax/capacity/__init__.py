"""What an update takes of a machine: memory, time, and whether it fits."""
