"""Engines that use a slot, driven along with its swaps: all of them take the new generation and hold their requests,
then the slot flips, then they go on. When one refuses, those that took it go back, and nothing has happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import urlencode

from kvctl.core.errors import KvctlError, NothingServesError, PartialError
from kvctl.engines.api import EngineAdapter, SwapRequest, SwapResult


class Driver(Protocol):
    """What a swap does beside the slot's flip. `prepare` raises when the generation must not serve, having undone what
    it did; `undo` after it when the flip failed; `finish` when the slot has flipped.
    """

    def prepare(self, slot: str, ident: str) -> None: ...
    def finish(self) -> None: ...
    def undo(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """`smoke` runs when every engine has the new weights, and none lets requests in: what it raises undoes the swap."""

    in_flight: str = "drain"
    drain_seconds: float = 60.0
    hold_seconds: float = 300.0
    keep_previous: bool = False
    smoke: Callable[[], None] | None = None


class EngineDriver:
    """See `Driver`. `open_engine` makes the adapter of a URL. `results`: what each engine said, by URL."""

    def __init__(
        self,
        engines: Sequence[str],
        open_engine: Callable[[str], EngineAdapter],
        *,
        socket: str | None = None,
        options: DriveOptions | None = None,
    ) -> None:
        self._urls = list(engines)
        self._open = open_engine
        self._socket = socket
        self._options = options or DriveOptions()
        self._held: list[tuple[str, EngineAdapter]] = []
        self.results: dict[str, SwapResult] = {}

    def prepare(self, slot: str, ident: str) -> None:
        options = self._options
        query = {"generation": ident, **({"socket": self._socket} if self._socket else {})}
        request = SwapRequest(
            f"slot://{slot}?{urlencode(query)}", in_flight=options.in_flight, drain_seconds=options.drain_seconds,
            keep_previous=options.keep_previous, hold=True, hold_seconds=options.hold_seconds,
        )  # fmt: skip
        try:
            for url in self._urls:
                adapter = self._open(url)
                try:
                    self.results[url] = adapter.swap(replace(request))
                except BaseException:
                    adapter.close()
                    raise
                self._held.append((url, adapter))
            if options.smoke is not None:
                options.smoke()
        except BaseException as error:
            self._undo_after(error)
            raise

    def _undo_after(self, error: BaseException) -> None:
        """Raises NothingServesError where an engine cannot go back."""
        try:
            self.undo()
        except KvctlError as worse:
            raise NothingServesError(
                "the swap failed, and an engine could not go back", cause=f"{error}; {worse}", hint="start it again"
            ) from error

    def undo(self) -> None:
        """Raises the first error, after all have been asked to go back."""
        first: KvctlError | None = None
        for url, adapter in reversed(self._held):
            try:
                adapter.rollback()
            except KvctlError as error:
                error.what = f"{url}: {error.what}"
                first = first or error
        self._end()
        if first is not None:
            raise first

    def finish(self) -> None:
        """Raises PartialError when an engine does not go on: it holds its requests until its time is up, then returns
        to the old weights.
        """
        failed: list[str] = []
        for url, adapter in self._held:
            try:
                self.results[url] = adapter.finish()
            except KvctlError as error:
                failed.append(f"{url}: {error}")
        self._end()
        if failed:
            raise PartialError(
                "the slot serves the new weights, but not every engine does", cause="; ".join(failed),
                hint="swap the engine itself: kvctl swap engine:URL",
            )  # fmt: skip

    def _end(self) -> None:
        for _, adapter in self._held:
            with contextlib.suppress(KvctlError):
                adapter.close()
        self._held = []
