"""Help topics and generated files."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from kvctl.cli.commands.completion import SHELLS
from kvctl.cli.commands.help import topics
from kvctl.cli.lazy import find
from kvctl.cli.tree import TREE
from kvctl.core import errors
from kvctl.core.config import SETTINGS
from tests.cli.program import PROGRAM, Kvctl

ROOT = Path(__file__).resolve().parent.parent.parent
TOPICS = {
    "quickstart", "addresses", "config", "environment", "exit-codes", "output", "reports", "repos", "plugins", "s3",
    "verification", "tensor-parallel", "kv", "format", "agent", "checkpoint",
}  # fmt: skip


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_current(generate: ModuleType) -> None:
    stale = [path for path, text in generate.generated().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"run scripts/generate: {stale}"


def test_the_error_tree_in_words_is_the_tree_in_code(generate: ModuleType) -> None:
    in_words = {name: code for name, code, _ in generate.tree_rows()}
    in_code = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.KvctlError) and kind is not errors.InterruptedRunError
    }
    assert in_words == in_code


def test_help_lists_every_topic(kvctl: Kvctl) -> None:
    assert set(topics()) >= TOPICS
    done = kvctl("help")
    assert done.code == 0
    assert {line.split()[0] for line in done.out.splitlines()} >= TOPICS


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_topic_prints_as_it_is_written(kvctl: Kvctl, topic: str) -> None:
    done = kvctl("help", topic)
    assert done.code == 0
    assert done.out == (ROOT / "kvctl" / "help" / f"{topic}.md").read_text(encoding="utf-8")
    assert kvctl("help", topic, "-o", "json").document["topic"] == topic


def test_an_unknown_topic_is_four_and_suggests(kvctl: Kvctl) -> None:
    done = kvctl("help", "exitcodes")
    assert done.code == 4
    assert "did you mean exit-codes?" in done.err


@pytest.mark.parametrize("topic", sorted(topics()))
def test_topics_name_commands_flags_and_topics_that_exist(kvctl: Kvctl, topic: str) -> None:
    text = (ROOT / "kvctl" / "help" / f"{topic}.md").read_text(encoding="utf-8")
    for words in re.findall(r"(?:^ +|`)kvctl ((?:[a-z0-9-]+ ?)+)", text, re.MULTILINE):
        path = words.split()
        assert find(TREE, path[:2]) or find(TREE, path[:1]), f"kvctl {words}"
        if path[0] == "help" and len(path) > 1:
            assert path[1] in topics()


def test_the_config_topic_names_every_setting() -> None:
    text = (ROOT / "kvctl" / "help" / "config.md").read_text(encoding="utf-8")
    assert not [name for name in SETTINGS if name not in text]


def test_completion_prints_the_generated_script(kvctl: Kvctl, generate: ModuleType) -> None:
    for shell in SHELLS:
        done = kvctl("completion", shell)
        assert done.code == 0
        assert done.out == (ROOT / "completions" / generate.COMPLETIONS[shell]).read_text(encoding="utf-8")


def complete(surroundings: dict[str, str], words: str, index: int, cwd: Path | None = None) -> list[str]:
    env = {**surroundings, "_KVCTL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
    done = subprocess.run([PROGRAM], env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=True)
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_completion_knows_commands_options_choices_and_topics(surroundings: dict[str, str]) -> None:
    assert "load-weights" in complete(surroundings, "kvctl ", 1)
    assert complete(surroundings, "kvctl models in", 2) == ["inspect"]
    assert "--tp-size" in complete(surroundings, "kvctl load-weights --tp", 2)
    assert complete(surroundings, "kvctl load-weights --verify f", 3) == ["full"]
    assert complete(surroundings, "kvctl help exit", 2) == ["exit-codes"]
    assert complete(surroundings, "kvctl completion z", 2) == ["zsh"]


def test_completion_knows_the_configured_repos(surroundings: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "kvctl.toml"
    config.write_text("".join(f'[[repos.{name}.stores]]\nurl = "s3://b"\n' for name in ("lab", "lake", "x")))
    assert complete(surroundings, "kvctl models ls -r la", 4, tmp_path) == ["lab", "lake"]
    config.write_text("broken")
    assert complete(surroundings, "kvctl models ls -r la", 4, tmp_path) == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_loads_the_script() -> None:
    script = f"source {ROOT}/completions/kvctl.bash && complete -p kvctl"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert "_kvctl_completion" in done.stdout
