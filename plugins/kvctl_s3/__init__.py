"""Plug-in: the `s3://` store and the `s3` transport (our own lean reader for bulk).

Imports the seams and `core` only. boto3 is imported when something must be written, or when credentials need more
than the environment.
"""
