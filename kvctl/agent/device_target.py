"""A slot on a GPU as the target of a load: memory that the agent allocated there, mapped here for writing until all has
landed and was verified. The bytes take the ways of any load onto a device (`kvctl.weights.ondevice`).

A GPU's memory cannot be sealed as a memfd can. The mapping here ends before the agent lets the slot serve, and whoever
attaches maps it for reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvctl.agent.target import SlotTarget
from kvctl.memory.devices import Device
from kvctl.weights.ondevice import DeviceTarget
from kvctl.weights.runs import OutputFile
from kvctl.weights.targets import Landing


class DeviceSlotTarget(DeviceTarget):
    """Owns the target and the devices: one, or one for each output."""

    def __init__(self, slot: SlotTarget, *devices: Device) -> None:
        super().__init__(*devices, keep=False)
        self._slot = slot
        self.name = f"{slot.name} on {self.name}"

    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        """Raises what `SlotTarget.open` does, and EnvError."""
        if self._slot.open(outputs, side_files, fingerprint):
            return True
        placed: list[Landing] = []
        self.placed = placed  # `close` ends what is there already
        for number, (space, fd) in enumerate(self._slot.spaces):
            mapped = self._slot.device_of(number).map(fd, space.nbytes, writable=True)
            placed.append(Landing(self.device_of(number).over(mapped), space.start))
        return False

    def publish(self) -> None:
        super().publish()
        for landing in self.placed:
            landing.buffer.close()
        self._slot.publish()

    def close(self, error: BaseException | None) -> None:
        try:
            super().close(error)
        finally:
            self._slot.close(error)  # what was not committed is freed
