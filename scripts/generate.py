"""The generated files and their content; `scripts/generate` writes them, a test compares them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvctl.cli.commands.completion import script
from kvctl.core import errors

ROOT = Path(__file__).resolve().parent.parent
COMPLETIONS = {"bash": "kvctl.bash", "zsh": "_kvctl", "fish": "kvctl.fish"}


def tree_rows() -> list[tuple[str, int, str]]:
    """(class, exit code, meaning) of each line of the tree in the docstring of `kvctl.core.errors`."""
    rows = re.findall(r"^[ │├└─]*(\w+Error)\s+(\d+)\s+(.+)$", errors.__doc__ or "", re.MULTILINE)
    return [(name, int(code), meaning.strip()) for name, code, meaning in rows]


def exit_codes() -> str:
    """The help topic, from the error tree."""
    rows = tree_rows()
    lines = ["# Exit codes, and the errors behind them", "", "    0    ok"]
    for code in sorted({code for _, code, _ in rows}):
        _, _, meaning = next(row for row in rows if row[1] == code)
        lines.append(f"    {code:<4} {meaning}")
    lines += ["    130  ended by SIGINT (Ctrl-C)", "    143  ended by SIGTERM", ""]
    lines += ["Only 6 means: run it again. A name or glob that matches nothing is 4, unless --allow-empty.", ""]
    lines += ["With `-o json` an error carries a finer code:", ""]
    for name, code, meaning in rows:
        kind: type[errors.KvctlError] = getattr(errors, name)
        lines.append(f"    {kind.code:<15} {code:<4} {meaning}")
    return "\n".join(lines) + "\n"


def generated() -> dict[Path, str]:
    found = {ROOT / "completions" / name: script(shell) for shell, name in COMPLETIONS.items()}
    found[ROOT / "kvctl" / "help" / "exit-codes.md"] = exit_codes()
    return found


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = 0
    for path, text in generated().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{'stale' if check else 'writing'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
