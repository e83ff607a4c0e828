"""Compare limitforge with its peers: `python -m bench`. Only ratios within one run matter; no time is asserted."""
