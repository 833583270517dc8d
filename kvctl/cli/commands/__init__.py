"""One module per command or group. A module imports click and the CLI's own parts; what a command works with
is imported inside it, so that its help and completion stay cheap.
"""
