"""Versions of the services are written down once; where a file cannot read them, it must say the same."""

import re
from pathlib import Path

from fencepost.devservices import pins

COMPOSE = (Path(__file__).parents[2] / "docker-compose.yml").read_text()


def test_the_compose_file_uses_the_pinned_images() -> None:
    defaults = set(re.findall(r"\$\{\w+:-([^}]+)\}", COMPOSE))
    assert {pins.POSTGRES_IMAGE, pins.KAFKA_IMAGE} <= defaults
