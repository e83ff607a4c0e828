"""The HTTP service: checks for clients in any language, the admin API, health and metrics.

`app.py` builds a service from its settings. `checks` decides and renders responses without knowing HTTP framing, `http`
serves them, `counters` counts what was decided, `processes` runs the workers, and `admin` changes the catalog.
"""
