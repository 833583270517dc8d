"""Checkpoints of live weights: one generation of a slot (or of an engine's own weights), written to a store at a pace
that its users do not feel, committed last. Imports `weights`, `repo`, `transfer` and what is below them; a slot is
reached as the store that it is.
"""
