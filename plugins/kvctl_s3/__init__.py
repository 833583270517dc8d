"""Plug-in: the `s3://` store (boto3 for control) and the `s3` transport (our own lean reader for bulk).

Imports the seams and `core` only; boto3 is imported when a store is opened.
"""
