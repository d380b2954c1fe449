"""Settings of the experiments, one file a run."""
