"""The command tree as one table: names, one line of help each, and where the code is. Imports nothing, so that
`kvctl --help` and completion know every command without loading one.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Leaf(NamedTuple):
    """A command; `target` is "module:attribute" of a click command, imported when it is invoked."""

    name: str
    summary: str
    target: str


class Branch(NamedTuple):
    """A group of commands."""

    name: str
    summary: str
    leaves: tuple[Leaf, ...]


class Section(NamedTuple):
    """A heading of `kvctl --help`."""

    title: str
    entries: tuple[Leaf | Branch, ...]


_COMMANDS: Final = "kvctl.cli.commands"

TREE: Final = (
    Section(
        "Weights",
        (
            Leaf(
                "load-weights",
                "Load a model's weights into memory, files or nothing, verified.",
                f"{_COMMANDS}.load_weights:command",
            ),
            Leaf(
                "push-weights",
                "Store a model in a repo; what is there already is not sent.",
                f"{_COMMANDS}.push_weights:command",
            ),
            Branch(
                "models",
                "List, inspect, verify, copy and remove models.",
                (
                    Leaf("ls", "List the models of a repo.", f"{_COMMANDS}.models:ls"),
                    Leaf("inspect", "Show a model's files, tensors and digest.", f"{_COMMANDS}.models:inspect"),
                    Leaf(
                        "digest",
                        "Digest a model's tensors into a sidecar that loads can require.",
                        f"{_COMMANDS}.models:digest",
                    ),
                    Leaf("verify", "Read a model and check every digest.", f"{_COMMANDS}.models:verify"),
                    Leaf("cp", "Copy a model to another repo.", f"{_COMMANDS}.models:cp"),
                    Leaf("rm", "Remove models; gc frees their chunks later.", f"{_COMMANDS}.models:rm"),
                ),
            ),
            Leaf("swap", "Swap the weights of a running engine or a slot, verified.", f"{_COMMANDS}.swap:command"),
            Branch(
                "checkpoint",
                "Write live weights to a store at a pace nobody feels; restore them.",
                (
                    Leaf(
                        "create", "Write one generation of a slot, paced, resumable.", f"{_COMMANDS}.checkpoint:create"
                    ),
                    Leaf("ls", "List the checkpoints of a name.", f"{_COMMANDS}.checkpoint:ls"),
                    Leaf("verify", "Read a checkpoint and check every tensor.", f"{_COMMANDS}.checkpoint:verify"),
                    Leaf("restore", "Load a checkpoint into a folder or a slot.", f"{_COMMANDS}.checkpoint:restore"),
                    Leaf("rm", "Remove a checkpoint.", f"{_COMMANDS}.checkpoint:rm"),
                ),
            ),
        ),
    ),
    Section(
        "KV sessions",
        (
            Branch(
                "kv",
                "Store, find, move and evict KV caches of conversations.",
                (
                    Leaf("push", "Store a session's KV; blocks that are there are not sent.", f"{_COMMANDS}.kv:push"),
                    Leaf("pull", "Fetch the usable prefix of a session, verified.", f"{_COMMANDS}.kv:pull"),
                    Leaf("ls", "List sessions, by name, age, model, staleness.", f"{_COMMANDS}.kv_manage:ls"),
                    Leaf("inspect", "Show what a session is, and who can use it.", f"{_COMMANDS}.kv_manage:inspect"),
                    Leaf("diff", "Compare two sessions or generations.", f"{_COMMANDS}.kv_manage:diff"),
                    Leaf("cp", "Copy sessions to another repo or name.", f"{_COMMANDS}.kv:cp"),
                    Leaf("pin", "Keep sessions from eviction.", f"{_COMMANDS}.kv_manage:pin"),
                    Leaf("unpin", "Let sessions be evicted again.", f"{_COMMANDS}.kv_manage:unpin"),
                    Leaf("evict", "Remove sessions; gc frees their space later.", f"{_COMMANDS}.kv_manage:evict"),
                    Leaf("rm", "The same as evict.", f"{_COMMANDS}.kv_manage:evict"),
                    Leaf("advise", "Say whether restoring beats computing.", f"{_COMMANDS}.kv_advise:command"),
                    Leaf("tiers", "Show the agent's KV tiers and their hit rates.", f"{_COMMANDS}.agent:tiers"),
                    Leaf("export", "Write sessions as KV bundles into a folder.", f"{_COMMANDS}.kv_exchange:export"),
                    Leaf("import", "Push every KV bundle of a folder.", f"{_COMMANDS}.kv_exchange:import_"),
                ),
            ),
        ),
    ),
    Section(
        "Storage",
        (
            Branch(
                "repo",
                "Make a repo over one or more stores and keep it right.",
                (
                    Leaf("init", "Make a repo over its member stores.", f"{_COMMANDS}.repo:init"),
                    Leaf(
                        "status", "Show members, what is at risk, and what cannot be read.", f"{_COMMANDS}.repo:status"
                    ),
                    Leaf("check", "Look for holes, orphans and damage.", f"{_COMMANDS}.repo:check"),
                    Leaf(
                        "repair",
                        "Restore missing or damaged replicas; replace a dead member.",
                        f"{_COMMANDS}.repo:repair",
                    ),
                    Leaf("rebalance", "Spread chunks over the members as they are now.", f"{_COMMANDS}.repo:rebalance"),
                    Leaf("drain", "Move everything off a member.", f"{_COMMANDS}.repo:drain"),
                    Leaf("gc", "Free what no model and no session uses.", f"{_COMMANDS}.repo:gc"),
                    Leaf("stats", "Show sizes, and what models share.", f"{_COMMANDS}.repo:stats"),
                ),
            ),
            Branch(
                "node",
                "Run a storage node: objects of a directory for many readers.",
                (
                    Leaf("serve", "Serve a directory until a signal ends it.", f"{_COMMANDS}.node:serve"),
                    Leaf("key", "Make a node's master key.", f"{_COMMANDS}.node:key"),
                    Leaf("token", "Derive a client's key for some rights and a prefix.", f"{_COMMANDS}.node:token"),
                ),
            ),
            Branch(
                "agent",
                "Keep weights in memory that outlives engines; show and free its slots.",
                (
                    Leaf("serve", "Run the agent of this host until a signal ends it.", f"{_COMMANDS}.agent:serve"),
                    Leaf("ls", "List slots, their generations and who uses them.", f"{_COMMANDS}.agent:ls"),
                    Leaf("unload", "Free a slot that nobody uses.", f"{_COMMANDS}.agent:unload"),
                ),
            ),
            Branch(
                "transports",
                "Show, check and make the ways that bytes can move.",
                (
                    Leaf("ls", "List stores and transports, with what they need.", f"{_COMMANDS}.transports:ls"),
                    Leaf(
                        "probe",
                        "Say which transports can run here, and why others cannot.",
                        f"{_COMMANDS}.transports:probe",
                    ),
                    Leaf(
                        "check",
                        "Hold a store and its transports to the contracts, live.",
                        f"{_COMMANDS}.transports:check",
                    ),
                    Leaf("new", "Write a plug-in package that works, to start from.", f"{_COMMANDS}.transports:new"),
                ),
            ),
            Branch(
                "bench",
                "Measure your own stores.",
                (
                    Leaf(
                        "paths",
                        "Measure every path to a store against the ceiling of its medium.",
                        f"{_COMMANDS}.bench:paths",
                    ),
                    Leaf(
                        "interference",
                        "Measure what checkpoints do to a running engine's tokens.",
                        f"{_COMMANDS}.bench:interference",
                    ),
                ),
            ),
        ),
    ),
    Section(
        "Help and records",
        (
            Leaf("demo", "Stripe a real model over three stores, lose one, load, repair.", f"{_COMMANDS}.demo:command"),
            Leaf("doctor", "Say what this machine and the stores lack, with the fix.", f"{_COMMANDS}.doctor:command"),
            Leaf("report", "Show the report of the last run, or of one by its ID.", f"{_COMMANDS}.report:command"),
            Branch(
                "config",
                "Look at the configuration.",
                (Leaf("show", "Show every setting's value and where it comes from.", f"{_COMMANDS}.config:show"),),
            ),
            Leaf("help", "Show a help topic, or list them.", f"{_COMMANDS}.help:command"),
            Leaf("completion", "Print the completion script of a shell.", f"{_COMMANDS}.completion:command"),
        ),
    ),
)
