"""Programs to run, each with its settings in experiments/configs."""
