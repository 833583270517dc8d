"""`kvctl doctor`: what this machine and the configured stores give, line by line, with the fix for what they do not.

One file per area; each gives probes (small functions that return findings), read from a root of /sys, /proc and /dev
that tests bring their own of. `examine` runs them, each under a deadline: nothing hangs where hardware is missing. May
import the seams, `core` and what the stores need; only the CLI imports it. Nothing here prints or changes anything.
"""
