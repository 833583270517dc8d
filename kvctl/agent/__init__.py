"""The agent: a daemon that owns the memory of weights, so that they outlive the engines that use them. Slots with
generations and leases, their hand-over by sealed memfd, the control API on a unix socket, peers, swaps. Imports
`node` (a peer reads a slot as it reads a storage node), `weights`, `kv` and what is below them; torch in `attach` only.
"""
