"""Starts PostgreSQL and Kafka from packages, the server and a worker, until Ctrl-C: ``python -m examples.durable_hello``."""

import argparse
import sys

from examples.stage import keep_open

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.durable_hello", description="The tutorial's service.")
    parser.add_argument("--port", type=int, default=8080, help="where it listens; default 8080")
    sys.exit(keep_open("examples.durable_hello.app:app", "examples.durable_hello.app:durable", port=parser.parse_args().port))
