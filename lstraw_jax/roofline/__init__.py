"""A roofline of an update: what each stage asks of a device, in closed form.

    seconds = max(FLOP / peak, memory bytes / rate, link bytes / rate,
                  host bytes / rate)

A lower bound: of a program that hides all but the longest of the four behind it
and moves nothing twice. Nothing is traced. Counted are

* products of matrices as the programs run them: padding of chunks and of
  responses, rematerialisation, blocks of keys that no query sees left out;
* memory: operands and result of each product once, keys and values once a pass,
  sums of cotangents and of gradients, gathered weights, optimizer state;
* links: the bytes that a device receives in all-gather, reduce-scatter,
  all-reduce, all-to-all and permute.

Not counted are elementwise work and its memory; what a fused kernel keeps on
the chip, such as the scores of attention, which an XLA program does move; norms
and convolutions; that products in float32 run below the peak; sampling; that
links between hosts are slower than those inside one.
"""

from lstraw_jax.roofline.cost import StageCost as StageCost
from lstraw_jax.roofline.stages import estimate as estimate
