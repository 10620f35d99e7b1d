"""vLLM in this process, for answers alone: what `gpu_drafter.py --engine vllm` writes text with.

The pipeline's own vLLM engine is a server in another environment, which a machine without network
need not have. One engine takes thousands of prompts and keeps its batch full by itself.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import vllm
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from eagle3.engines.base import RowStates, Sampling


class OfflineVllm:
    """A `TargetEngine` without states; answers repeat as far as vLLM's batching allows."""

    def __init__(self, target: Path, ends: Collection[int], longest: int, dtype: str) -> None:
        """`longest`: tokens of the longest prompt and its answer together."""
        self.name = f"vllm {vllm.__version__}, {dtype}"
        self._ends = sorted(ends)
        # An engine without FlashInfer may still look for it first.
        kernels = {"attention_config": {"backend": "FLASH_ATTN"}}
        self._llm = LLM(
            **(kernels if current_platform.is_cuda() else {}),
            model=str(target),
            dtype=dtype,
            max_model_len=longest,
            max_num_seqs=2048,
            gpu_memory_utilization=0.8,
            skip_tokenizer_init=True,
            generation_config="vllm",
            seed=0,
        )

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue each prompt; the end token is included where the target wrote one."""
        # A seed for every request would draw for each by itself, and take most of the time.
        asked = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=self._ends,
            detokenize=False,
        )
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(given, asked, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """Not from here."""
        raise NotImplementedError("states come from `gpu_drafter.py PROJECT states`")
