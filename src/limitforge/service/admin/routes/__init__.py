"""The routes of the admin API, one module per resource, each with its request bodies and filters."""
