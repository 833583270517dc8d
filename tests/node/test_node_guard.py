"""The memory of nonces: what it forgets and when, and that what it forgot cannot be used again."""

from __future__ import annotations

import time

import pytest

from kvctl.node.guard import Guard
from kvctl.node.messages import HttpError
from kvctl.transports.node_auth import Asked, MasterKey

ASKED = Asked("PUT", "/v1/k")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000_000.0
        monkeypatch.setattr(time, "time", lambda: self.now)


def test_expired_nonces_are_forgotten_and_their_tokens_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, master = Clock(monkeypatch), MasterKey.make()
    guard, key = Guard([master], [], nonces=1000), master.scoped("rw", "")

    def use(token: str) -> None:
        guard.check(ASKED, "10.0.0.1", token, need="rw", key="k", folder=False, once=True)

    used = []
    for _ in range(600):  # ten minutes, a token per second, each good for one
        used.append(key.token(ASKED, life=60))
        use(used[-1])
        clock.now += 1
    assert 60 <= guard._kept == sum(map(len, guard._seen.values())) <= 180
    for token, code in ((used[-1], "token_replayed"), (used[-50], "token_replayed"), (used[0], "token_expired")):
        with pytest.raises(HttpError) as refused:
            use(token)
        assert refused.value.code == code
    clock.now -= 590  # somebody sets the clock back: what is forgotten stays expired
    for token in used[:200]:
        with pytest.raises(HttpError) as refused:
            use(token)
        assert refused.value.code in {"token_expired", "token_too_long"}
    with pytest.raises(HttpError) as refused:
        use(used[-1])
    assert refused.value.code in {"token_replayed", "token_too_long"}


def test_no_more_are_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, master = Clock(monkeypatch), MasterKey.make()
    guard, key = Guard([master], [], nonces=10), master.scoped("rw", "")

    def use() -> None:
        guard.check(ASKED, "10.0.0.1", key.token(ASKED, life=60), need="rw", key="k", folder=False, once=True)

    for _ in range(10):
        use()
    with pytest.raises(HttpError) as refused:
        use()
    assert (refused.value.status, refused.value.code) == (503, "busy")
    clock.now += 121
    use()
    assert guard._kept == 1
