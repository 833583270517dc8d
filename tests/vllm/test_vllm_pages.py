"""The engine's paged memory and canonical bytes, with vLLM's own operators; no engine runs."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

pytestmark = pytest.mark.engine
HEADS, BLOCK, DIM, BLOCKS = 2, 128, 32, 6


@pytest.fixture(scope="module")
def torch() -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM's modules warn of on their way in
        import vllm._custom_ops
        import vllm.v1.attention.backends.cpu_attn  # noqa: F401
    return torch


def filled(torch: Any, tokens: int, seed: int = 0) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(HEADS, tokens, DIM, generator=made) for _ in range(2))


def isa(torch: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(torch.float32, BLOCK, DIM))


def test_what_is_written_into_pages_is_read_again(torch: Any) -> None:
    from kvctl_vllm.paging import CpuPages, prove, slots_of

    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)
    pages = CpuPages(cache, isa(torch), prove(cache, isa(torch)))
    ids = [4, 1, 3]
    for first, end in ((0, 384), (0, 1), (100, 130), (128, 256), (255, 257), (300, 384)):
        k, v = filled(torch, end - first, seed=end)
        pages.write(slots_of(ids, BLOCK, first, end), k, v)
        got = torch.zeros_like(k), torch.zeros_like(v)
        pages.read(ids, first, end, *got)
        assert torch.equal(got[0], k)
        assert torch.equal(got[1], v)


def test_writing_touches_no_other_token(torch: Any) -> None:
    from kvctl_vllm.paging import CpuPages, prove, slots_of

    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)
    pages = CpuPages(cache, isa(torch), prove(cache, isa(torch)))
    whole = filled(torch, 256)
    pages.write(slots_of([2, 5], BLOCK, 0, 256), *whole)
    part = filled(torch, 20, seed=9)
    pages.write(slots_of([2, 5], BLOCK, 120, 140), *part)
    got = torch.zeros_like(whole[0]), torch.zeros_like(whole[1])
    pages.read([2, 5], 0, 256, *got)
    for mine, before, new in zip(got, whole, part, strict=True):
        assert torch.equal(mine[:, :120], before[:, :120])
        assert torch.equal(mine[:, 120:140], new)
        assert torch.equal(mine[:, 140:], before[:, 140:])
    assert not cache[[0, 1, 3, 4]].any()


def test_keys_in_any_packing_are_found_again(torch: Any) -> None:
    """Other kernels pack keys otherwise: here as this machine's do, and shuffled."""
    from kvctl_vllm.paging import CpuPages, slots_of

    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM)
    plain = CpuPages(cache, isa(torch))
    k, v = filled(torch, BLOCK)
    plain.write(slots_of([3], BLOCK, 0, BLOCK), k, v)
    order = torch.tensor(random.Random(0).sample(range(BLOCK * DIM), BLOCK * DIM))
    keys, _ = plain._halves()
    # element e of a head's [dim, block] moves to order[e]; canonical element (t, d) was at d * BLOCK + t
    shuffled = torch.empty(HEADS, BLOCK * DIM)
    shuffled[:, order] = keys[3].reshape(HEADS, -1)
    keys[3] = shuffled.view(HEADS, BLOCK, DIM)
    canonical = torch.arange(BLOCK * DIM).view(DIM, BLOCK).t().reshape(-1)
    pages = CpuPages(cache, isa(torch), order[canonical])
    got = torch.zeros_like(k), torch.zeros_like(v)
    pages.read([3], 0, BLOCK, *got)
    assert torch.equal(got[0], k)
    assert torch.equal(got[1], v)


@pytest.mark.parametrize("axis", [0, 1])
def test_pages_of_gpu_backends_whatever_their_strides(torch: Any, axis: int) -> None:
    from kvctl.kv.identity import Group
    from kvctl_vllm.paging import pages_of, slots_of

    shape = [BLOCKS, 16, HEADS, DIM]
    shape.insert(axis, 2)
    cache = torch.zeros(*shape)
    pages = pages_of("model.layers.0.attn", cache, Group("full", (0,), HEADS, DIM, DIM), HEADS, None)
    k, v = filled(torch, 40)
    pages.write(slots_of([5, 0, 2, 3], 16, 7, 47), k, v)
    got = torch.zeros_like(k), torch.zeros_like(v)
    pages.read([5, 0, 2, 3], 7, 47, *got)
    assert torch.equal(got[0], k)
    assert torch.equal(got[1], v)
    keys = cache.select(axis, 0)
    assert torch.equal(keys[5, 7], k[:, 0])  # token 7 is the 8th row of the first block


def test_latent_pages_keep_latent_and_rope_apart(torch: Any) -> None:
    from kvctl.kv.identity import Group
    from kvctl_vllm.paging import pages_of, slots_of

    pages = pages_of("model.layers.0.attn", torch.zeros(BLOCKS, 16, 24), Group("mla", (0,), 1, 16, 8), 1, None)
    made = torch.Generator().manual_seed(3)
    k, v = torch.randn(1, 20, 16, generator=made), torch.randn(1, 20, 8, generator=made)
    pages.write(slots_of([1, 4], 16, 0, 20), k, v)
    got = torch.zeros_like(k), torch.zeros_like(v)
    pages.read([1, 4], 0, 20, *got)
    assert torch.equal(got[0], k)
    assert torch.equal(got[1], v)


def test_a_form_that_is_not_known_is_refused(torch: Any) -> None:
    from kvctl.core.errors import IncompatibleError
    from kvctl.kv.identity import Group
    from kvctl_vllm.paging import pages_of

    group = Group("full", (0,), HEADS, DIM, DIM)
    with pytest.raises(IncompatibleError, match=r"model\.layers\.7"):
        pages_of("model.layers.7.attn", torch.zeros(4, 3, 8), group, HEADS, "vec")


def test_a_ranks_slice_is_read_once_and_only_by_narrow(torch: Any) -> None:
    from kvctl_vllm.slices import RankSlice

    whole = torch.arange(48.0).view(8, 6)
    fetched: list[int] = []

    def fetch() -> Any:
        fetched.append(1)
        return whole

    found = RankSlice.make(whole[2:4], (8, 6), rank=1, ranks=4, fetch=fetch)
    assert tuple(found.shape) == (8, 6)
    assert found.size(0) == 8
    assert found.dtype == torch.float32
    target = torch.zeros(2, 6)
    target.copy_(found.narrow(0, 2, 2))
    assert torch.equal(target, whole[2:4])
    assert not fetched
    target.copy_(found.narrow(0, 6, 2))  # not this rank's by the rules: the whole is read, the bytes are right
    assert torch.equal(target, whole[6:8])
    assert torch.equal(found.t().contiguous(), whole.t())
    assert len(fetched) == 2


def test_heads_that_ranks_share_are_where_vllm_looks_for_them(torch: Any) -> None:
    from kvctl_vllm.slices import RankSlice

    whole = torch.arange(16.0).view(4, 4)  # 2 heads of 2 rows, 4 ranks
    for rank in range(4):
        head = rank // 2
        found = RankSlice.make(whole[2 * head : 2 * head + 2], (4, 4), rank, 4, lambda: pytest.fail("read whole"))
        assert torch.equal(found.narrow(0, 2 * head, 2), whole[2 * head : 2 * head + 2])
