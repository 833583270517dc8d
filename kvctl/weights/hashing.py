"""Tensor digests of a file whose data section is read region by region, in order. Owns no memory, does no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.core.errors import IntegrityError
from kvctl.weights.digests import TensorDigest, TensorHasher, tensor_digest
from kvctl.weights.safetensors import Header, TensorInfo


class FileHasher:
    """Fed regions [start, start + len) of the data section with ascending starts; regions may overlap, and whole
    tensors that lie in gaps between them come by `whole`.
    """

    def __init__(self, header: Header) -> None:
        self._tensors: Sequence[TensorInfo] = [tensor for tensor in header.tensors if tensor.nbytes]
        self._empty = [tensor for tensor in header.tensors if not tensor.nbytes]
        self._first = 0  # tensors before it are done
        self._mark = 0  # every byte before it that a region will bring was hashed
        self._current: TensorHasher | None = None
        self._digests: dict[str, str] = {}

    def region(self, start: int, data: memoryview) -> None:
        end = start + len(data)
        at = max(start, self._mark)
        while at < end and self._first < len(self._tensors):
            tensor = self._tensors[self._first]
            if tensor.end <= at:
                self._close(tensor)
                continue
            if tensor.start >= end:
                break
            at = max(at, tensor.start)
            if self._current is None:
                if at > tensor.start:
                    raise IntegrityError(f"tensor {tensor.name!r} was read with a hole before byte {at}")
                self._current = TensorHasher(tensor.dtype, tensor.shape, tensor.nbytes)
            stop = min(end, tensor.end)
            self._current.update(data[at - start : stop - start])
            at = stop
            if at == tensor.end:
                self._close(tensor)
        self._mark = max(self._mark, end)

    def whole(self, start: int, data: memoryview) -> None:
        """Bytes that hold whole tensors: those not hashed yet are."""
        end = start + len(data)
        for tensor in self._tensors:
            if tensor.start >= start and tensor.end <= end and tensor.name not in self._digests:
                self._digests[tensor.name] = tensor_digest(tensor, data[tensor.start - start : tensor.end - start])

    def _close(self, tensor: TensorInfo) -> None:
        if self._current is not None:
            self._digests[tensor.name] = self._current.digest()
        self._current = None
        self._first += 1

    def finish(self) -> list[TensorDigest]:
        """Raises IntegrityError when a tensor was not fed whole."""
        for tensor in self._empty:
            self._digests[tensor.name] = tensor_digest(tensor, b"")
        found: list[TensorDigest] = []
        for tensor in [*self._tensors, *self._empty]:
            digest = self._digests.get(tensor.name)
            if digest is None:
                raise IntegrityError(f"tensor {tensor.name!r} was not read whole")
            found.append(TensorDigest(tensor.name, tensor.dtype, tensor.shape, digest))
        return found
