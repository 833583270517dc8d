"""Running inference engines as kvctl sees them from outside: what they hold, their weights out and in, their KV in and
out, how fast they speak. Here are the seam (`api`), its finding by entry points (`kvctl.engines`), and a small client
for engines that talk HTTP; what is an engine's own is in its plug-in. May import `core`; no torch, no engine.
"""
