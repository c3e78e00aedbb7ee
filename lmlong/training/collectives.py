"""Collectives of torch.distributed that have other names since torch 2.13, where the old ones give a warning."""

from torch import distributed

all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
