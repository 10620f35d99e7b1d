"""A hidden-states connector for vLLM, on CPU and on CUDA, that writes only what was asked for.

vLLM's own one needs CUDA (a copy stream, pinned memory) and writes a file for every request. This
one copies plainly where there is no GPU, and keeps the states of a request only if its
`kv_transfer_params` say so: the same server then also generates, at no cost.

vLLM finds it by module path; the folder of this file is put on the engine's PYTHONPATH.
"""

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import eagle3_one_more
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

SAVE_STATES = "eagle3_save_states"
"""The key in a request's kv_transfer_params that asks for its states."""


class Copied:
    """Stands where vLLM expects a CUDA event: a CPU copy is over when the call returns."""

    def query(self) -> bool:
        """Say that the copy is over."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


class Eagle3HiddenStates(ExampleHiddenStatesConnector):
    """vLLM's connector, for either device, for the requests that ask."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            eagle3_one_more.register()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Drop the requests that did not ask for states from the list of files to write."""
        metadata = super().build_connector_meta(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            if not _asks_for_states(request):
                metadata.new_req_filenames.pop(request.req_id, None)
                self._request_filenames.pop(request.req_id, None)
        return metadata

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        tensors = {
            "hidden_states": self._copy(pending).contiguous(),
            "token_ids": pending.token_ids.clone(),
        }
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        copied = Copied()
        # The reader waits on this lock, which is open and held since the request was scheduled.
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        future = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _copy(self, pending: PendingSave) -> torch.Tensor:
        """The states of one request [tokens, layers, H], gathered from the blocks of the cache."""
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        within = torch.arange(self._block_size, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + within[None, :]).flatten()
        return extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()


def _asks_for_states(request: Any) -> bool:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    return bool((extra.get("kv_transfer_params") or {}).get(SAVE_STATES))
