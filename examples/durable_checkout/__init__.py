"""A shop's checkout on durable routes: ``python -m examples.durable_checkout`` runs all of it, kills parts of it, and counts."""
