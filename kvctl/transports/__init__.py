"""The two seams (Store: control, Transport: bulk), the registry that finds plug-ins, and wrappers around both.

Wrappers (retry, limits, fault injection) surround any store or transport; a plug-in has none of them inside.
`mem://` and the generic `store-get` transport live here. May import `core` and `memory`; imports no plug-in.
"""
