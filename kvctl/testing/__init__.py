"""Shipped, public test tools: the contracts that every store and transport must pass, and the faulty S3
server. May import the seams and `core`; nothing in kvctl imports it.
"""
