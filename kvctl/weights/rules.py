"""Tensor-parallel rules: from a tensor's name to the dimension it is split along. Pure.

Built in are the names of the usual Hugging Face checkpoints. A rules file (JSON or TOML) goes first: a list of
{"pattern": glob over the whole name, "dim": 0 | 1 | .. | "replicate"}; the first match decides.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from kvctl.core.errors import ConfigError, FormatError
from kvctl.weights import strictjson

_KV: Final = frozenset({"k_proj", "v_proj", "wk", "wv"})
_QUERY: Final = frozenset({"q_proj", "wq"})
_VOCAB: Final = frozenset({"embed_tokens", "lm_head", "word_embeddings", "wte", "tok_embeddings", "embed_out"})
_COLUMN: Final = frozenset(
    {"gate_proj", "up_proj", "fc1", "w1", "w3", "q_b_proj", "kv_b_proj", "query_key_value", "dense_h_to_4h"}
)
_FUSED_QKV: Final = frozenset({"qkv_proj", "qkv", "W_pack"})
_FUSED_PAIR: Final = frozenset({"gate_up_proj"})
_OUT: Final = frozenset({"o_proj", "out_proj", "wo"})
_ROW: Final = frozenset({"down_proj", "fc2", "w2", "dense_4h_to_h"})
_WHOLE: Final = frozenset({"gate", "router", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa"})
# Names that mean something only with what stands before them (BERT and its kin).
_BY_PATH: Final[tuple[tuple[str, bool], ...]] = (
    ("*.attention.self.query", True),
    ("*.attention.self.key", True),
    ("*.attention.self.value", True),
    ("*.intermediate.dense", True),
    ("*.attention.output.dense", False),
    ("*.output.dense", False),
    ("*.attention.dense", False),
    ("*.self_attn.dense", False),
    ("*.self_attention.dense", False),
)
_TRANSPOSED: Final = frozenset({"qweight", "qzeros", "scales"})  # GPTQ and AWQ keep (in, out)
_SCALES: Final = ("scale", "scale_inv", "zero_point", "weight_scale", "weight_scale_inv", "weight_zero_point")


@dataclass(frozen=True, slots=True)
class Axis:
    """How a tensor is split. `dim` None: replicated. `known`: a rule named it (or it is one-dimensional).
    `soft`: replicate where it does not divide. `ragged`: the last ranks may hold less. `kv`, `query`: made of heads.
    `fused`: parts that are split one by one.
    """

    dim: int | None
    known: bool = True
    soft: bool = False
    ragged: bool = False
    kv: bool = False
    query: bool = False
    fused: Literal["", "qkv", "pair"] = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a rules file. `dim` None: replicate."""

    pattern: str
    dim: int | None


@dataclass(frozen=True, slots=True)
class Rules:
    """The user's rules, then the built-in ones."""

    own: tuple[Rule, ...] = ()

    def axis(self, name: str, shape: Sequence[int]) -> Axis:
        for rule in self.own:
            if fnmatchcase(name, rule.pattern):
                return Axis(rule.dim)
        return _built_in(name, len(shape), shape)

    def to_json(self) -> list[dict[str, object]]:
        return [{"pattern": rule.pattern, "dim": "replicate" if rule.dim is None else rule.dim} for rule in self.own]


def parse_rules(data: bytes, where: str) -> Rules:
    """A rules file: a JSON list, or TOML with [[rule]] tables. Raises ConfigError."""
    try:
        document: Any = (  # Any: JSON
            strictjson.loads(data, where, "rules file")
            if data.lstrip()[:1] in {b"[", b"{"} and not data.lstrip().startswith(b"[[")
            else tomllib.loads(data.decode())
        )
    except (FormatError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is no rules file", cause=str(error), hint="write JSON or TOML") from None
    entries = document.get("rule", document.get("rules")) if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ConfigError(f"{where} holds no list of rules", hint='write [{"pattern": "*.name.weight", "dim": 0}]')
    rules: list[Rule] = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or set(entry) != {"pattern", "dim"} or not isinstance(entry["pattern"], str):
            raise ConfigError(f"{where}: rule {number} must have exactly a pattern and a dim", cause=repr(entry))
        dim = entry["dim"]
        if dim != "replicate" and (type(dim) is not int or not 0 <= dim < 8):
            raise ConfigError(f"{where}: rule {number} has dim {dim!r}", hint='write a number from 0, or "replicate"')
        rules.append(Rule(entry["pattern"], None if dim == "replicate" else dim))
    return Rules(tuple(rules))


def _built_in(name: str, ndim: int, shape: Sequence[int]) -> Axis:
    path, _, kind = name.rpartition(".")
    module = path.rpartition(".")[2]
    if ndim == 0:
        return Axis(None)
    column = module in _KV or module in _QUERY or module in _VOCAB or module in _COLUMN
    column = column or module in _FUSED_QKV or module in _FUSED_PAIR
    row = module in _ROW or module in _OUT
    if not column and not row:
        for pattern, is_column in _BY_PATH:
            if fnmatchcase(path, pattern):
                column, row = is_column, not is_column
                break
    if not column and not row:
        # Fused experts (a bare experts.gate_up_proj) have layouts of their own: unknown, so replicated and reported.
        return Axis(None, known=ndim == 1 or module in _WHOLE)
    if kind in _TRANSPOSED:
        return Axis((1 if column else 0) if ndim > 1 else None, soft=True, kv=module in _KV)
    if kind == "g_idx":
        return Axis(None if column else 0, soft=True)
    if kind.endswith(_SCALES) or kind.startswith("weight_scale"):
        return _scale(column=column, kv=module in _KV, shape=shape)
    if kind not in {"weight", "bias", "weight_packed"}:
        return Axis(None, known=ndim == 1)
    if row:
        return Axis(1 if ndim > 1 else None, query=module in _OUT)
    fused: Literal["", "qkv", "pair"] = "qkv" if module in _FUSED_QKV else "pair" if module in _FUSED_PAIR else ""
    return Axis(0, ragged=module in _VOCAB, kv=module in _KV, query=module in _QUERY, fused=fused)


def _scale(*, column: bool, kv: bool, shape: Sequence[int]) -> Axis:
    """A scale follows its weight along a dimension it has; one of size 1 serves every rank."""
    dim = 0 if column else 1
    if dim >= len(shape) or shape[dim] == 1:
        return Axis(None)
    return Axis(dim, soft=True, kv=kv)


def rules_from(entries: Sequence[Mapping[str, object]]) -> Rules:
    """Rules as `Rules.to_json` wrote them. Raises ConfigError."""
    import json

    return parse_rules(json.dumps(list(entries)).encode(), "rules")
