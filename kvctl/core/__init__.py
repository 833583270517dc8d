"""Addresses, units, errors, config, events, redaction: values and rules that every part shares.

May be imported by everything; imports nothing of kvctl but itself, no torch, no network library.
"""
