"""Workers on Ray that fill the stores together, and this process, which says who makes what.

A shard is made by one worker. Each has two at a time: it makes one while it writes the other. A
worker that dies loses both to the others, as well as those that it had not begun. This process
starts the stores and writes the record. On a cluster, every node must have the project's folder at
the same path, and the same packages; for a store in a bucket, also the credentials, which never
pass through Ray.
"""

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any

from eagle3.artifacts import Split
from eagle3.config import Device
from eagle3.errors import EngineError
from eagle3.fill import TokenProgress
from eagle3.ray_worker import ExtractWorker, WorkerFacts, WorkerJob
from eagle3.refusals import Refusals
from eagle3.shard_maker import SHARDS_AT_ONCE
from eagle3.shard_plan import Shard, ShardPlan
from eagle3.store.writer import StateWriter

log = logging.getLogger(__name__)

# Ray's shared memory. Nothing large passes through it: states go from a worker to the disk.
OBJECT_STORE_BYTES = 100 * 2**20


@contextmanager
def ray_workers(
    job: WorkerJob, count: int, address: str | None, device: Device
) -> Iterator["RayWorkers"]:
    """Workers on the cluster at `address`, or on this machine for None; they end with the `with`.

    `device` is target.device: auto takes a GPU for each if the cluster has any.

    Raises:
        EngineError: Ray is not installed, there is no such cluster, or all workers died.
    """
    ray = _import_ray(address)
    with _connected(ray, address, count * job.threads):
        gpus = _gpus_a_worker(device, ray.cluster_resources())
        workers = RayWorkers(ray, job, count, {"num_cpus": job.threads, "num_gpus": gpus})
        try:
            yield workers
        finally:
            workers.end()


class RayWorkers:
    """Hands shards to the workers, `SHARDS_AT_ONCE` each."""

    def __init__(self, ray: Any, job: WorkerJob, count: int, needs: dict[str, int]) -> None:
        self._ray, self._count = ray, count
        _say_if_short(count, needs, ray.cluster_resources())
        # A worker is not started again: what kills one, mostly memory, would kill the next.
        actor = ray.remote(ExtractWorker).options(
            max_restarts=0, max_concurrency=SHARDS_AT_ONCE, **needs
        )
        self._workers = {number: actor.remote() for number in range(count)}
        self._ready: set[int] = set()
        self.engine = ""
        """Engine and version, of all workers."""
        self._busy: dict[Future[Any], tuple[int, Shard | None]] = {}
        for number, worker in self._workers.items():
            self._busy[worker.open.remote(job).future()] = (number, None)
        while not self._ready:
            self._collect(ShardPlan([], count))

    def fill(
        self,
        stores: Mapping[Split, StateWriter],
        progress: TokenProgress,
        refusals: Refusals,
    ) -> None:
        """Finish every shard of the stores.

        Raises:
            EngineError: all workers died; finished shards are kept.
            StoreError: more rows have a state that is no number than `refusals` allows.
        """
        lengths = {(split, shard): length for split, shard, length in _shards(stores)}
        done = {(split, shard) for split, store in stores.items() for shard in store.done}
        progress.add(sum(lengths[shard] for shard in done))
        plan = ShardPlan([shard for shard in lengths if shard not in done], self._count)
        while plan.left or any(shard for _, shard in self._busy.values()):
            self._hand_out(plan, stores, refusals.limit)
            for split, shard in self._collect(plan):
                progress.add(lengths[split, shard])
                refusals.add(split, stores[split].refused([shard]))
        # What a dead worker left half-written; nobody writes any more.
        for store in stores.values():
            store.remove_leftovers()

    def end(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            self._ray.kill(worker)

    def _hand_out(self, plan: ShardPlan, stores: Mapping[Split, StateWriter], limit: int) -> None:
        at_work = Counter(number for number, _ in self._busy.values())
        # By rounds, so that none has a second shard while another has none. Of two that are sent
        # together Ray may start either first, which costs a row across them a second run.
        for place in range(SHARDS_AT_ONCE):
            for number in sorted(self._ready):
                if at_work[number] <= place and (shard := plan.next(number)):
                    at_work[number] += 1
                    work = self._workers[number].fill.remote(stores[shard[0]].where, *shard, limit)
                    self._busy[work.future()] = (number, shard)

    def _collect(self, plan: ShardPlan) -> list[Shard]:
        """Wait for the next workers to finish what they do; the shards that are finished."""
        if not self._busy:
            raise EngineError(
                f"all {self._count} Ray workers died, the last lines above say of what; if it was "
                "memory, lower extract.workers, then run `dvc repro extract`: finished shards are "
                "kept"
            )
        finished = []
        # Ray's own wait would swallow the exception by which SIGTERM ends a stage.
        for future in wait(self._busy, return_when=FIRST_COMPLETED).done:
            number, shard = self._busy.pop(future)
            if not self._succeeded(future, number, shard):
                if shard:
                    plan.give_back(number, shard)
            elif shard:
                finished.append(shard)
            else:
                self._welcome(number, future.result())
        return finished

    def _succeeded(self, future: Future[Any], number: int, shard: Shard | None) -> bool:
        """Whether a worker did what it was to do; one that died did not, and is struck off."""
        exceptions = self._ray.exceptions
        died = (exceptions.RayActorError, exceptions.NodeDiedError, exceptions.OutOfMemoryError)
        try:
            future.result()
        except exceptions.RayTaskError as error:
            what = f"shard {shard[1]} of {shard[0]}" if shard else "the start"
            log.error("Ray worker %d failed at %s", number, what)
            # The worker's own exception, such as a StoreError, with Ray's trace behind it.
            raise error.cause from error
        except died as error:
            # Of a dead worker's two shards the second says nothing new.
            if worker := self._workers.pop(number, None):
                log.warning("Ray worker %d died, others take over: %s", number, _first_line(error))
                self._ready.discard(number)
                # One that only cannot be reached may live: two must not write one shard.
                self._ray.kill(worker)
            return False
        return True

    def _welcome(self, number: int, facts: WorkerFacts) -> None:
        self._ready.add(number)
        log.info(
            "Ray worker %d: process %d on %s, %s", number, facts.process, facts.host, facts.engine
        )
        if self.engine not in ("", facts.engine):
            raise EngineError(
                f"Ray worker {number} on {facts.host} runs {facts.engine}, but another runs "
                f"{self.engine}; install one version on every node, and set target.device to cpu "
                "or cuda, not auto"
            )
        self.engine = facts.engine


def _import_ray(address: str | None) -> Any:
    # Read by Ray when it is imported. It is not to send statistics, and need not hide the GPUs
    # from a worker that was given none: target.device says what is used.
    if address is None:
        # What Ray does by default where it supports no clusters of several machines: the node's
        # address is 127.0.0.1, and everything listens there alone (seen in Ray 2.60).
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            "extract.workers above 1 and extract.ray_address need Ray, which is not installed; "
            "run `pip install 'eagle3[ray]'`, or set extract.workers to 1 and extract.ray_address "
            "to null"
        ) from error
    return ray


@contextmanager
def _connected(ray: Any, address: str | None, cpus: int) -> Iterator[None]:
    """A cluster that runs, or one of this machine's own, which ends with the `with`."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    common = {"log_to_driver": True, "logging_level": logging.WARNING}
    try:
        if address is None:
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **common,
            )
        else:
            ray.init(address, **common)
    except (ConnectionError, ValueError) as error:
        raise EngineError(
            f"no Ray cluster at extract.ray_address ({address}): {_first_line(error)}; start one "
            "with `ray start --head`, or set extract.ray_address to null"
        ) from error
    finally:
        # Ray puts its own handler in the place of the stage's.
        if on_main_thread:
            signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        ray.shutdown()


def _gpus_a_worker(device: Device, resources: Mapping[str, float]) -> int:
    """As `target.device` is read on one machine: auto takes a GPU where there is one."""
    return int(device == "cuda" or (device == "auto" and resources.get("GPU", 0) > 0))


def _say_if_short(count: int, needs: Mapping[str, int], resources: Mapping[str, float]) -> None:
    wanted = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"]}
    room = min(int(resources.get(kind, 0) // each) for kind, each in wanted.items() if each)
    if room < count:
        log.warning(
            "Ray has room for %d of %d workers (each needs %d CPUs and %d GPUs); the others start "
            "when there is more",
            *(room, count, wanted["CPU"], wanted["GPU"]),
        )


def _shards(stores: Mapping[Split, StateWriter]) -> Iterator[tuple[Split, int, int]]:
    """Split, number and tokens of every shard, in the order of the corpus."""
    for split, store in stores.items():
        for shard in range(store.header.num_shards):
            span = store.header.span(shard)
            yield split, shard, span.stop - span.start


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
