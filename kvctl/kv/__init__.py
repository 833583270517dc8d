"""KV sessions: what a conversation's KV cache means (identity), how it is cut and stored (geometry, tokens, packs,
codecs), how a session is named, pushed, pulled, evicted and advised on.

May import `repo`, `transfer`, `transports`, `memory` and `core`; not `weights` (a model's digest comes in as text),
no engine and no torch. The formats are specified in `kvctl/help/format.md`; identity, geometry, tokens, packs, codecs
and manifest are pure: values in, values out.
"""
