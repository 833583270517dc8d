"""Files, precedence, origins, and what a wrong file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.core.addresses import StoreConfig
from kvctl.core.config import SETTINGS, Config, load_config
from kvctl.core.errors import ConfigError

LAB = """\
default_repo = "lab"
verify = "full"
max_rate = "2GB"
stall_timeout = 5
[transport_opt]
direct = true
[repos.lab]
kv_key_file = "/etc/kvctl/kv.key"
[[repos.lab.stores]]
url = "s3://weights/kvctl"
endpoints = ["https://s1-a:9000", "https://s1-b:9000"]
aws_profile = "lab"
no_sign_request = false
[[repos.lab.stores]]
url = "./local"
options = { direct = true, threads = 2 }
"""


def read(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "conf.toml"
    path.write_text(text)
    return load_config(explicit=str(path), environ={}, cwd=str(tmp_path))


def failure(tmp_path: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return caught.value


def test_a_repo_has_its_stores_in_order_with_their_options(tmp_path: Path) -> None:
    config = read(tmp_path, LAB)
    repo = config.repo("lab")
    assert repo.kv_key_file == "/etc/kvctl/kv.key"
    assert repo.stores[0] == StoreConfig(
        "s3://weights/kvctl",
        ("https://s1-a:9000", "https://s1-b:9000"),
        {"profile": "lab", "no_sign_request": "false"},
    )
    assert repo.stores[1] == StoreConfig(f"file://{tmp_path}/local", (), {"direct": "true", "threads": "2"})
    assert config.default_repo is not None
    assert config.default_repo.value == "lab"


def test_values_have_their_type(tmp_path: Path) -> None:
    config = read(tmp_path, LAB)
    assert config.setting("max_rate", {}).value == 2_000_000_000
    assert config.setting("stall_timeout", {}).value == 5.0
    assert config.setting("transport_opt", {}).value == {"direct": "true"}


def layered(tmp_path: Path, user: str, project: str, environ: dict[str, str]) -> Config:
    home = tmp_path / "home"
    (home / "kvctl").mkdir(parents=True)
    (home / "kvctl" / "config.toml").write_text(user)
    (tmp_path / "project" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "project" / "kvctl.toml").write_text(project)
    return load_config(
        explicit=None, environ={"XDG_CONFIG_HOME": str(home), **environ}, cwd=str(tmp_path / "project" / "deep" / "er")
    )


def test_environment_beats_project_beats_user_beats_default(tmp_path: Path) -> None:
    config = layered(tmp_path, 'verify = "none"\nmax_rate = 1\nretries = 3\n', 'verify = "full"\nmax_rate = 2\n', {})
    environ = {"KVCTL_VERIFY": "leaves"}
    assert config.setting("verify", environ).value == "leaves"
    assert config.setting("verify", environ).origin == "environment KVCTL_VERIFY"
    assert config.setting("max_rate", environ).value == 2
    assert config.setting("max_rate", environ).origin == f"project file {tmp_path}/project/kvctl.toml"
    assert config.setting("retries", environ).origin == f"user file {tmp_path}/home/kvctl/config.toml"
    assert config.setting("hedge", environ).origin == "default"


def test_a_project_replaces_a_whole_repo_of_the_user(tmp_path: Path) -> None:
    one = '[[repos.lab.stores]]\nurl = "s3://a"\n[[repos.lab.stores]]\nurl = "s3://b"\n'
    other = '[[repos.lab.stores]]\nurl = "s3://c"\n'
    assert [store.url for store in layered(tmp_path, one, other, {}).repo("lab").stores] == ["s3://c"]


def test_an_explicit_file_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "kvctl.toml").write_text("verify = 'full'\n")
    (tmp_path / "other.toml").write_text("retries = 2\n")
    config = load_config(explicit=None, environ={"KVCTL_CONFIG": str(tmp_path / "other.toml")}, cwd=str(tmp_path))
    assert config.files == (str(tmp_path / "other.toml"),)
    assert config.setting("verify", {}).value == "leaves"


def test_no_file_at_all_gives_defaults(tmp_path: Path) -> None:
    config = load_config(explicit=None, environ={"XDG_CONFIG_HOME": str(tmp_path)}, cwd="/")
    assert config == Config()
    assert {name: config.setting(name, {}).value for name in SETTINGS} == {
        name: spec.default for name, spec in SETTINGS.items()
    }


def test_a_missing_explicit_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load_config(explicit=str(tmp_path / "none.toml"), environ={}, cwd=str(tmp_path))


def test_broken_toml_tells_line_and_column(tmp_path: Path) -> None:
    error = failure(tmp_path, 'verify = "full"\nmax_rate 3\n')
    assert error.what == f"{tmp_path}/conf.toml is not valid TOML"
    assert (error.details["line"], error.details["column"]) == (2, 10)
    assert error.cause is not None
    assert error.cause.startswith("line 2, column 10: ")


def test_toml_that_ends_early_tells_the_last_line(tmp_path: Path) -> None:
    error = failure(tmp_path, 'verify = "full"\nrules = "')
    assert error.details["line"] == 2


def test_bytes_that_are_not_utf8_tell_the_line(tmp_path: Path) -> None:
    (tmp_path / "conf.toml").write_bytes(b"retries = 1\nrules = '\xff'\n")
    with pytest.raises(ConfigError) as caught:
        load_config(explicit=str(tmp_path / "conf.toml"), environ={}, cwd=str(tmp_path))
    assert caught.value.cause == "line 2: not UTF-8"


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("verfy = 'full'", ":1: verfy is not a known key", "did you mean verify?"),
        ("retries = 1\nzzz = 1", ":2: zzz is not a known key", "known here: default_repo"),
        ("retries = 'many'", ":1: retries must be a whole number, not text ('many')", None),
        ("hedge = 1", ":1: hedge must be true or false, not a number (1)", None),
        ("retries = true", ":1: retries must be a whole number, not true/false (True)", None),
        ("verify = 'ful'", ":1: verify = 'ful': 'ful' is not one of leaves, full, none", "did you mean full?"),
        ("max_rate = 'fast'", ":1: max_rate = 'fast': 'fast' is not a size", "16MiB"),
        ("[repos.lab]", ":1: repos.lab must list at least one store", "[[repos.lab.stores]]"),
        ("[repos.lab]\nstores = 's3://a'", ":2: repos.lab.stores must list at least one store", None),
        ("[[repos.lab.stores]]\nregion = 'x'", "repos.lab.stores[0] has no url", None),
        ("[[repos.lab.stores]]\nurl = 3", ":2: repos.lab.stores[0].url must be text, not a number (3)", None),
        ("[[repos.lab.stores]]\nurl='s3://a'\nendpoint=['x']", "is not a known key", "did you mean endpoints?"),
        ("[[repos.lab.stores]]\nurl = 's3://k:s@b'", "a store URL with credentials in it is refused", "profile"),
        ("[[repos.lab.stores]]\nurl='s3://b'\nendpoints=['http://k:s@h']", "has credentials in a URL", "AWS chain"),
        ("[[repos.lab.stores]]\nurl='s3://b'\naws_secret_access_key='x'", "looks like a credential", "profile"),
        ("[[repos.lab.stores]]\nurl='s3://b'\noptions={session_token='x'}", "looks like a credential", None),
        ("password = 'x'", "looks like a credential", None),
        ("default_repo = 'lba'\n[[repos.lab.stores]]\nurl='s3://b'", "default_repo names 'lba'", "did you mean lab?"),
    ],
)  # fmt: skip
def test_wrong_config_names_file_line_and_key(tmp_path: Path, text: str, what: str, hint: str | None) -> None:
    error = failure(tmp_path, text + "\n")
    assert what in error.what
    assert str(tmp_path / "conf.toml") in error.what or str(tmp_path / "conf.toml") in (error.cause or "")
    if hint is not None:
        assert hint in (error.hint or "")


def test_a_refused_credential_is_not_repeated(tmp_path: Path) -> None:
    error = failure(tmp_path, "[[repos.lab.stores]]\nurl = 's3://alice:hunter2@b'\n")
    assert "hunter2" not in f"{error.what} {error.cause} {error.hint} {error.details}"


def test_a_variable_that_does_not_parse_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KVCTL_MAX_RATE"):
        Config().setting("max_rate", {"KVCTL_MAX_RATE": "fast"})


def test_an_unknown_repo_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, LAB).repo("lob")
    assert caught.value.cause is not None
    assert re.match(r"configured: lab \(read: ", caught.value.cause)
    assert caught.value.hint == "did you mean lab?"


scalars = st.one_of(st.text(max_size=5), st.integers(-9, 9), st.booleans(), st.floats(allow_nan=False, width=16))
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["lab", "url", "stores", "region", "x"]), inner, max_size=3)
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=150)
@given(st.dictionaries(st.sampled_from([*SETTINGS, "repos", "default_repo", "zz"]), trees, max_size=3))
def test_any_toml_is_read_or_refused_in_words(tmp_path: Path, document: dict[str, object]) -> None:
    said = "conf.toml"
    try:
        read(tmp_path, tomli_w.dumps(document))
    except ConfigError as error:
        said = str(error)
    assert "conf.toml" in said


@pytest.mark.parametrize(
    "line",
    [
        "retries = 0", "retries = -1", "retries = 99999999", "stall_timeout = nan", "stall_timeout = inf",
        "stall_timeout = -1", "max_rate = -1", f"max_rate = {1 << 63}", 'max_rate = "99999PiB"',
        f'stall_timeout = "{"9" * 400}y"', "max_in_flight = 1979-05-27", "x = " + "[" * 5000, "x = " + "9" * 5000,
    ],
    ids=lambda line: line[:24],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused_with_the_file(tmp_path: Path, line: str) -> None:
    assert "conf.toml" in str(failure(tmp_path, line + "\n"))


@pytest.mark.parametrize("text", ["²", "0", "-1", "1" * 5000])
def test_a_variable_that_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="KVCTL_RETRIES"):
        Config().setting("retries", {"KVCTL_RETRIES": text})


def test_a_url_without_an_end_names_the_file(tmp_path: Path) -> None:
    error = failure(tmp_path, '[[repos.lab.stores]]\nurl = "s3://[::1/x"\n')
    assert "conf.toml" in error.what


def test_a_user_without_a_home_has_no_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user that the host does not know
    monkeypatch.delenv("HOME", raising=False)
    assert load_config(explicit=None, environ={}, cwd=str(tmp_path)).files == ()


def test_a_mark_at_the_begin_of_a_file_is_no_statement(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffretries = 3\n").values["retries"].value == 3
