"""A real PostgreSQL and a real Apache Kafka for development, tests, the demo and the benchmarks.

They come from the first of these that works:

1. addresses given by `FENCEPOST_TEST_DATABASE_URL` and `FENCEPOST_TEST_KAFKA`;
2. containers, where a Docker daemon answers;
3. local processes, with nothing installed but the dev extra's packages: PostgreSQL from a wheel, Kafka's jars from
   Maven coordinates, Java from a wheel.

What was started is stopped with the run, by its own process id, also when the run is killed.
`python -m fencepost.devservices` starts them for a shell or for one command.
"""

import sys

try:
    from fencepost.devservices.errors import ServicesError
    from fencepost.devservices.kafka import Broker
    from fencepost.devservices.postgres import LocalPostgres
    from fencepost.devservices.processes import free_port
    from fencepost.devservices.services import Kind, Services, start_services
except ModuleNotFoundError as error:
    # While `python -m` looks for a module, its name stands there as "-m": a person waits for words, a program for the error.
    if sys.argv[0] != "-m":
        raise
    sys.stderr.write(f"fencepost.devservices needs {error.name}: in a clone of Fencepost, pip install -e '.[dev]'\n")
    sys.exit(2)

__all__ = ["Broker", "Kind", "LocalPostgres", "Services", "ServicesError", "free_port", "start_services"]
