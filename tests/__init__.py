"""The suite. Its folders mirror what they test; `servers` starts the real servers that they talk to."""
