"""Whether a checkpoint is written past the page cache. It comes from memory that stays as it is, and nobody reads all
of it soon: O_DIRECT takes no copy, and throws nothing out of the page cache that engines need. Whether a folder
takes it is known to the plug-in that writes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvctl.core.addresses import StoreConfig
from kvctl.transports.registry import unusable


def write_options(
    configs: Sequence[StoreConfig], transport: str, options: Mapping[str, str]
) -> tuple[Mapping[str, str], str]:
    """The transport's options with `direct` set as it is best for these stores, and a note for the report; as they are,
    and no note, where the options say it, or another transport than `file` writes.
    """
    files = all(config.scheme == "file" for config in configs)
    if not files or transport not in {"auto", "file"} or "direct" in options:
        return options, ""
    for config in configs:
        refusal = unusable("file", "direct", config)
        if refusal:
            return options, f"written through the page cache: {refusal}"
    return {**options, "direct": "true"}, ""
