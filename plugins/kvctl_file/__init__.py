"""Plug-in: the `file://` store and the `file` transport (preadv/pwritev). Imports the seams and `core` only."""
