"""A row of the metrics of an update, for tests of what is told about it."""

import math

from lstraw_jax.metrics import PeakMemory
from lstraw_jax.run_log import make_row
from lstraw_jax.update_metrics import UpdateMetrics

MIB = 2**20


def row(step=1, *, seconds=None, **changes):
  metrics = UpdateMetrics(
      loss=-1.5e-8,
      reward_mean=0.8125,
      grad_norm=1.25,
      prompt_tokens=9000,
      response_tokens=1000,
      denominator=2,
      sampler_gap_nats=math.nan,
      staleness_steps=3,
      drift_nats=0.015,
      measured_drift_nats=math.nan,
      tokens=dict(
          ratio_mean=1.0,
          ratio_max=1.05,
          clip_share=0.125,
          kl_nats=0.002,
          entropy_nats=5.5,
      ),
  )
  return make_row(
      metrics._replace(**changes),
      step=step,
      tokens=10000,
      seconds=seconds or {"capture": 3.0, "replay": 1.0, "respond": 0.96},
      peak=PeakMemory(1536 * MIB, "process"),
  )
