"""The HTTP program: checks for any language, an admin API, and what operators need."""
