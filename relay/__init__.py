"""The relay service: publishes outbox rows to Kafka, in order per key, and marks them delivered."""
