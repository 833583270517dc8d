"""What kvctl stores: members, chunks, manifests, state, leases, and everything that keeps them right
(commit, gc, check, repair, rebalance). One repo holds weights and KV. Placement and layout are pure.
Imports `transfer`, `transports`, `memory`, `core`; knows nothing of tensors.
"""
