"""Imports point one way, heavy modules stay out of the CLI's cheap commands, and only the CLI prints or exits."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "boto3", "botocore", "nixl", "nixl_cu12", "numpy", "rich"}

BASE = {"core"}
SEAMS = {"transports", "memory"} | BASE
MIDDLE = {"transfer"} | SEAMS
REPO = {"repo"} | MIDDLE
TOP = {"weights", "kv"} | REPO
ALLOWED = {
    "core": set[str](),
    "memory": BASE,
    "transports": {"memory"} | BASE,
    "transfer": SEAMS,
    "repo": MIDDLE,
    "weights": REPO,
    "kv": REPO,
    "engines": BASE,
    "checkpoint": {"agent", "engines"} | TOP,
    "agent": {"engines", "node"} | TOP,
    "node": TOP,
    "bench": {"checkpoint", "engines"} | TOP,
    "doctor": TOP,
    "testing": SEAMS,
    "help": set[str](),
    "cli": {"agent", "node", "bench", "checkpoint", "doctor", "engines", "help"} | TOP,
}
# The demo starts the servers that the tests use; the maker of test models knows the dtypes of the format.
EXCEPTIONS = {("kvctl/cli/demo.py", "testing"), ("kvctl/testing/models.py", "weights")}
TORCH = {"kvctl/agent/attach.py", "kvctl/memory/cuda.py", "kvctl/weights/api.py"}
# Plug-ins of engines drive the use cases, have the engine's tensors in hand, and are clients of the host's agent.
ENGINES = {"kvctl_transformers", "kvctl_vllm"}
# RDMA is the requests of native-tcp and s3 with another way for the bytes: it builds on those plug-ins.
BUILDS_ON = {"kvctl_verbs": {"kvctl_native", "kvctl_s3"}}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Full names of imported modules, with the line; `from a import b` gives a.b too, as b may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", modules("kvctl"), ids=named)
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT / "kvctl").parts
    if len(parts) == 1:
        return  # kvctl/__init__.py: the Python API, lazily
    here = parts[0]
    wrong = []
    for name, line in imported(path):
        package, _, rest = name.partition(".")
        if package.startswith("kvctl_"):
            wrong.append(f"line {line}: imports the plug-in {name}")
        if package != "kvctl" or not rest or rest == "__version__":
            continue
        there = rest.partition(".")[0]
        if there != here and there not in ALLOWED[here] and (named(path), there) not in EXCEPTIONS:
            wrong.append(f"line {line}: {here} imports {there} ({name})")
    assert not wrong, wrong


@pytest.mark.parametrize("path", modules("plugins"), ids=named)
def test_plugins_import_the_seams_and_core_only(path: Path) -> None:
    own = path.relative_to(ROOT / "plugins").parts[0]
    wrong = []
    for name, line in imported(path):
        package, _, rest = name.partition(".")
        if package.startswith("kvctl_") and package != own and package not in BUILDS_ON.get(own, set()):
            wrong.append(f"line {line}: imports another plug-in, {name}")
        allowed = {"agent", "engines"} | TOP if own in ENGINES else SEAMS
        if package == "kvctl" and rest and rest.partition(".")[0] not in allowed | {"__version__"}:
            wrong.append(f"line {line}: imports {name}")
    assert not wrong, wrong


@pytest.mark.parametrize("path", [*modules("kvctl"), *modules("plugins")], ids=named)
def test_torch_stays_where_tensors_are(path: Path) -> None:
    if named(path) not in TORCH and not named(path).startswith(tuple(f"plugins/{name}/" for name in ENGINES)):
        assert not [line for name, line in imported(path) if name.partition(".")[0] == "torch"]


def says_or_ends(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"print", "exit", "quit", "sys.exit", "os._exit", "sys.stdout.write", "sys.stderr.write"}:
                yield f"line {node.lineno}: {called}"
        elif isinstance(node, ast.Raise) and node.exc is not None and "SystemExit" in ast.unparse(node.exc):
            yield f"line {node.lineno}: SystemExit"


@pytest.mark.parametrize("path", [*modules("kvctl"), *modules("plugins")], ids=named)
def test_only_the_cli_prints_or_exits(path: Path) -> None:
    if named(path).startswith(("kvctl/cli/", "kvctl/testing/")) or "/examples/" in named(path):
        return  # a test server and an example are programs too
    assert not list(says_or_ends(path))


def test_inside_the_cli_only_output_prints() -> None:
    allowed = {
        "kvctl/cli/output.py": "stderr.write",
        "kvctl/cli/main.py": "sys.exit",
        "kvctl/cli/signals.py": "os._exit",  # what does not drain after a signal is ended
    }
    for path in modules("kvctl/cli"):
        for found in says_or_ends(path):
            assert allowed.get(named(path), "nothing") in found, f"{named(path)}: {found}"


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nsys.stderr.write('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["transports", "ls"],
        ["transports", "probe"],
        ["completion", "bash"],
        ["help", "exit-codes"],
        ["load-weights", "--help"],
        ["repo", "--help"],
        ["doctor", "--help"],
        ["bench", "paths", "--help"],
        ["transports", "check", "--help"],
    ],
    ids=" ".join,
)
def test_cheap_commands_load_nothing_heavy(argv: list[str]) -> None:
    loaded = loaded_by(f"from kvctl.cli.main import run\nassert run({argv!r}) == 0")
    assert not {name.partition(".")[0] for name in loaded} & HEAVY


def test_help_imports_no_command_and_no_part_but_the_error_tree() -> None:
    loaded = loaded_by("from kvctl.cli.main import run\nrun(['--help'])")
    ours = {name for name in loaded if name.startswith("kvctl")}
    assert not [name for name in ours if name.startswith("kvctl.cli.commands")]
    assert {name.split(".")[1] for name in ours if "." in name} <= {"cli", "core"}
    assert not loaded & {"tqdm", "platformdirs", "tomllib", "dataclasses"} - loaded_by("import click")


def test_help_costs_at_most_a_few_modules_more_than_click() -> None:
    """The budget is 1.3 times the CPU of `import typer`, of which click is half; counted in modules, as time is
    noise here.
    """
    ours = loaded_by("from kvctl.cli.main import run\nrun(['--help'])")
    click = loaded_by("import click, click.shell_completion")
    assert len(ours - click) <= 22, sorted(ours - click)


@pytest.mark.parametrize("words", ["kvctl ", "kvctl load-weights --", "kvctl models ", "kvctl help "], ids=str)
def test_completion_loads_nothing_heavy(words: str) -> None:
    given = words.split()
    index = len(given) if words.endswith(" ") else len(given) - 1
    code = (
        f"import os\nos.environ.update(_KVCTL_COMPLETE='bash_complete', COMP_WORDS={words!r}, COMP_CWORD='{index}')\n"
        "from kvctl.cli.main import run\n"
        "try:\n    run([])\nexcept SystemExit as end:\n    assert end.code == 0"
    )
    loaded = loaded_by(code)
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
