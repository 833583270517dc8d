"""The contract of `kvctl.transports.api.Store`, as pytest tests that any store can be held to.

Subclass `StoreContract` in a test module (as `TestMyStore`) and override the fixture `case`. Raw access goes past
the store under test, so that two of its errors cannot hide each other. Needs pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import pytest

from kvctl.core.errors import ConflictError, KvctlError, NotFoundError, TransientError, UsageError
from kvctl.transports.api import Copies, Store

_WRITERS: Final = 16
STRANGE_KEYS: Final = (
    "plain", "with space", "a+b", "100%", "%2F", "ünïcödé/日本", "q?x=1&y=2#z", "semi;colon", "quote'\"",
    "dots.../..x", "-dash", "tilde~", "(paren)[bracket]{brace}", "<xml>&amp;", "deep/er/and/deeper",
)  # fmt: skip
BAD_KEYS: Final = ("", "/absolute", "double//slash", "trailing/", "..", "../up", "a/../b", "./here", "nul\0byte")


@dataclass(frozen=True)
class StoreCase:
    """A store with nothing in it. `raw_put` and `raw_get` reach the same objects by another way; `start_upload`
    leaves an unfinished upload of a key, where the store has such; `page` is how many objects one page lists.
    """

    store: Store
    raw_put: Callable[[str, bytes], None]
    raw_get: Callable[[str], bytes]
    start_upload: Callable[[str], None] | None = None
    page: int = 20


class StoreContract:
    """Override `case`."""

    @pytest.fixture
    def case(self) -> StoreCase:
        raise NotImplementedError("override the fixture `case`")

    def test_put_lands_where_others_see_it(self, case: StoreCase) -> None:
        info = case.store.put("a/b", b"hello")
        assert case.raw_get("a/b") == b"hello"
        assert (info.key, info.size) == ("a/b", 5)
        assert info == case.store.stat("a/b") or info.version == case.store.stat("a/b").version

    def test_get_and_stat_see_what_others_put(self, case: StoreCase) -> None:
        case.raw_put("a/b", b"hello")
        assert case.store.get("a/b") == b"hello"
        assert case.store.stat("a/b").size == 5

    def test_a_memoryview_is_put_as_its_bytes(self, case: StoreCase) -> None:
        case.store.put("view", memoryview(bytearray(b"xhellox"))[1:6])
        assert case.raw_get("view") == b"hello"

    def test_an_empty_object_exists(self, case: StoreCase) -> None:
        assert case.store.put("empty", b"").size == 0
        assert case.store.stat("empty").size == 0
        assert case.store.get("empty") == b""
        assert case.store.get("empty", 0, 10) == b""
        assert [item.key for item in case.store.list()] == ["empty"]

    def test_what_is_missing_is_not_found_by_name(self, case: StoreCase) -> None:
        for call in (case.store.stat, case.store.get, lambda key: case.store.get(key, 0, 5)):
            with pytest.raises(NotFoundError, match="no-such-key"):
                call("no-such-key")

    def test_replacing_changes_the_version_and_reading_does_not(self, case: StoreCase) -> None:
        first = case.store.put("k", b"one")
        case.store.get("k")
        assert case.store.stat("k").version == first.version
        second = case.store.put("k", b"two")
        assert second.version != first.version
        assert case.store.stat("k").version == second.version
        assert case.store.get("k") == b"two"

    def test_times_are_of_the_stores_own_clock(self, case: StoreCase) -> None:
        info = case.store.put("k", b"one")
        now = case.store.now()
        assert now.utcoffset() == timedelta(0)
        assert case.store.stat("k").modified.utcoffset() == timedelta(0)
        assert abs(now - info.modified) < timedelta(minutes=5)

    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [
            (0, None, b"0123456789"),
            (0, 3, b"012"),
            (3, 4, b"3456"),
            (9, 1, b"9"),
            (8, 10, b"89"),
            (5, None, b"56789"),
            (10, 1, b""),
            (11, 5, b""),
            (0, 0, b""),
        ],
    )
    def test_ranges(self, case: StoreCase, start: int, length: int | None, expected: bytes) -> None:
        case.raw_put("digits", b"0123456789")
        assert case.store.get("digits", start, length) == expected

    @pytest.mark.parametrize("key", STRANGE_KEYS)
    def test_strange_keys_are_literal(self, case: StoreCase, key: str) -> None:
        case.store.put(key, key.encode())
        assert case.raw_get(key) == key.encode()
        assert case.store.get(key) == key.encode()
        assert [item.key for item in case.store.list()] == [key]
        assert [item.key for item in case.store.list(key[:3])] == [key]
        case.store.delete([key])
        with pytest.raises(NotFoundError):
            case.store.stat(key)

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused(self, case: StoreCase, key: str) -> None:
        with pytest.raises(UsageError):
            case.store.put(key, b"x")
        with pytest.raises(UsageError):
            case.store.get(key)
        with pytest.raises(UsageError):
            case.store.stat(key)
        with pytest.raises(UsageError):
            case.store.delete([key])

    def test_list_is_ordered_bytewise_and_by_prefix(self, case: StoreCase) -> None:
        keys = ["a-b", "a.b", "a/1", "a/2/x", "a0", "ab", "b/1", "Z", "é"]
        for key in keys:
            case.raw_put(key, key.encode())
        expected = sorted(keys, key=lambda key: key.encode())
        assert [item.key for item in case.store.list()] == expected
        assert [item.key for item in case.store.list("a")] == [key for key in expected if key.startswith("a")]
        assert [item.key for item in case.store.list("a/")] == ["a/1", "a/2/x"]
        assert [item.key for item in case.store.list("a/2")] == ["a/2/x"]
        assert list(case.store.list("none")) == []
        assert list(case.store.list("none/such")) == []

    def test_list_and_stat_agree(self, case: StoreCase) -> None:
        case.store.put("k", b"12345")
        (listed,) = case.store.list("k")
        stat = case.store.stat("k")
        assert (listed.key, listed.size, listed.version) == (stat.key, stat.size, stat.version)

    def test_list_goes_on_behind_a_page(self, case: StoreCase) -> None:
        keys = [f"p/{number:05}" for number in range(2 * case.page + 1)]
        for key in keys:
            case.raw_put(key, b"")
        assert [item.key for item in case.store.list("p/")] == keys

    def test_a_put_is_in_the_next_list(self, case: StoreCase) -> None:
        if not case.store.capabilities.strong_list:
            return
        for number in range(5):
            case.store.put(f"k{number}", b"")
            assert len(list(case.store.list())) == number + 1
        case.store.delete(["k0"])
        assert len(list(case.store.list())) == 4

    def test_delete_takes_many_and_missing_ones(self, case: StoreCase) -> None:
        for key in ("a", "b/c", "keep"):
            case.raw_put(key, b"x")
        case.store.delete(["missing"])
        case.store.delete([])
        case.store.delete(["a", "missing", "b/c", "b/missing/too"])
        assert [item.key for item in case.store.list()] == ["keep"]

    def test_put_if_absent(self, case: StoreCase) -> None:
        if not case.store.capabilities.conditional_put:
            with pytest.raises(UsageError):
                case.store.put("k", b"one", if_absent=True)
            with pytest.raises(NotFoundError):
                case.store.stat("k")
            return
        first = case.store.put("k", b"one", if_absent=True)
        with pytest.raises(ConflictError, match="k"):
            case.store.put("k", b"two", if_absent=True)
        assert case.raw_get("k") == b"one"
        assert case.store.stat("k").version == first.version

    def test_put_if_version(self, case: StoreCase) -> None:
        first = case.store.put("k", b"one")
        if not case.store.capabilities.conditional_put:
            with pytest.raises(UsageError):
                case.store.put("k", b"two", if_version=first.version)
            assert case.raw_get("k") == b"one"
            return
        second = case.store.put("k", b"two", if_version=first.version)
        with pytest.raises(ConflictError, match="k"):
            case.store.put("k", b"three", if_version=first.version)
        assert case.raw_get("k") == b"two"
        assert case.store.stat("k").version == second.version
        with pytest.raises(ConflictError, match="missing"):
            case.store.put("missing", b"x", if_version=first.version)

    def test_a_race_of_writers_has_one_winner(self, case: StoreCase) -> None:
        if not case.store.capabilities.conditional_put:
            return
        winners = _race(lambda mine: case.store.put("lock", mine, if_absent=True))
        assert [case.raw_get("lock")] == winners
        before = case.store.stat("lock").version
        winners = _race(lambda mine: case.store.put("lock", b"again " + mine, if_version=before))
        assert [case.raw_get("lock")] == [b"again " + mine for mine in winners]

    def test_delete_if_version(self, case: StoreCase) -> None:
        first = case.store.put("k", b"one")
        if not case.store.capabilities.conditional_delete:
            with pytest.raises(UsageError):
                case.store.delete(["k"], if_version=first.version)
            assert case.raw_get("k") == b"one"
            return
        second = case.store.put("k", b"two")
        with pytest.raises(ConflictError, match="k"):
            case.store.delete(["k"], if_version=first.version)
        assert case.raw_get("k") == b"two"
        case.store.delete(["k"], if_version=second.version)
        with pytest.raises(NotFoundError):
            case.store.stat("k")
        with pytest.raises(UsageError):
            case.store.delete(["a", "b"], if_version=first.version)

    def test_copy_inside_the_store(self, case: StoreCase) -> None:
        store = case.store
        first = store.put("from/a b", b"0123456789")
        if not store.capabilities.copy:
            if isinstance(store, Copies):
                with pytest.raises(UsageError):
                    store.copy("from/a b", "to/c", if_version=first.version)
            return
        assert isinstance(store, Copies), "the capability `copy` needs the method"
        for _ in range(2):  # onto nothing, and onto itself
            made = store.copy("from/a b", "to/c+d", if_version=first.version).info
            assert (made.key, made.size) == ("to/c+d", 10)
            assert made.version == store.stat("to/c+d").version
        assert [item.key for item in store.list()] == ["from/a b", "to/c+d"]
        assert list(store.uploads()) == []
        # from here on the two have nothing to do with each other
        second = store.put("from/a b", b"other")
        assert case.raw_get("to/c+d") == b"0123456789"
        with pytest.raises(ConflictError, match="from/a b"):
            store.copy("from/a b", "to/c+d", if_version=first.version)
        assert case.raw_get("to/c+d") == b"0123456789"
        store.copy("from/a b", "to/c+d", if_version=second.version)
        store.put("to/c+d", b"mine")
        assert case.raw_get("from/a b") == b"other"
        with pytest.raises(NotFoundError):
            store.copy("no-such-key", "to/e", if_version=second.version)
        with pytest.raises(NotFoundError):
            store.stat("to/e")

    def test_unfinished_uploads(self, case: StoreCase) -> None:
        if not case.store.capabilities.uploads:
            assert list(case.store.uploads()) == []
            return
        assert case.start_upload is not None, "a store with uploads needs `start_upload` in its case"
        case.start_upload("some/big.bin")
        (upload,) = case.store.uploads()
        assert upload.key.startswith("some/big.bin")
        assert abs(case.store.now() - upload.started) < timedelta(minutes=5)
        assert list(case.store.list()) == []
        case.store.abort(upload)
        assert list(case.store.uploads()) == []

    def test_it_may_be_used_by_many_threads(self, case: StoreCase) -> None:
        def work(number: int) -> None:
            data = bytes([number]) * 1000
            case.store.put(f"t/{number}", data)
            if case.store.get(f"t/{number}") != data or case.store.stat(f"t/{number}").size != 1000:
                raise AssertionError(number)

        failures = _together(work)
        assert failures == []
        assert len(list(case.store.list("t/"))) == _WRITERS

    def test_close_may_be_called_twice(self, case: StoreCase) -> None:
        case.store.close()
        case.store.close()


def _together(work: Callable[[int], None]) -> list[Exception]:
    barrier = threading.Barrier(_WRITERS)
    failures: list[Exception] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except Exception as problem:
            failures.append(problem)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def _race(put: Callable[[bytes], object]) -> list[bytes]:
    """What the winners of one race wrote; the others must have lost in the proper way."""
    winners: list[bytes] = []

    def work(number: int) -> None:
        mine = f"writer {number}".encode()
        put(mine)
        winners.append(mine)

    failures = _together(work)
    strange = [problem for problem in failures if not isinstance(problem, TransientError)]
    assert strange == []
    assert all(isinstance(problem, KvctlError) for problem in failures)
    return winners
