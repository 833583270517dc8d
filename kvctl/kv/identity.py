"""What a KV cache means: the compatibility descriptor, its digest (the namespace), how two differ. Pure.

The descriptor holds meaning only: two runs that differ in any part of it never share a key. Names, revisions, the
engine's own block size and layout are labels of the producer and stand in the session manifest.

    canonical form   JSON, sorted keys, no spaces, UTF-8
    nsdigest         SHA-256 of that, hex; stored as ns/<nsdigest>.json
    weights          the model digest of kvctl (BLAKE3, see `kvctl help format`)
    tokenizer        SHA-256 of frames(name, bytes, ..) of the files that define the vocabulary
    rope             SHA-256 of the canonical JSON of positions and numerics in config.json
    salt             HMAC of the raw salt under the tenant's domain secret; the raw salt is nowhere
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from kvctl.core.errors import IncompatibleError, UsageError
from kvctl.kv.documents import Fields, canonical, loads
from kvctl.kv.tokens import ANCHOR_TOKENS, BLOCK_TOKENS, frames, salt_id

SCHEMA: Final = "kvctl.kv-ns/1"
LAYOUT: Final = "kvctl.blocks/1"
HASH: Final = "hmac-sha256"
KINDS: Final = ("full", "sliding", "mla", "indexer", "recurrent")

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I8": 1,
    "U8": 1,
}
"""Logical dtypes of KV, by the names of safetensors, with their bytes."""

_FIELDS: Final = {
    *("schema", "weights", "tokenizer", "rope", "lora", "dtype", "scales", "quantisation", "groups"),
    *("block_tokens", "layout", "hash", "salt"),
}
_LIMIT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose KV has one geometry. `k_dim`, `v_dim`: elements per head and token. `window`: tokens, the current
    one included, of a sliding group; None elsewhere.

    mla: one head, K is the latent, V the rope part. indexer: K only (`v_dim` 0). recurrent: no tokens; a layer's state
    is one blob of `k_dim` bytes (`kv_heads` 1, `v_dim` 0) that is valid after exactly one count of tokens.
    """

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None

    @property
    def recurrent(self) -> bool:
        return self.kind == "recurrent"

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "layers": list(self.layers),
            "kv_heads": self.kv_heads,
            "k_dim": self.k_dim,
            "v_dim": self.v_dim,
            "window": self.window,
        }

    def fault(self) -> str:
        """Why no cache can have this geometry; empty when it can."""
        if self.kind not in KINDS:
            return f"kind {self.kind!r} is none of {', '.join(KINDS)}"
        if not self.layers or len(set(self.layers)) != len(self.layers) or list(self.layers) != sorted(self.layers):
            return "the layers are not in order, or one is twice"
        if (self.window is not None) != (self.kind == "sliding"):
            return f"a {self.kind} group has window {self.window}"
        if self.kind in {"mla", "indexer", "recurrent"} and self.kv_heads != 1:
            return f"a {self.kind} group has {self.kv_heads} heads, not 1"
        if (self.v_dim == 0) != (self.kind in {"indexer", "recurrent"}):
            return f"a {self.kind} group has v_dim {self.v_dim}"
        return ""


@dataclass(frozen=True, slots=True)
class Lora:
    """`digest`: model digest of the adapter's tensors, hex. `scale`: decimal text, see `lora_scale`."""

    digest: str
    scale: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of two descriptors: `field` ("groups[1].window"), and both values as text for people."""

    field: str
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """See the module's text. Digests are 64 hex digits."""

    weights: str
    tokenizer: str
    rope: str
    dtype: str
    groups: tuple[Group, ...]
    lora: tuple[Lora, ...] = ()
    scales: str | None = None
    quantisation: str | None = None
    salt: str | None = None
    block_tokens: int = BLOCK_TOKENS

    def to_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "weights": self.weights,
            "tokenizer": self.tokenizer,
            "rope": self.rope,
            "lora": [{"digest": item.digest, "scale": item.scale} for item in self.lora],
            "dtype": self.dtype,
            "scales": self.scales,
            "quantisation": self.quantisation,
            "groups": [group.to_json() for group in self.groups],
            "block_tokens": self.block_tokens,
            "layout": LAYOUT,
            "hash": HASH,
            "salt": self.salt,
        }

    def canonical(self) -> bytes:
        return canonical(self.to_json())

    @property
    def digest(self) -> str:
        """nsdigest, 64 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @property
    def layers(self) -> int:
        """One more than the highest layer of any group."""
        return max(group.layers[-1] for group in self.groups) + 1

    def group_of(self, layer: int) -> list[tuple[int, Group]]:
        """(index, group) of the groups that hold `layer`: one, or two where an indexer goes with it."""
        return [(i, group) for i, group in enumerate(self.groups) if layer in group.layers]

    @classmethod
    def parse(cls, data: bytes | memoryview, where: str) -> Descriptor:
        """Strict. Raises FormatError, IncompatibleError for another schema version, layout or hash."""
        fields = Fields(loads(data, where), where)
        fields.schema(SCHEMA)
        fields.only(_FIELDS)
        for name, known in (("layout", LAYOUT), ("hash", HASH)):
            if fields.text(name) != known:
                raise IncompatibleError(
                    f"{where} has {name} {fields.text(name)}, this kvctl knows {known}", hint="use a newer kvctl"
                )
        found = cls(
            weights=fields.hex("weights"),
            tokenizer=fields.hex("tokenizer"),
            rope=fields.hex("rope"),
            dtype=fields.text("dtype"),
            groups=tuple(_group(item) for item in fields.objects("groups")),
            lora=tuple(_lora(item) for item in fields.objects("lora")),
            scales=fields.hex_or_null("scales"),
            quantisation=fields.text_or_null("quantisation"),
            salt=fields.hex_or_null("salt"),
            block_tokens=fields.number("block_tokens", 1, ANCHOR_TOKENS),
        )
        fault = found.fault()
        if fault:
            raise fields.bad("", f"is impossible: {fault}")
        return found

    def fault(self) -> str:
        """Why no run can be described so; empty when one can."""
        if self.dtype not in DTYPE_BYTES:
            return f"dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}"
        if ANCHOR_TOKENS % self.block_tokens:
            return f"blocks of {self.block_tokens} tokens do not divide {ANCHOR_TOKENS}"
        if not self.groups:
            return "no groups"
        seen: set[tuple[int, bool]] = set()
        for number, group in enumerate(self.groups):
            problem = group.fault()
            if problem:
                return f"groups[{number}]: {problem}"
            own = {(layer, group.kind == "indexer") for layer in group.layers}
            if own & seen:
                return f"groups[{number}]: layer {min(own & seen)[0]} is in another group too"
            seen |= own
        return ""


def _group(fields: Fields) -> Group:
    fields.only({"kind", "layers", "kv_heads", "k_dim", "v_dim", "window"})
    return Group(
        kind=fields.text("kind"),
        layers=tuple(fields.as_number(item, "layers", 0, 1 << 20) for item in fields.items("layers")),
        kv_heads=fields.number("kv_heads", 1, 1 << 20),
        k_dim=fields.number("k_dim", 1, _LIMIT),
        v_dim=fields.number("v_dim", 0, _LIMIT),
        window=fields.number_or_null("window", 1, _LIMIT),
    )


def _lora(fields: Fields) -> Lora:
    fields.only({"digest", "scale"})
    return Lora(fields.hex("digest"), fields.text("scale"))


# A tokenizer.json says everything; the others count only where it is missing.
_WHOLE_TOKENIZER: Final = ("tokenizer.json", "tekken.json")
_TOKENIZER_PARTS: Final = (
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json",),
)


def tokenizer_digest(files: Mapping[str, bytes]) -> str:
    """Hex. `files`: name -> bytes. Without any tokenizer file: the digest of nothing, a meaning of its own."""
    whole = [name for name in _WHOLE_TOKENIZER if name in files][:1]
    names = whole or sorted(name for name in _TOKENIZER_PARTS if name in files)
    return hashlib.sha256(frames(*(part for name in names for part in (name.encode(), files[name])))).hexdigest()


# transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters: one meaning, one digest.
_POSITIONS: Final = (
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "rotary_pct", "partial_rotary_factor"),
    *("rotary_dim", "position_embedding_type", "no_rope_layers", "no_rope_layer_interval", "rope_interleave"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "original_max_position_embeddings", "alibi", "mrope_section"),
)
_NUMERICS: Final = (
    *("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "attn_logit_softcapping", "head_dim"),
    *("query_pre_attn_scalar", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "hidden_act"),
    *("hidden_activation", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "topk_method"),
    *("scoring_func", "n_group", "topk_group", "use_qk_norm", "swiglu_limit", "index_topk"),
)


def rope_digest(config: Mapping[str, Any]) -> str:  # Any: config.json
    """Hex. Positions and numerics that change keys and values though the weights are the same."""
    text = config.get("text_config")
    inner: dict[str, Any] = {**config, **text} if isinstance(text, Mapping) else dict(config)  # Any: config.json
    scaling = {**(inner.get("rope_scaling") or {}), **(inner.get("rope_parameters") or {})}
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling["type"])
        del scaling["type"]
    scaling.setdefault("rope_theta", inner.get("rope_theta", 10000.0))
    scaling.setdefault("rope_type", "default")
    meaning: dict[str, Any] = {"rope": scaling}  # Any: config.json
    for name in (*_POSITIONS, *_NUMERICS):
        value = inner.get(name)
        if value is not None and name not in {"rope_theta", "rope_scaling", "rope_parameters"}:
            meaning[name] = value
    if scaling["rope_type"] in {"dynamic", "longrope", "yarn"}:
        meaning["max_position_embeddings"] = inner.get("max_position_embeddings")
    return hashlib.sha256(canonical(_exact(meaning))).hexdigest()


def _exact(value: Any) -> Any:  # Any: config.json
    """Numbers as decimal text, so that 10000 and 10000.0 are one, and no float formatting enters a digest."""
    if isinstance(value, Mapping):
        return {str(name): _exact(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return decimal_text(value)
    return value


def decimal_text(value: float) -> str:
    """The shortest decimal that reads back as `value`, without exponent or trailing zeros: 2.0 -> "2"."""
    text = format(Decimal(repr(value)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def lora_scale(adapter_config: bytes, where: str) -> str:
    """The adapter's factor as decimal text, from its adapter_config.json. Raises UsageError, IncompatibleError for one
    whose modules have factors of their own.
    """
    try:
        config = json.loads(adapter_config)
        rank, alpha = config["r"], config["lora_alpha"]
        scale = float(alpha) / (float(rank) ** 0.5 if config.get("use_rslora") else float(rank))
    except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError, OverflowError) as problem:
        raise UsageError(
            f"{where} is no adapter_config.json",
            cause=f"{type(problem).__name__}: {problem}",
            hint="name a PEFT folder",
        ) from None
    if config.get("alpha_pattern"):
        raise IncompatibleError(
            f"the adapter in {where} has other scales for some of its modules",
            cause="its alpha_pattern is not empty, and one scale is all that the identity of KV holds",
            hint="KV made with it is not stored; merge the factors into its tensors",
        )
    return decimal_text(scale)


def describe_model(
    files: Mapping[str, bytes],
    weights_digest: str,
    *,
    dtype: str,
    lora: Sequence[Lora] = (),
    salt: bytes | None = None,
    secret: bytes,
    scales: str | None = None,
    block_tokens: int = BLOCK_TOKENS,
    where: str = "the model",
) -> Descriptor:
    """The descriptor of a run of the model whose small files are `files` (config.json, tokenizer files; others are
    ignored). `dtype`: logical dtype of its KV. `secret`: the tenant's domain secret. Adapters count in their order.
    Raises UsageError without a usable config.json, IncompatibleError for models whose cache cannot be restored exactly.
    """
    from kvctl.kv.geometry import groups_of

    try:
        config = json.loads(files["config.json"])
    except KeyError:
        raise UsageError(f"{where} has no config.json", hint="name a model folder in the Hugging Face layout") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{where}: config.json is not JSON", cause=str(problem)) from None
    if not isinstance(config, dict):
        raise UsageError(f"{where}: config.json is no JSON object")
    quantisation = config.get("quantization_config")
    found = Descriptor(
        weights=weights_digest,
        tokenizer=tokenizer_digest(files),
        rope=rope_digest(config),
        dtype=dtype,
        groups=groups_of(config, dtype=dtype),
        lora=tuple(lora),
        scales=scales,
        quantisation=_quantisation(quantisation) if isinstance(quantisation, Mapping) else None,
        salt=None if salt is None else salt_id(secret, salt),
        block_tokens=block_tokens,
    )
    fault = found.fault()
    if fault:
        raise UsageError(f"{where} cannot be described", cause=fault)
    return found


def _quantisation(config: Mapping[str, Any]) -> str:  # Any: config.json
    method = str(config.get("quant_method") or "unnamed")
    return f"{method}:{hashlib.sha256(canonical(_exact(config))).hexdigest()[:32]}"


def compare(ours: Descriptor, theirs: Descriptor) -> list[Difference]:
    """Field by field; empty when one may read the other's KV."""
    found: list[Difference] = []
    _differ("", ours.to_json(), theirs.to_json(), found)
    return found


def _differ(path: str, ours: object, theirs: object, found: list[Difference]) -> None:
    if ours == theirs:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys()):
            _differ(f"{path}.{name}" if path else name, ours.get(name), theirs.get(name), found)
        return
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs) and path in {"groups", "lora"}:
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            _differ(f"{path}[{number}]", mine, other, found)
        return
    found.append(Difference(path, _shown(ours), _shown(theirs)))


def _shown(value: object) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, str):
        return value
    text = json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 120 else f"{text[:117]}..."


def verdict(differences: Sequence[Difference]) -> str:
    """One sentence: "dtype is BF16 here and F8_E4M3 there; .."; "the same" without differences."""
    if not differences:
        return "the same"
    return "; ".join(f"{item.field} is {item.ours} here and {item.theirs} there" for item in differences)


def check_compatible(ours: Descriptor, theirs: Descriptor, what: str) -> None:
    """Raises IncompatibleError that names every differing field with both values. `what`: whose KV it is."""
    differences = compare(ours, theirs)
    if differences:
        raise IncompatibleError(
            f"{what} was made by another model run",
            cause=verdict(differences),
            hint="use it with the run that made it, or push a session of this one",
            details={
                "differences": [{"field": item.field, "ours": item.ours, "theirs": item.theirs} for item in differences]
            },
        )
