"""What the tests share: real services, topics, records read back, relays as processes, and bounded waiting."""
