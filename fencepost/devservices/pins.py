"""The versions of everything that devservices runs, pinned in this one place and nowhere else."""

from typing import Final, NamedTuple


class Coordinate(NamedTuple):
    """A Maven artifact: group, artifact and exact version."""

    group: str
    artifact: str
    version: str


KAFKA_VERSION: Final = "4.2.2"
# Kafka logs through slf4j 1.7; this version is the one whose API jar Kafka itself depends on.
LOG4J_VERSION: Final = "2.25.5"

KAFKA_COORDINATES: Final = (
    Coordinate("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    Coordinate("org.apache.logging.log4j", "log4j-slf4j-impl", LOG4J_VERSION),
    Coordinate("org.apache.logging.log4j", "log4j-core", LOG4J_VERSION),
)

# The oldest Java that a Kafka 4 broker starts on.
OLDEST_JAVA: Final = 17

# The local PostgreSQL and JDK are the wheels that the dev extra of pyproject.toml asks for.
POSTGRES_IMAGE: Final = "postgres:17"
KAFKA_IMAGE: Final = f"apache/kafka:{KAFKA_VERSION}"
