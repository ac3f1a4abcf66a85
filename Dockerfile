# The Fencepost image: the command line and the relay, for migrations and for relays.
# docs/how-to/containers.md has the build arguments and how to build where no registry can be reached.

# Any image with Python 3.11 or newer and its venv module.
ARG BASE_IMAGE=python:3.13-slim

FROM ${BASE_IMAGE} AS build
# Options for pip, such as "--no-index --find-links /wheels".
ARG PIP_ARGS=""
WORKDIR /src
# A folder "wheels" may stand beside this file. The pattern lets it be absent; the named file lets the copy succeed then.
COPY LICENSE wheels* /wheels/
COPY pyproject.toml README.md LICENSE ./
COPY fencepost fencepost
COPY relay relay
COPY producer_sdk producer_sdk
COPY consumer_sdk consumer_sdk
COPY migrations migrations
COPY demo demo
RUN python3 -m venv /opt/fencepost \
    && /opt/fencepost/bin/pip wheel --no-cache-dir --no-deps ${PIP_ARGS} --wheel-dir /dist . \
    && wheel="$(echo /dist/fencepost-*.whl)" \
    && /opt/fencepost/bin/pip install --no-cache-dir --compile ${PIP_ARGS} "fencepost[relay] @ file://${wheel}" \
    && /opt/fencepost/bin/pip check \
    && /opt/fencepost/bin/pip uninstall --yes --quiet pip

FROM ${BASE_IMAGE}
# A name for the user id, since some libraries look up who they run as.
RUN echo "fencepost:x:10001:10001:fencepost:/nonexistent:/sbin/nologin" >> /etc/passwd \
    && echo "fencepost:x:10001:" >> /etc/group
COPY --from=build /opt/fencepost /opt/fencepost
# The root may be read-only, so nothing is compiled at run time. Other addresses than this container's own reach the
# health endpoints, so they can't be served on the loopback address, which is the default elsewhere.
ENV PATH="/opt/fencepost/bin:${PATH}" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    FENCEPOST_HTTP_HOST=0.0.0.0 \
    FENCEPOST_HTTP_PORT=9464
USER 10001:10001
WORKDIR /
EXPOSE 9464
# http.client and not urlopen: a proxy in the environment must not come between.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python3", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['FENCEPOST_HTTP_PORT']), timeout=3); c.request('GET', '/livez'); sys.exit(c.getresponse().status != 200)"]
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="fencepost" \
      org.opencontainers.image.description="An outbox relay from PostgreSQL to Kafka" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENTRYPOINT ["fencepost"]
CMD ["relay", "run"]
