"""The admin API: a FastAPI application that reads and changes the catalog.

It authenticates admin tokens. Routes that take an API key are in `service/checks` and `service/http`, which do not
import this package.
"""
