"""Model weights: safetensors headers and index files, sources, slicing, digests, load, push. Parsing,
cutting, slicing and planning are pure. Imports `repo`, `transfer`, `transports`, `memory`, `core`; torch
only inside the tensor API.
"""
