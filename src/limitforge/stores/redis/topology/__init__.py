"""Which servers there are, which slots they own, and how a check over several slots is decided. Nothing does I/O."""
