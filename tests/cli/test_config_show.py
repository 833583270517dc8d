"""`config show`: values and origins; wrong files through the real program."""

from __future__ import annotations

from pathlib import Path

from kvctl.core.config import SETTINGS
from tests.cli.program import Done, Kvctl


def origins(done: Done) -> dict[str, tuple[object, str]]:
    assert done.code == 0, done.err
    return {row["name"]: (row["value"], row["origin"]) for row in done.document["settings"]}


def test_without_any_file_everything_is_default(kvctl: Kvctl) -> None:
    done = kvctl("config", "show", "-o", "json")
    assert done.document["files"] == []
    assert done.document["repos"] == []
    found = origins(done)
    assert set(found) == {*SETTINGS, "default_repo"}
    assert {origin for name, (_, origin) in found.items() if name != "state_dir"} == {"default"}


def test_flag_environment_project_and_user_are_told_apart(
    kvctl: Kvctl, tmp_path: Path, surroundings: dict[str, str]
) -> None:
    user = Path(surroundings["HOME"]) / ".config" / "kvctl" / "config.toml"
    user.parent.mkdir(parents=True)
    user.write_text('max_rate = "1GB"\nverify = "full"\nretries = 3\nhedge = false\n')
    project = tmp_path / "kvctl.toml"
    project.write_text(
        'verify = "none"\nretries = 4\n[[repos.lab.stores]]\nurl = "s3://b/p"\nendpoints = ["http://s:9"]\n'
    )
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    env = {"KVCTL_RETRIES": "5", "KVCTL_PROGRESS": "none"}
    done = kvctl("config", "show", "-o", "json", "--progress", "json", "-r", "lab", cwd=deep, env=env)
    found = origins(done)
    assert found["max_rate"] == (1_000_000_000, f"user file {user}")
    assert found["hedge"] == (False, f"user file {user}")
    assert found["verify"] == ("none", f"project file {project}")
    assert found["retries"] == (5, "environment KVCTL_RETRIES")
    assert found["progress"] == ("json", "flag --progress")
    assert found["repo"] == ("lab", "flag --repo")
    assert found["transport"] == ("auto", "default")
    assert done.document["repos"] == [
        {
            "name": "lab",
            "origin": f"project file {project}",
            "kv_key_file": None,
            "stores": [{"url": "s3://b/p", "endpoints": ["http://s:9"], "options": {}}],
        }
    ]
    human = kvctl("config", "show", cwd=deep, env=env)
    assert f"files: {user}, {project}" in human.out
    assert "environment KVCTL_RETRIES" in human.out
    assert "s3://b/p  endpoints http://s:9" in human.out


def test_broken_toml_is_two_with_line_and_column(kvctl: Kvctl, tmp_path: Path) -> None:
    (tmp_path / "kvctl.toml").write_text("retries = 1\nverify 'full'\n")
    human = kvctl("config", "show")
    assert human.code == 2
    assert f"error: {tmp_path}/kvctl.toml is not valid TOML\ncause: line 2, column 8: " in human.err
    error = kvctl("load-weights", "./m", "-o", "json").error
    assert (error["code"], error["details"]["line"], error["details"]["column"]) == ("config", 2, 8)


def test_broken_config_does_not_break_help(kvctl: Kvctl, tmp_path: Path) -> None:
    (tmp_path / "kvctl.toml").write_text("= broken")
    for args in (
        ["--help"],
        ["help", "config"],
        ["transports", "ls"],
        ["completion", "zsh"],
        ["load-weights", "--help"],
    ):
        assert kvctl(*args).code == 0


def test_an_unknown_key_names_file_line_and_the_nearest(kvctl: Kvctl, tmp_path: Path) -> None:
    (tmp_path / "kvctl.toml").write_text("retries = 1\nverfy = 'full'\n")
    done = kvctl("load-weights", "./m")
    assert done.code == 2
    assert done.err == f"error: {tmp_path}/kvctl.toml:2: verfy is not a known key\nhint: did you mean verify?\n"


def test_a_credential_in_a_file_is_refused(kvctl: Kvctl, tmp_path: Path) -> None:
    (tmp_path / "kvctl.toml").write_text(
        "[[repos.lab.stores]]\nurl = 's3://b'\naws_secret_access_key = 'wJalrXUtnFEMI'\n"
    )
    done = kvctl("config", "show")
    assert done.code == 2
    assert "looks like a credential" in done.err
    assert "wJalrXUtnFEMI" not in done.err


def test_settings_of_a_file_reach_a_command_and_flags_beat_them(kvctl: Kvctl, tmp_path: Path, model: Path) -> None:
    (tmp_path / "kvctl.toml").write_text('transport = "nope"\n')
    done = kvctl("load-weights", model)
    assert done.code == 2
    assert "no transport is called 'nope'" in done.err
    assert kvctl("load-weights", model, env={"KVCTL_TRANSPORT": "file"}).code == 0
    assert kvctl("load-weights", model, "--transport", "file", env={"KVCTL_TRANSPORT": "nope"}).code == 0


def test_a_variable_that_does_not_parse_is_two(kvctl: Kvctl, model: Path) -> None:
    done = kvctl("load-weights", model, env={"KVCTL_STALL_TIMEOUT": "soon"})
    assert done.code == 2
    assert "environment KVCTL_STALL_TIMEOUT: 'soon' is not a time span" in done.err


def test_a_named_config_that_is_not_there_is_two(kvctl: Kvctl, tmp_path: Path) -> None:
    done = kvctl("config", "show", "--config", "none.toml")
    assert done.code == 2
    assert "cannot read the config file none.toml" in done.err
