"""The demo: a whole system on one machine, with failures, counted."""
