"""`kvctl kv ..`, from its arguments to what it prints and its exit code."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from kvctl.kv.bundle import read_bundle
from tests.cli.kv_files import PER_TOKEN, WEIGHTS, bundle_at, kv_of, other_weights, tokens_of
from tests.cli.program import Kvctl

SCHEMA = json.loads(files("kvctl.cli").joinpath("schemas/report.schema.json").read_text(encoding="utf-8"))


def test_a_bundle_comes_back_as_it_was(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "pull", "alice/chat@2", "--into", "bundle:back.safetensors", "-o", "json")
    assert done.code == 0, done.err
    assert kv_of(lab / "back.safetensors") == kv_of(lab / "0-130.safetensors")
    assert done.document["bytes"] == 130 * PER_TOKEN
    assert done.document["verified"]["state"] != "none"
    assert "usable 130 of 130 tokens" in done.err
    jsonschema.validate(done.document, SCHEMA)
    assert (lab / "back.safetensors").read_bytes() == (lab / "0-130.safetensors").read_bytes()
    with read_bundle(str(lab / "back.safetensors")) as bundle:
        assert bundle.token_ids == tokens_of(130)


def test_a_second_push_of_the_same_makes_no_generation(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "push", "bundle:0-130.safetensors", "alice/chat", "--with-tokens", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["extra"]["new_generation"] is False
    assert done.document["written"] == 0


def test_a_dry_push_says_what_is_stored_already(kvctl: Kvctl, lab: Path) -> None:
    made = bundle_at(lab / "longer.safetensors", 160)
    before = sorted(path for path in (lab / "a").rglob("*") if path.is_file())
    done = kvctl("kv", "push", f"bundle:{made}", "alice/chat", "-n", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["generation"] == 3
    assert (done.document["tokens"], done.document["tokens_shared"]) == (160, 128)
    assert done.document["new_bytes"] == 32 * PER_TOKEN
    assert sorted(path for path in (lab / "a").rglob("*") if path.is_file()) == before


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "words",
    [
        ("push", "bundle:0-130.safetensors", "carol/new", "--transport-opt"),
        ("pull", "alice/chat", "--into", "bundle:x.safetensors", "--transport-opt"),
        ("cp", "a:alice/chat", "b:alice/chat", "--transport-opt"),
        ("cp", "a:alice/chat", "b:alice/chat", "--to-transport-opt"),
        ("cp", "*/*", "--to", "b", "--to-transport-opt"),
    ],
)
def test_an_unknown_option_of_a_transport_ends_before_anything_moves(
    kvctl: Kvctl, lab: Path, words: tuple[str, ...]
) -> None:
    before = everything(lab)
    for text, problem, hint in (
        ("rails=2", "transport file has no option 'rails'", "it has direct, threads"),
        ("direct=maybe", "direct=maybe means nothing", "use false or true"),
        ("direct", "'direct' is not NAME=VALUE", ""),
    ):
        done = kvctl("kv", *words, text)
        assert done.code == 2
        assert problem in done.err
        assert hint in done.err
    assert everything(lab) == before


def test_a_transport_and_its_options_carry_a_session_there_and_back(kvctl: Kvctl, lab: Path) -> None:
    options = ("--transport", "file", "--transport-opt", "direct=true", "--transport-opt", "threads=2")
    there = ("--to-transport", "store-get", "-o", "json")
    reports = [
        kvctl("kv", "push", "bundle:0-130.safetensors", "carol/new", *options, "-o", "json"),
        kvctl("kv", "cp", "a:carol/new", "b:carol/new", *options, *there),
        kvctl("kv", "pull", "b:carol/new", "--into", "bundle:x.safetensors", *options, "-o", "json"),
    ]
    assert [done.code for done in reports] == [0, 0, 0], [done.err for done in reports]
    chosen = [[(item["name"], item["reason"]) for item in done.document["transport"]] for done in reports]
    assert chosen == [
        [("file", "asked for")], [("file", "asked for"), ("store-get", "asked for")], [("file", "asked for")]
    ]  # fmt: skip
    assert kv_of(lab / "x.safetensors") == kv_of(lab / "0-130.safetensors")


def test_pull_measures_and_keeps_nothing_by_default(kvctl: Kvctl, lab: Path) -> None:
    before = sorted(lab.iterdir())
    done = kvctl("kv", "pull", "bob/other")
    assert done.code == 0, done.err
    assert "64 tokens" in done.err
    assert [path for path in sorted(lab.iterdir()) if path not in before and path.name != "state"] == []


def test_a_dry_run_gives_the_verdict_and_moves_nothing(kvctl: Kvctl, lab: Path) -> None:
    (lab / "now.json").write_text(json.dumps([*tokens_of(48), *tokens_of(30, seed=5)]))
    done = kvctl("kv", "pull", "alice/chat", "--tokens", "now.json", "-n", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["schema"] == "kvctl.kv-verdict/1"
    assert (done.document["usable_tokens"], done.document["wanted_tokens"]) == (48, 78)


@pytest.mark.parametrize("dry", [[], ["-n"]])
def test_too_few_tokens_end_with_3(kvctl: Kvctl, lab: Path, dry: list[str]) -> None:
    (lab / "now.json").write_text(json.dumps([*tokens_of(48), *tokens_of(30, seed=5)]))
    args = ["kv", "pull", "alice/chat", "--tokens", "now.json", "--min-tokens", "60", "--into", "bundle:x.safetensors"]
    done = kvctl(*args, *dry)
    assert done.code == 3
    assert not (lab / "x.safetensors").exists()


def test_a_prefix_goes_into_the_bundle(kvctl: Kvctl, lab: Path) -> None:
    (lab / "now.bin").write_bytes(tokens_of(48).tobytes())
    done = kvctl("kv", "pull", "alice/chat", "--tokens", "now.bin", "--into", "bundle:x.safetensors")
    assert done.code == 0, done.err
    with read_bundle(str(lab / "x.safetensors")) as bundle:
        assert (bundle.tokens, bundle.token_ids) == (48, tokens_of(48))


def test_ranks_and_layers_are_bundles_of_their_own(kvctl: Kvctl, lab: Path) -> None:
    whole = lab / "0-130.safetensors"
    parts: dict[tuple[int, int], list[bytes]] = {}
    for rank in (0, 1):
        done = kvctl(
            "kv", "pull", "alice/chat", "--tp-size", "2", "--tp-rank", rank, "--into", f"bundle:r{rank}.safetensors"
        )
        assert done.code == 0, done.err
        with read_bundle(str(lab / f"r{rank}.safetensors")) as bundle:
            assert bundle.descriptor.groups[0].kv_heads == 2
            for place, kv in bundle.layers.items():
                parts.setdefault(place, []).extend((bytes(kv.k), bytes(kv.v)))
    with read_bundle(str(whole)) as bundle:
        for place, kv in bundle.layers.items():
            assert bytes(kv.k) == parts[place][0] + parts[place][2]
            assert bytes(kv.v) == parts[place][1] + parts[place][3]
    done = kvctl("kv", "pull", "alice/chat", "--layers", "1-2", "--into", "bundle:l.safetensors", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["bytes"] == 130 * PER_TOKEN * 2 // 3
    with read_bundle(str(lab / "l.safetensors")) as bundle:
        assert bundle.descriptor.groups[0].layers == (1, 2)


def test_ls_shows_generations_sharing_and_the_latest(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "ls", "-o", "json")
    assert done.code == 0, done.err
    rows = {(row["session"], row["generation"]): row for row in done.document["sessions"]}
    assert set(rows) == {("chat", 1), ("chat", 2), ("other", 1)}
    assert rows["chat", 2]["latest"]
    assert not rows["chat", 1]["latest"]
    assert rows["chat", 2]["shared_bytes"] > 0
    human = kvctl("kv", "ls", "alice/*", "--sort", "tokens")
    assert human.out.splitlines()[1].startswith("alice/chat@2*")
    assert kvctl("kv", "ls", "bob/*", "-o", "jsonl").out.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "sessions"),
    [
        (["--tenant", "b*"], {"bob/other"}),
        (["--not-latest"], {"alice/chat"}),
        (["--older-than", "1d"], set()),
        (["--idle", "0s"], {"alice/chat", "bob/other"}),
        (["--for-model", "x*"], set()),
        (["--weights", WEIGHTS[:10]], {"alice/chat", "bob/other"}),
        (["--stale-for", "cd" * 32, "--for-model", "m"], {"alice/chat", "bob/other"}),
        (["--stale-for", WEIGHTS, "--for-model", "m"], set()),
    ],
    ids=lambda value: " ".join(sorted(value)),
)
def test_filters(kvctl: Kvctl, lab: Path, args: list[str], sessions: set[str]) -> None:
    done = kvctl("kv", "ls", *args, "-o", "json")
    assert done.code == 0, done.err
    assert {f"{row['tenant']}/{row['session']}" for row in done.document["sessions"]} == sessions


def test_names_that_match_nothing_are_4_unless_allowed(kvctl: Kvctl, lab: Path) -> None:
    for command in (["ls"], ["pin"], ["evict", "-y"]):
        assert kvctl("kv", *command, "zoe/*").code == 4
        assert kvctl("kv", *command, "zoe/*", "--allow-empty").code == 0
    assert kvctl("kv", "pull", "zoe/none").code == 4
    assert kvctl("kv", "inspect", "alice/chat@9").code == 4
    assert kvctl("kv", "ls", "-r", "b").code == 0


def test_inspect_tells_what_an_operator_asks(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "inspect", "alice/chat", "-o", "json")
    assert done.code == 0, done.err
    found = done.document
    assert (found["tokens"], found["layers"], found["bytes_per_token"]) == (130, 3, PER_TOKEN)
    assert found["generations"] == [1, 2]
    assert found["producer"] == {"model": "m", "engine": "test"}
    assert found["identity"]["weights"] == WEIGHTS
    assert found["keyed"] is False
    human = kvctl("kv", "inspect", "alice/chat")
    assert "bytes per token" in human.out


def test_inspect_reads_bundles(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "inspect", "bundle:0-130.safetensors", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["tokens"] == 130
    assert done.document["bytes"] == 130 * PER_TOKEN


def test_diff_finds_the_common_prefix(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "diff", "alice/chat@1", "alice/chat@2", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["common_tokens"] == 96
    assert not done.document["same"]
    assert kvctl("kv", "diff", "alice/chat", "alice/chat", "-o", "json").document["same"]


def test_cp_moves_only_what_is_missing(kvctl: Kvctl, lab: Path) -> None:
    first = kvctl("kv", "cp", "a:alice/chat@1", "b:alice/chat", "-o", "json")
    assert first.code == 0, first.err
    assert first.document["written"] > 0
    again = kvctl("kv", "cp", "a:alice/chat@1", "b:other/name", "-o", "json")
    assert again.document["written"] == 0
    assert kvctl("kv", "pull", "b:alice/chat", "--into", "bundle:z.safetensors").code == 0
    assert kv_of(lab / "z.safetensors") == kv_of(lab / "0-100.safetensors")


def test_cp_of_a_glob_takes_the_latest_of_each(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "cp", "*/*", "--to", "b")
    assert done.code == 0, done.err
    rows = kvctl("kv", "ls", "-r", "b", "-o", "json").document["sessions"]
    assert {(row["session"], row["tokens"]) for row in rows} == {("chat", 130), ("other", 64)}
    assert kvctl("kv", "cp", "alice/chat").code == 2
    assert kvctl("kv", "cp", "alice/chat", "a:alice/chat").code == 2


def test_evict_shows_its_plan_and_asks(kvctl: Kvctl, lab: Path) -> None:
    asked = kvctl("kv", "evict", "alice/*")
    assert asked.code == 2
    assert "evict 2 sessions" in asked.err
    planned = kvctl("kv", "evict", "alice/*", "-n", "-o", "json")
    assert planned.document["sessions"] == ["alice/chat@2", "alice/chat@1"]
    assert planned.document["evicted"] is False
    assert len(kvctl("kv", "ls", "-o", "json").document["sessions"]) == 3
    done = kvctl("kv", "rm", "alice/*", "-y", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["evicted"] is True
    assert done.document["freed_bytes"] == planned.document["freed_bytes"] > 0
    assert kvctl("kv", "pull", "alice/chat").code == 4
    assert kvctl("kv", "pull", "bob/other").code == 0
    assert kvctl("repo", "gc").code == 0
    assert kvctl("repo", "check").code == 0


def test_pins_keep_and_budgets_refuse(kvctl: Kvctl, lab: Path) -> None:
    assert kvctl("kv", "pin", "bob/*", "--budget", "10").code == 9
    assert kvctl("kv", "pin", "bob/*").code == 0
    done = kvctl("kv", "evict", "*/*", "-y", "-o", "json")
    assert done.document["pinned"] == ["bob/other@1"]
    assert kvctl("kv", "unpin", "bob/*").code == 0
    assert kvctl("kv", "evict", "bob/other", "-y", "-o", "json").document["sessions"] == ["bob/other@1"]


def test_a_policy_with_nothing_to_do_is_no_error(kvctl: Kvctl, lab: Path) -> None:
    assert kvctl("kv", "evict", "--idle", "7d").code == 0
    assert kvctl("kv", "evict", "--budget", "1GiB").code == 0
    assert kvctl("kv", "evict").code == 2


def test_a_budget_evicts_and_a_limit_caps(kvctl: Kvctl, lab: Path) -> None:
    capped = kvctl("kv", "evict", "--budget", "0", "--limit-bytes", "1", "-y", "-o", "json")
    assert capped.document["sessions"] == []
    assert capped.document["limited"]
    done = kvctl("kv", "evict", "--budget", "0", "-y", "-o", "json")
    assert len(done.document["sessions"]) == 3


def test_stale_sessions_of_a_model_that_was_updated(kvctl: Kvctl, lab: Path, model: Path) -> None:
    """K1: the repo's model m has other weights now than those that made alice's sessions."""
    assert kvctl("push-weights", model, "m").code == 0
    digest = kvctl("models", "ls", "-o", "json").document["models"][0]["digest"]
    made = bundle_at(lab / "new.safetensors", 32, seed=3, meaning=other_weights(digest))
    assert kvctl("kv", "push", f"bundle:{made}", "carol/new").code == 0
    rows = kvctl("kv", "ls", "--stale-for", "a:m", "-o", "json").document["sessions"]
    assert {row["session"] for row in rows} == {"chat", "other"}
    seen = kvctl("kv", "inspect", "alice/chat", "--model", "a:m", "-o", "json").document
    assert seen["stale"] is True
    assert seen["compatible"] is False
    assert "weights" in {item["field"] for item in seen["differences"]}
    done = kvctl("kv", "evict", "--stale-for", "a:m", "-y", "-o", "json")
    assert len(done.document["sessions"]) == 3
    assert [row["session"] for row in kvctl("kv", "ls", "-o", "json").document["sessions"]] == ["new"]


def test_an_unknown_digest_evicts_nothing(kvctl: Kvctl, lab: Path, model: Path) -> None:
    done = kvctl("kv", "evict", "--stale-for", model, "-y", "-o", "json")
    assert done.code == 8
    assert "digest" in done.error["what"]
    assert kvctl("kv", "evict", "--stale-for", "cd" * 32, "-y").code == 2  # it does not tell whose sessions
    assert len(kvctl("kv", "ls", "-o", "json").document["sessions"]) == 3


def test_a_model_of_other_weights_is_refused_before_anything_moves(kvctl: Kvctl, lab: Path, model: Path) -> None:
    assert kvctl("push-weights", model, "m").code == 0
    done = kvctl("kv", "pull", "alice/chat", "--model", "a:m", "--into", "bundle:x.safetensors", "-o", "json")
    assert done.code == 8
    fields = {item["field"] for item in done.error["details"]["differences"]}
    assert "weights" in fields
    assert not (lab / "x.safetensors").exists()
    assert kvctl("kv", "pull", "alice/chat", "--model", model, "-n").code == 8


def test_damage_ends_with_3_and_with_strict_7(kvctl: Kvctl, lab: Path) -> None:
    chunks = [path for path in (lab / "a" / "chunks").glob("*/*") if path.stat().st_size > 8192]
    for path in chunks:
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert kvctl("kv", "pull", "bob/other").code == 3
    assert kvctl("kv", "pull", "bob/other", "--strict").code == 7
    done = kvctl("kv", "pull", "bob/other", "--into", "bundle:x.safetensors", "-o", "json")
    assert done.code == 3
    assert done.error["details"]["usable_tokens"] < 64


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["push", "chat.safetensors", "a/b"], "bundle:chat.safetensors"),
        (["push", "bundle:none.safetensors", "alice"], "there is no '/'"),
        (["push", "bundle:0-100.safetensors", "alice/chat@3"], "next generation"),
        (["pull", "alice/*"], "glob"),
        (["pull", "alice/chat", "--tp-size", "2"], "--tp-rank"),
        (["pull", "alice/chat", "--layers", "x"], "list of layers"),
        (["pull", "alice/chat", "--layers", "99"], "no layer 99"),
        (["pull", "alice/chat", "--into", "file.safetensors"], "bundle:file.safetensors"),
    ],
    ids=str,
)
def test_wrong_arguments_are_2_and_say_how(kvctl: Kvctl, lab: Path, args: list[str], says: str) -> None:
    done = kvctl("kv", *args)
    assert done.code == 2, done.err
    assert says in done.err


def test_an_engine_that_does_not_answer_is_6(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "pull", "alice/chat", "--into", "engine:http://127.0.0.1:9")
    assert done.code == 6, done.err
    assert "http://127.0.0.1:9 does not answer" in done.err


def test_a_bundle_without_tokens_wants_the_transcript(kvctl: Kvctl, lab: Path) -> None:
    made = bundle_at(lab / "mute.safetensors", 20, seed=4, with_ids=False)
    assert kvctl("kv", "push", f"bundle:{made}", "dan/mute").code == 2
    (lab / "t.json").write_text(json.dumps(list(tokens_of(20, seed=4))))
    assert kvctl("kv", "push", f"bundle:{made}", "dan/mute", "--tokens", "t.json").code == 0


def test_a_key_file_is_needed_once_it_was_used(kvctl: Kvctl, lab: Path) -> None:
    (lab / "key").write_bytes(bytes(range(32)))
    made = "bundle:0-100.safetensors"
    assert kvctl("kv", "push", made, "b:alice/k", "--kv-key-file", "key").code == 0
    assert kvctl("kv", "pull", "b:alice/k").code == 2
    assert kvctl("kv", "pull", "b:alice/k", "--kv-key-file", "key").code == 0
    (lab / "other").write_bytes(bytes(32))
    assert kvctl("kv", "pull", "b:alice/k", "--kv-key-file", "other").code == 8
    # between repos of different keys: new keys need the tokens
    assert kvctl("kv", "cp", "a:alice/chat", "b:alice/copy", "--to-kv-key-file", "key").code == 0
    assert kvctl("kv", "cp", "b:alice/k", "a:alice/back", "--kv-key-file", "key", "-o", "json").code == 8


def test_advice_from_a_model_and_a_report(kvctl: Kvctl, lab: Path, model: Path) -> None:
    given = ["--tokens", "32768", "--bandwidth", "20GB", "--latency", "5ms", "--prefill-rate", "9000"]
    done = kvctl("kv", "advise", model, *given, "-o", "json")
    assert done.code == 0, done.err
    assert done.document["store"] is True
    assert done.document["recompute_s"] == pytest.approx(32768 / 9000)
    assert kvctl("kv", "pull", "alice/chat").code == 0
    slow = ["--tokens", "1000", "--report", "last", "--prefill", "1000=1us"]
    assert kvctl("kv", "advise", "--bytes-per-token", "1000", *slow).code == 2  # no such unit
    slow[-1] = "1000=0.001ms"
    done = kvctl("kv", "advise", "--bytes-per-token", "1000", *slow)
    assert done.code == 0, done.err
    assert done.out.startswith("do not store:")
    assert kvctl("kv", "advise", "--tokens", "10").code == 2


def test_copies_of_a_glob_are_one_document_and_one_that_fails_stops_no_other(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "cp", "*/*", "--to", "b", "-o", "json")
    assert done.code == 0, done.err
    rows = {row["session"]: row["report"]["command"] for row in done.document["sessions"]}
    assert rows == {"alice/chat@2": "kv cp", "bob/other@1": "kv cp"}
    again = kvctl("kv", "cp", "bob/*", "--to", "b", "-o", "json")
    assert [row["session"] for row in again.document["sessions"]] == ["bob/other@1"]
    lines = kvctl("kv", "cp", "*/*", "--to", "b", "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["session"] for line in lines] == ["alice/chat@2", "bob/other@1"]
    assert kvctl("kv", "cp", "bob/other", "--to", "b", "-o", "json").document["schema"] == "kvctl.report/1"
    assert kvctl("kv", "cp", "none/*", "--to", "b").code == 4
    assert kvctl("repo", "init", "-r", "./c").code == 0
    for path in (lab / "a" / "sessions" / "alice").rglob("2.json"):
        path.write_text("{}")
    partly = kvctl("kv", "cp", "*/*", "--to", "./c", "-o", "json")
    assert partly.code == 3
    assert [bool(row["problem"]) for row in json.loads(partly.out)["sessions"]] == [True, False]
    assert partly.error["details"] == {"failed": ["alice/chat@2"]}


@pytest.mark.parametrize("layers", ["0-99999999999", "²", "3-1", "0-99999", "1-2-3", ""])
def test_layers_that_no_model_has_are_2_at_once(kvctl: Kvctl, lab: Path, layers: str) -> None:
    assert kvctl("kv", "pull", "alice/chat", "--layers", layers).code == 2


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "1" * 5000, "[" + "1" * 5000 + "]", "[-1]", "[4294967296]", "[1.5]", "[true]", "\ud800"]
)
def test_token_files_that_hold_no_tokens_are_2(kvctl: Kvctl, lab: Path, text: str) -> None:
    (lab / "t.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    done = kvctl("kv", "pull", "alice/chat", "--tokens", "t.json", "-o", "json")
    assert done.code == 2, done.err
