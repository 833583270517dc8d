"""`KvctlConnector`, a KV connector of vLLM over a kvctl repo.

    --kv-transfer-config '{"kv_connector": "KvctlConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"repo": "lab", "tenant": "alice"}}'

vLLM makes two: one beside its scheduler, one in each worker. This class is both, and hands on to `SchedulerSide` and
`WorkerSide`.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvctl.core.errors import UsageError
from kvctl_vllm import places
from kvctl_vllm.depot import Depot
from kvctl_vllm.identity import identify
from kvctl_vllm.loader import tensor_rank
from kvctl_vllm.messages import News, Orders
from kvctl_vllm.scheduling import SchedulerSide
from kvctl_vllm.settings import Settings
from kvctl_vllm.tiers import Tiers
from kvctl_vllm.working import WorkerSide

log = logging.getLogger("vllm.kvctl")
WORKERS: list[WorkerSide] = []  # of this process; the worker extension looks here


class KvctlConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    # vLLM's signatures are of its release, and its classes untyped here: Any throughout
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.parse(transfer.kv_connector_extra_config or {})
        if transfer.kv_load_failure_policy != "recompute":
            raise UsageError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a lost block would fail requests",
                hint='say "kv_load_failure_policy": "recompute" in --kv-transfer-config',
            )
        config = places.config(settings.config)
        key = places.repo_key(config, settings.repo, settings.kv_key_file)
        tiers = Tiers(Depot(places.repo_stores(config, settings.repo), settings.rest), settings.socket, settings.rest)
        identity = identify(vllm_config)
        groups = kv_cache_config.kv_cache_groups
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._told = News(-1, None)
        if role == KVConnectorRole.SCHEDULER:
            windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
            block = vllm_config.cache_config.block_size
            self._scheduler = SchedulerSide(settings, identity, tiers, key, block, windows)
        else:
            names = [list(group.layer_names) for group in groups]
            folder = str(vllm_config.model_config.model)
            self._worker = WorkerSide(
                settings, identity, tiers, key, names, folder, tensor_rank(), str(transfer.engine_id)
            )
            WORKERS.append(self._worker)

    # -- in the scheduler ----------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is not stored is computed again

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.orders()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def update_connector_output(self, connector_output: Any) -> None:
        news = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(news, News) and self._scheduler is not None:
            self._scheduler.heard(news)

    def reset_cache(self) -> bool:
        """The engine's caches were reset, perhaps since it has other weights."""
        if self._scheduler is not None:
            self._scheduler.forget()
        return True

    # -- in a worker ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        context = self._vllm_config.compilation_config.static_forward_context
        self._worker.register(kv_caches, {name: getattr(context.get(name), "isa", None) for name in kv_caches})

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        if self._worker is not None and isinstance(orders, Orders):
            self._worker.start(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return  # a session is stored once, at its end

    def wait_for_save(self) -> None:
        return

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        sent, received, failed = self._worker.results()
        return KVConnectorTransferResults(sent, received, failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        found = self.get_transfer_results(finished_req_ids)
        return found.finished_sending, found.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        return self._worker.news()

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
            if self._worker in WORKERS:
                WORKERS.remove(self._worker)
