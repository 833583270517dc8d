"""A plain source as a load plan: one safetensors file or a Hugging Face folder, in any store, without conversion."""

from __future__ import annotations

import json
from typing import Final

from kvctl.core.addresses import parse_store
from kvctl.core.context import Context
from kvctl.core.errors import FormatError
from kvctl.transfer.lanes import Member, open_member
from kvctl.transfer.tasks import Place
from kvctl.weights.plan import MAX_RUN, SourceObject, plan_runs
from kvctl.weights.planning import LoadPlan, Opened, fingerprint_of, keeps_files, lay_out
from kvctl.weights.request import LoadRequest
from kvctl.weights.sources import WeightSource, open_source, split_source
from kvctl.weights.strided import span

FILE_RUN: Final = 2 * MAX_RUN
NO_DIGESTS: Final = "the source has no digests (`kvctl models digest` makes them, --require-digests uses them)"


class PlainModel(Opened):
    """An opened plain source."""

    def __init__(self, request: LoadRequest, ctx: Context) -> None:
        self.request = request
        config, prefix = split_source(parse_store(request.address))
        member = open_member(config.url, 0, config, ctx)
        self.members: tuple[Member, ...] = (member,)
        try:
            self.source: WeightSource = open_source(member.store, prefix, ctx)
        except BaseException:
            member.store.close()
            raise

    def close(self) -> None:
        for member in self.members:
            member.store.close()

    def plan(self) -> LoadPlan:
        source, request = self.source, self.request
        files = source.files
        layout, sliced = lay_out(request, [(file.name, file.header) for file in files], self.config, congruent=True)
        objects = [
            SourceObject(
                number,
                (Place(0, file.key, file.version),),
                file.size,
                ((file.header.header_size, span(0, file.header.data_size)),),
            )
            for number, file in enumerate(files)
            if file.header.data_size
        ]
        side = {}
        if keeps_files(request):
            side = {item.name: source.read_sidecar(item) for item in source.sidecars}
            if source.index_name and source.index_data is not None and not sliced.ranks:
                side[source.index_name] = source.index_data
        return LoadPlan(
            source=request.address,
            outputs=layout.outputs,
            tensors=layout.tensors,
            runs=tuple(plan_runs(objects, layout.wants, max_run=self._max_run)),
            members=(self.members[0].name,),
            objects=len(files),
            fingerprint=fingerprint_of([[[f.name, f.size, f.version] for f in files], sliced.identity(request)]),
            side_files=side,
            metadata_bytes=source.metadata_bytes,
            metadata_requests=source.requests,
            unverified_because=NO_DIGESTS,
            tp=sliced.tp,
            notes=(*(f"ignored {item.name}: {item.reason}" for item in source.ignored), *sliced.notes),
        )

    @property
    def _max_run(self) -> int:
        """A hand-over costs about 0.1 ms of CPU: against reads from a page cache that is worth halving."""
        return FILE_RUN if self.members[0].config.scheme == "file" else MAX_RUN

    def config(self) -> dict[str, object] | None:
        """The model's config.json, where there is one."""
        item = self.source.sidecar("config.json")
        return None if item is None else parse_config(self.source.read_sidecar(item), item.info.key)


def parse_config(data: bytes, where: str) -> dict[str, object]:
    """A model's config.json. Raises FormatError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON", cause=str(error)) from error
    if not isinstance(document, dict):
        raise FormatError(f"{where} is not a JSON object")
    return document
