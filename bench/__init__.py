"""limitforge beside its peers: `python -m bench`. Only ratios of one run mean anything; nothing here asserts a time."""
