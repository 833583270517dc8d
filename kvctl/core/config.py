"""Configuration: TOML files of the user and the project, their merge, and where each value came from.

Flag > environment > project file > user file > default. Flags are the CLI's; everything else is here. Reads
files, never writes them; raises ConfigError that names the file and the key, with the line for broken TOML.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from kvctl.core.addresses import StoreConfig, expand_home, parse_store
from kvctl.core.errors import ConfigError, UsageError
from kvctl.core.units import MAX_AGE, MAX_SIZE, parse_age, parse_size

PROJECT_FILE: Final = "kvctl.toml"
MAX_COUNT: Final = 1_000_000


Kind = Literal["text", "bool", "int", "size", "age", "table"]
Source = Literal["flag", "environment", "project", "user", "file", "default"]


class SettingSpec(NamedTuple):
    """One setting that a file, a variable and (where a command has it) a flag can give."""

    name: str
    kind: Kind
    default: object
    summary: str
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return f"KVCTL_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


SETTINGS: Final[Mapping[str, SettingSpec]] = {
    spec.name: spec
    for spec in (
        SettingSpec("transport", "text", "auto", "how bulk bytes move; auto takes the fastest available"),
        SettingSpec("transport_opt", "table", {}, "options of the transport, by name"),
        SettingSpec("verify", "text", "leaves", "what is checked as bytes land", ("leaves", "full", "none")),
        SettingSpec("max_in_flight", "size", None, "bytes in flight at once (default: from the memory limit)"),
        SettingSpec("max_rate", "size", None, "cap on bytes per second over all members"),
        SettingSpec("hedge", "bool", True, "ask a replica when a request is past the p95 of its peers"),
        SettingSpec("fallback", "bool", False, "let the next transport take over when one fails at run time"),
        SettingSpec("stall_timeout", "age", 60.0, "end what makes no progress for this long"),
        SettingSpec("retries", "int", 10, "tries of one request before it is given up"),
        SettingSpec("rules", "text", None, "file with the tensor-parallel rules of names the built-in ones miss"),
        SettingSpec("progress", "text", "auto", "how progress is shown", ("auto", "bar", "plain", "json", "none")),
        SettingSpec("state_dir", "text", None, "where reports and crash logs are kept"),
    )
}

_STORE_TEXT: Final = ("region", "aws_profile", "ca_bundle", "addressing")
_STORE_KEYS: Final = ("url", "endpoints", *_STORE_TEXT, "no_sign_request", "options")
_REPO_KEYS: Final = ("kv_key_file", "stores")
_TOP_KEYS: Final = ("default_repo", "repos", *SETTINGS)
# What the S3 plug-in calls the options that the config file names as the AWS tools do.
_OPTION_NAME: Final = {"aws_profile": "profile"}
_SECRET_KEY: Final = re.compile(r"secret|passw|token|access_key|credential|api_?key", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its origin in words: 'default', 'environment KVCTL_VERIFY', 'user file /home/..'."""

    value: object
    source: Source
    origin: str


@dataclass(frozen=True, slots=True)
class RepoConfig:
    """A configured repo: its member stores in order, and the key file of its KV domain."""

    name: str
    stores: tuple[StoreConfig, ...]
    kv_key_file: str | None
    source: Source
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """The merged files. `values` holds what files set; `setting` adds environment and defaults."""

    files: tuple[str, ...] = ()
    repos: Mapping[str, RepoConfig] = field(default_factory=dict)
    values: Mapping[str, Setting] = field(default_factory=dict)
    default_repo: Setting | None = None

    def setting(self, name: str, environ: Mapping[str, str]) -> Setting:
        """Environment, else file, else default. Raises ConfigError for a variable that does not parse."""
        spec = SETTINGS[name]
        text = environ.get(spec.variable)
        if text:
            return Setting(_from_variable(spec, text), "environment", f"environment {spec.variable}")
        return self.values.get(name) or Setting(spec.default, "default", "default")

    def repo(self, name: str) -> RepoConfig:
        """Raises ConfigError that lists the configured repos."""
        found = self.repos.get(name)
        if found is None:
            known = ", ".join(sorted(self.repos)) or "none"
            raise ConfigError(
                f"no repo is called {name!r} in the configuration",
                cause=f"configured: {known}"
                + (f" (read: {', '.join(self.files)})" if self.files else " (no config file found)"),
                hint=_did_you_mean(name, self.repos)
                or f"for a directory of that name write ./{name}; see `kvctl help config`",
            )
        return found


def user_file(environ: Mapping[str, str]) -> str:
    """The user's config file, whether it exists or not; empty for a user who has no home."""
    import platformdirs

    home = environ.get("XDG_CONFIG_HOME")
    try:
        folder = os.path.join(home, "kvctl") if home else platformdirs.user_config_dir("kvctl")
    except RuntimeError:
        return ""
    return "" if folder.startswith("~") else os.path.join(folder, "config.toml")


def project_file(start: str) -> str | None:
    """The nearest `kvctl.toml` at `start` or above it."""
    folder = os.path.abspath(start)
    while True:
        candidate = os.path.join(folder, PROJECT_FILE)
        if os.path.isfile(candidate):
            return candidate
        parent = os.path.dirname(folder)
        if parent == folder:
            return None
        folder = parent


def load_config(*, explicit: str | None, environ: Mapping[str, str], cwd: str) -> Config:
    """The merged configuration. `explicit` (or KVCTL_CONFIG) is read alone, instead of user and project file,
    and must exist. Raises ConfigError.
    """
    named = explicit or environ.get("KVCTL_CONFIG")
    if named:
        return _merge([_read(os.path.expanduser(named), "file")])
    layers: list[_Layer] = []
    user = user_file(environ)
    if os.path.isfile(user):
        layers.append(_read(user, "user"))
    project = project_file(cwd)
    if project is not None:
        layers.append(_read(project, "project"))
    return _merge(layers)


@dataclass(frozen=True, slots=True)
class _Layer:
    path: str
    repos: dict[str, RepoConfig]
    values: dict[str, Setting]
    default_repo: Setting | None


def _merge(layers: Iterable[_Layer]) -> Config:
    files: list[str] = []
    repos: dict[str, RepoConfig] = {}
    values: dict[str, Setting] = {}
    default: Setting | None = None
    for layer in layers:
        files.append(layer.path)
        repos |= layer.repos
        values |= layer.values
        default = layer.default_repo or default
    config = Config(tuple(files), repos, values, default)
    if default is not None and str(default.value) not in repos:
        raise ConfigError(
            f"default_repo names {default.value!r}, which no [repos.{default.value}] defines",
            cause=f"{default.origin}; configured: {', '.join(sorted(repos)) or 'none'}",
            hint=_did_you_mean(str(default.value), repos) or "add the table or change default_repo",
        )
    return config


@dataclass(frozen=True, slots=True)
class _File:
    """A file being read, for messages that name it."""

    path: str
    text: str

    def fail(self, key: str, problem: str, *, hint: str | None = None) -> ConfigError:
        leaf = re.escape(key.rpartition(".")[2].split("[")[0])
        match = re.search(rf"^[ \t]*(?:\[+[^\]\n]*)?\"?{leaf}\"?\s*[=.\]]", self.text, re.MULTILINE)
        line = self.text.count("\n", 0, match.start()) + 1 if match else None
        where = f"{self.path}:{line}" if line else self.path
        return ConfigError(
            f"{where}: {key} {problem}", hint=hint, details={"file": self.path, "key": key, "line": line}
        )

    def table(self, value: object, key: str, known: Sequence[str]) -> Mapping[str, object]:
        if not isinstance(value, dict):
            raise self.fail(key, f"must be a table, not {_named(value)}")
        for name in value:
            path = f"{key}.{name}" if key else name
            if name in known:
                continue
            if _SECRET_KEY.search(name):
                raise self.fail(
                    path,
                    "looks like a credential, which a config file must not hold",
                    hint="use the AWS chain: the environment, a profile (aws_profile = ..), or a role",
                )
            hint = _did_you_mean(name, known)
            raise self.fail(path, "is not a known key", hint=hint or f"known here: {', '.join(sorted(known))}")
        return value

    def text_of(self, value: object, key: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.fail(key, f"must be text, not {_named(value)}")
        return value


def _read(path: str, source: Source) -> _Layer:
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}", cause=error.strerror or str(error)) from error
    try:
        text = raw.decode("utf-8-sig")  # some editors begin a file with a mark
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} is not valid TOML", cause=f"line {line}: not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise _broken(path, text, str(error)) from error
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML", cause="it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, a date that no calendar has
        raise ConfigError(f"{path} is not valid TOML", cause=str(error)) from error
    return _layer(_File(path, text), document, source)


def _broken(path: str, text: str, message: str) -> ConfigError:
    match = re.search(r"^(.*?)\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", message, re.DOTALL)
    lines = text.split("\n")
    problem = match.group(1) if match else message
    line = int(match.group(2)) if match and match.group(2) else len(lines)
    column = int(match.group(3)) if match and match.group(3) else len(lines[-1]) + 1
    return ConfigError(
        f"{path} is not valid TOML",
        cause=f"line {line}, column {column}: {problem}",
        hint="fix the line, or name another file with --config",
        details={"file": path, "line": line, "column": column},
    )


def _layer(file: _File, document: Mapping[str, object], source: Source) -> _Layer:
    origin = file.path if source == "file" else f"{source} file {file.path}"
    top = file.table(document, "", _TOP_KEYS)
    values = {
        name: Setting(_from_toml(file, SETTINGS[name], value), source, origin)
        for name, value in top.items()
        if name in SETTINGS
    }
    default = (
        Setting(file.text_of(top["default_repo"], "default_repo"), source, origin) if "default_repo" in top else None
    )
    repos: dict[str, RepoConfig] = {}
    tables = top.get("repos", {})
    if not isinstance(tables, dict):
        raise file.fail("repos", f"must be tables [repos.NAME], not {_named(tables)}")
    for name, value in tables.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise file.fail(f"repos.{name}", "is no repo name", hint="use letters, digits, '-', '_' and '.'")
        repos[name] = _repo(file, name, value, source, origin)
    return _Layer(file.path, repos, values, default)


def _repo(file: _File, name: str, value: object, source: Source, origin: str) -> RepoConfig:
    key = f"repos.{name}"
    table = file.table(value, key, _REPO_KEYS)
    entries = table.get("stores")
    if not isinstance(entries, list) or not entries:
        raise file.fail(
            f"{key}.stores" if entries is not None else key,
            "must list at least one store",
            hint=f'write [[repos.{name}.stores]] with url = ".."',
        )
    stores = tuple(_store(file, f"{key}.stores[{index}]", entry) for index, entry in enumerate(entries))
    key_file = (
        _home(file, f"{key}.kv_key_file", file.text_of(table["kv_key_file"], f"{key}.kv_key_file"))
        if "kv_key_file" in table
        else None
    )
    return RepoConfig(name, stores, key_file, source, origin)


def _store(file: _File, key: str, value: object) -> StoreConfig:
    table = file.table(value, key, _STORE_KEYS)
    if "url" not in table:
        raise file.fail(key, "has no url")
    url = file.text_of(table["url"], f"{key}.url")
    endpoints = table.get("endpoints", [])
    if not isinstance(endpoints, list):
        raise file.fail(f"{key}.endpoints", f"must be a list of URLs, not {_named(endpoints)}")
    ways = tuple(file.text_of(entry, f"{key}.endpoints") for entry in endpoints)
    for way in ways:
        if "@" in way.partition("://")[2]:
            raise file.fail(f"{key}.endpoints", "has credentials in a URL", hint="use the AWS chain for credentials")
    options: dict[str, str] = {}
    for name in _STORE_TEXT:
        if name in table:
            options[_OPTION_NAME.get(name, name)] = file.text_of(table[name], f"{key}.{name}")
    if "no_sign_request" in table:
        if not isinstance(table["no_sign_request"], bool):
            raise file.fail(f"{key}.no_sign_request", f"must be true or false, not {_named(table['no_sign_request'])}")
        options["no_sign_request"] = _option_text(table["no_sign_request"])
    extra = table.get("options", {})
    if not isinstance(extra, dict):
        raise file.fail(f"{key}.options", f"must be a table, not {_named(extra)}")
    for name, item in extra.items():
        if _SECRET_KEY.search(name):
            raise file.fail(f"{key}.options.{name}", "looks like a credential, which a config file must not hold")
        if not isinstance(item, (str, int, float, bool)):
            raise file.fail(f"{key}.options.{name}", f"must be text, a number or true/false, not {_named(item)}")
        options[name] = _option_text(item)
    if "://" not in url:
        # relative to the file, so that the meaning does not change with the current directory
        url = os.path.join(os.path.dirname(os.path.abspath(file.path)), _home(file, key, url))
    try:
        return parse_store(url, endpoints=ways, options=options)
    except UsageError as error:
        raise ConfigError(f"{file.path}: {key}.url: {error.what}", cause=error.cause, hint=error.hint) from error


def _home(file: _File, key: str, path: str) -> str:
    try:
        return expand_home(path)
    except UsageError as error:
        raise file.fail(key, error.what, hint=error.hint) from error


def _option_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _from_toml(file: _File, spec: SettingSpec, value: object) -> object:
    key = spec.name
    if spec.kind == "table":
        if not isinstance(value, dict) or not all(isinstance(item, (str, int, float, bool)) for item in value.values()):
            raise file.fail(key, f"must be a table of names and values, not {_named(value)}")
        for name in value:
            if _SECRET_KEY.search(name):
                raise file.fail(f"{key}.{name}", "looks like a credential, which a config file must not hold")
        return {name: _option_text(item) for name, item in value.items()}
    if spec.kind == "bool":
        if not isinstance(value, bool):
            raise file.fail(key, f"must be true or false, not {_named(value)}")
        return value
    if isinstance(value, bool):
        raise file.fail(key, f"must be {_KIND_WORDS[spec.kind]}, not {_named(value)}")
    if spec.kind in {"int", "size"} and isinstance(value, int):
        low, high = (1, MAX_COUNT) if spec.kind == "int" else (0, MAX_SIZE)
        if not low <= value <= high:
            raise file.fail(key, f"= {value} is not between {low} and {high}")
        return value
    if spec.kind == "age" and isinstance(value, (int, float)):
        if not 0 <= value <= MAX_AGE:
            raise file.fail(key, f"= {value} is not a number of seconds from 0 to {MAX_AGE:.0f}")
        return float(value)
    if spec.kind == "int" or not isinstance(value, str):
        raise file.fail(key, f"must be {_KIND_WORDS[spec.kind]}, not {_named(value)}")
    try:
        return _parse(spec, value)
    except UsageError as error:
        raise file.fail(key, f"= {value!r}: {error.what}", hint=error.hint) from error


_KIND_WORDS: Final[Mapping[str, str]] = {
    "text": "text",
    "int": "a whole number",
    "size": "a size like '16MiB'",
    "age": "a time span like '60s'",
}


def _from_variable(spec: SettingSpec, text: str) -> object:
    try:
        return _parse(spec, text)
    except UsageError as error:
        raise ConfigError(f"environment {spec.variable}: {error.what}", hint=error.hint) from error


def _parse(spec: SettingSpec, text: str) -> object:
    if spec.kind == "size":
        return parse_size(text)
    if spec.kind == "age":
        return parse_age(text)
    if spec.kind == "int":
        digits = text.strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) < 8 and 1 <= int(digits) <= MAX_COUNT):
            raise UsageError(f"{text!r} is not a whole number from 1 to {MAX_COUNT}")
        return int(digits)
    if spec.kind == "bool":
        lowered = text.strip().lower()
        if lowered not in {"1", "0", "true", "false", "yes", "no", "on", "off"}:
            raise UsageError(f"{text!r} is neither true nor false")
        return lowered in {"1", "true", "yes", "on"}
    if spec.kind == "table":
        return dict(parse_option(item) for item in text.split())
    if spec.choices and text not in spec.choices:
        raise UsageError(f"{text!r} is not one of {', '.join(spec.choices)}", hint=_did_you_mean(text, spec.choices))
    return text


def parse_option(text: str) -> tuple[str, str]:
    """Name and value of 'k=v'. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r} is not NAME=VALUE")
    return name, value


def _did_you_mean(name: str, known: Iterable[str]) -> str | None:
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else None


def _named(value: object) -> str:
    return f"{_TYPE_WORDS.get(type(value), type(value).__name__)} ({value!r})"


_TYPE_WORDS: Final[Mapping[type, str]] = {
    str: "text",
    bool: "true/false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "a table",
}
