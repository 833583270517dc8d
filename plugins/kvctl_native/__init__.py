"""Plug-in: the `node://` store and the `native-tcp` transport, clients of kvctl's storage node. Imports the seams and
`core` only.
"""
