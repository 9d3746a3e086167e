"""Attention and vitals over the ranks of torch.distributed: sequences too long for one device.

Each rank holds a shard of the sequence; the output and every vital are those of the whole.
"""

from scaledot.distributed.attention import attention, attention_with_vitals, vitals
from scaledot.distributed.context import context_parallel, context_parallel_unshard
from scaledot.distributed.layout import LAYOUTS
from scaledot.distributed.merging import merge_vitals
from scaledot.distributed.sharding import shard, unshard

__all__ = [
    "LAYOUTS",
    "attention",
    "attention_with_vitals",
    "context_parallel",
    "context_parallel_unshard",
    "merge_vitals",
    "shard",
    "unshard",
    "vitals",
]
