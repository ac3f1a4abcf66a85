"""The tutorial's service: ``python -m examples.durable_hello``."""
