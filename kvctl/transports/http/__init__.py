"""Bulk over HTTP/1.1, for any plug-in whose store answers ranged GETs: one transport that is told by a `Dialect` how
requests are written and what errors mean, the checks of answers, and errors from status codes. Knows neither S3 nor
storage nodes. May import `core`, `memory` and the seams; plug-ins import it.
"""
