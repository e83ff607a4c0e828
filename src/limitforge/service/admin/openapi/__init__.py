"""The OpenAPI document of all routes, and the reference page that shows it."""
