"""A page that streams an answer token by token, and survives what is killed: ``python -m examples.durable_answers``."""
