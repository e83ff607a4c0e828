"""Configuration as code: parse, validate, diff, apply and export the configuration file.

It uses `catalog.database` to read and write the catalog, and never imports `catalog.live`.
"""
