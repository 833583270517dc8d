"""The connector in the scheduler's process: what of a new request is stored, and what to store of one that ends. Looks
up in threads; a step never waits for a store.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from kvctl.core.errors import KvctlError
from kvctl.kv.prefix import Prefix, Want
from kvctl_vllm.identity import Identity
from kvctl_vllm.messages import Load, News, Orders, Store
from kvctl_vllm.settings import PARAMS, Ask, Settings
from kvctl_vllm.tiers import SHARED, Found, Tiers

log = logging.getLogger("vllm.kvctl")
LOOKERS: Final = 2
Request = Any  # vLLM's own, of any release


@dataclass(slots=True)
class _Asked:
    """A request on its way in. `generation`: of the weights that `found` is about. `ordered`: after how many
    preemptions it was loaded last; a load that failed is not tried again, the request computes.
    """

    ask: Ask
    deadline: float
    future: Future[tuple[Want | None, Found]] | None = None
    generation: int = -1
    want: Want | None = None
    found: Prefix | None = None
    tier: str = SHARED
    start: int = 0
    ordered: int = -1


class SchedulerSide:
    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        tiers: Tiers,
        key: bytes | None,
        block: int,
        windows: Sequence[int | None],
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._tiers = tiers
        self._key = key
        self._block = block
        self._windows = tuple(windows)
        self._pool = ThreadPoolExecutor(LOOKERS, "kvctl-look")
        self._asked: dict[str, _Asked] = {}
        self._orders = Orders()
        self._news = News(-1, None)
        self._told = False
        self._mixed: set[str] = set()  # requests that began under other weights than those held now

    # -- new requests --------------------------------------------------------------------------------------

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` are stored; None: not known yet."""
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._ask(request)
            if asked is None:
                return 0, False
        if self._tiers.resting or asked.ordered >= request.num_preemptions:
            return 0, False
        if self._news.generation < 0 and (asked.ask.pull or asked.ask.push) and time.monotonic() < asked.deadline:
            return None, False  # an empty step brings the worker's news; what ends before them could not be stored
        if not asked.ask.pull:
            return 0, False
        if asked.generation != self._news.generation:
            asked.future, asked.generation = None, self._news.generation
        if asked.future is None and self._news.digest is not None:
            asked.future = self._pool.submit(self._look, request, asked.ask, self._news.digest, computed)
        if asked.future is None or not asked.future.done():
            if self._news.generation >= 0 and self._news.digest is None:
                if self._news.problem:
                    self._tell(self._news.problem)
                return 0, False  # nobody waits for a digest that is still made
            if time.monotonic() < asked.deadline:
                return None, False
            if asked.future is not None:
                self._tiers.shared.depot.failed(
                    "looking up a prefix", TimeoutError(f"no answer in {self._settings.lookup:g} s")
                )
            return 0, False
        asked.want, found = asked.future.result()
        asked.found, asked.tier = found.prefix, found.tier
        asked.start = computed
        tokens = 0 if asked.found is None else asked.found.tokens - computed
        if tokens < self._settings.min_tokens:
            return 0, False
        return tokens, self._beside

    @property
    def _beside(self) -> bool:
        """Whether loads run beside the engine's steps. With several cache groups always: a load that fails under a
        running step cannot be taken back there.
        """
        return self._settings.mode == "prefix" or len(self._windows) > 1

    def _ask(self, request: Request) -> _Asked | None:
        if getattr(request, "mm_features", None) or request.prompt_token_ids is None:
            return None  # what images and embeddings mean is not a part of the keys yet
        try:
            ask = Ask.parse(request.kv_transfer_params, self._settings)
        except KvctlError as error:
            log.warning("kvctl: request %s: %s", request.request_id, error)
            return None
        found = self._asked[request.request_id] = _Asked(ask, time.monotonic() + self._settings.lookup)
        return found

    def _want(self, request: Request, ask: Ask, digest: str, tokens: Sequence[int]) -> Want:
        adapter = getattr(request, "lora_request", None)
        descriptor = self._identity.descriptor(
            digest,
            adapter=None if adapter is None else str(adapter.lora_path),
            salt=getattr(request, "cache_salt", None),
            key=self._key,
            tenant=ask.tenant,
        )
        return Want(descriptor, array("I", tokens), ask.tenant, self._key)

    def _look(self, request: Request, ask: Ask, digest: str, computed: int) -> tuple[Want | None, Found]:
        """In a thread. Raises nothing: what goes wrong is logged, and the request computes."""
        # The last token is always computed: its logits are what the request is for. What is loaded beside the steps may
        # reach over it, but not where a window would have to begin one token earlier for that.
        over = self._beside and not any(self._windows)
        prompt = request.prompt_token_ids
        try:
            want = self._want(request, ask, digest, prompt if over else prompt[:-1])
        except Exception as error:
            log.warning("kvctl: request %s: %s", request.request_id, error)
            return None, Found()
        ctx, least = self._tiers.shared.depot.ctx, self._settings.min_tokens
        return want, self._tiers.find(want, ctx, session=ask.session, above=computed, least=least)

    def allocated(self, request: Request, blocks: Any, tokens: int) -> None:  # Any: KVCacheBlocks
        asked = self._asked.get(request.request_id)
        if not tokens or asked is None or asked.want is None or asked.found is None:
            return
        asked.ordered = request.num_preemptions
        ids = tuple(tuple(group) for group in blocks.get_block_ids())
        self._orders.loads.append(
            Load(
                request.request_id, asked.want, asked.found, asked.tier, asked.start, asked.start + tokens, ids,
                waits=not self._beside,
            )
        )  # fmt: skip
        log.info(
            "kvctl: request %s: %d of %d prompt tokens are loaded from %s, %d were here (%s)",
            request.request_id, tokens, request.num_prompt_tokens, asked.tier, asked.start, asked.found.reason,
        )  # fmt: skip

    def orders(self) -> Orders:
        found, self._orders = self._orders, Orders()
        found.looked.extend(self._tiers.taken())
        return found

    # -- requests that end -----------------------------------------------------------------------------------

    def finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        asked = self._asked.pop(request.request_id, None) or self._ask(request)
        told = self._answer(request, asked)
        self._asked.pop(request.request_id, None)
        if request.request_id in self._mixed:
            self._mixed.discard(request.request_id)
            return False, told
        if asked is None or not asked.ask.push or self._news.digest is None or self._tiers.resting:
            return False, told
        if request.status.name not in {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}:
            return False, told
        processed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        tokens = self._storable(min(processed, request.num_tokens - 1), blocks)
        known = 0 if asked.found is None else asked.found.tokens
        if tokens < self._settings.min_tokens or (asked.ask.session is None and tokens <= known):
            return False, told
        try:
            want = self._want(request, asked.ask, self._news.digest, request.all_token_ids[:tokens])
        except Exception as error:  # an adapter's files, ..: the engine goes on
            log.warning("kvctl: request %s is not stored: %s", request.request_id, error)
            return False, told
        self._orders.stores.append(
            Store(
                request.request_id, want, tuple(tuple(group) for group in blocks), asked.ask.target,
                asked.ask.with_tokens, self._news.generation,
            )
        )  # fmt: skip
        if told is not None:
            told[PARAMS]["stores"] = tokens
        return True, told

    def _answer(self, request: Request, asked: _Asked | None) -> dict[str, Any] | None:
        """What the response says to a client that spoke of kvctl: tokens of its prompt that were here, that were found
        in the store beyond, that will be stored.
        """
        if asked is None or not (request.kv_transfer_params or {}).get(PARAMS):
            return None
        found = 0 if asked.found is None else max(0, asked.found.tokens - asked.start)
        return {PARAMS: {"here": asked.start, "found": found, "stores": 0}}

    def _storable(self, tokens: int, blocks: Sequence[Sequence[int]]) -> int:
        """Whole blocks of 16, where every sliding group still holds the window before their end; else all of it."""
        whole = tokens // 16 * 16
        for window, ids in zip(self._windows, blocks, strict=False):
            if window is None:
                continue
            gone = next((number for number, page in enumerate(ids) if page), len(ids)) * self._block
            if gone > max(0, whole - (window - 1)):
                return tokens
        return whole

    # -- the worker's news -----------------------------------------------------------------------------------

    def heard(self, news: News) -> None:
        self._news = news

    def forget(self) -> None:
        """Other weights may have come: nothing is looked up until the worker says which."""
        self._news = News(-1, None)
        self._mixed.update(self._asked)
        self._asked.clear()

    def _tell(self, problem: str) -> None:
        if not self._told:
            self._told = True
            log.warning("kvctl: KV is neither stored nor loaded: %s", problem)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._tiers.close()
