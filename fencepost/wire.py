"""The wire format: CloudEvents 1.0 in Kafka's binary mode. Names and limits live here and nowhere else.

Attributes travel as headers with the prefix ``ce_``, the payload's media type as ``content-type`` (CloudEvents Kafka
protocol binding 1.0.2, section 3.2), trace context as W3C ``traceparent`` and ``tracestate``. An absent attribute is an
absent header.
"""

from typing import Final

__all__ = [
    "CE_FENCING_TOKEN",
    "CE_ID",
    "CE_OPERATION",
    "CE_RUN_ID",
    "CE_SEQUENCE",
    "CE_SOURCE",
    "CE_SPEC_VERSION",
    "CE_STEP",
    "CE_TENANT_ID",
    "CE_TIME",
    "CE_TYPE",
    "CONTENT_TYPE",
    "MAX_ATTRIBUTE_BYTES",
    "MAX_EVENTS_PER_CALL",
    "MAX_HEADERS",
    "MAX_HEADERS_BYTES",
    "MAX_HEADER_NAME_BYTES",
    "MAX_KEY_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MAX_TOPIC_CHARACTERS",
    "MAX_TRACESTATE_BYTES",
    "RESERVED_HEADERS",
    "RUN_EVENT_TYPES",
    "RESERVED_HEADER_PREFIXES",
    "SCHEMA_VERSION",
    "SPEC_VERSION",
    "TRACEPARENT",
    "TRACESTATE",
]

SPEC_VERSION: Final = "1.0"
#: Types of what Fencepost says of runs. It has no codec: the payload is JSON of ids, times and codes, and of what an author told.
RUN_EVENT_TYPES: Final = ("fencepost.run_", "fencepost.workflow.")

CE_SPEC_VERSION: Final = "ce_specversion"
CE_ID: Final = "ce_id"
CE_SOURCE: Final = "ce_source"
CE_TYPE: Final = "ce_type"
CE_TIME: Final = "ce_time"
CONTENT_TYPE: Final = "content-type"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

#: The version of the type's payload, in decimal; 1 where it is absent. A header of the application's, so producers set it as any.
SCHEMA_VERSION: Final = "schema-version"

# Extension attributes: lower-case letters and digits only (CloudEvents 1.0, "Naming conventions").
CE_TENANT_ID: Final = "ce_tenantid"
CE_RUN_ID: Final = "ce_runid"
CE_STEP: Final = "ce_step"
CE_OPERATION: Final = "ce_operation"
CE_FENCING_TOKEN: Final = "ce_fencingtoken"  # noqa: S105 - a header's name
# The outbox id in decimal: rises along each key, with gaps.
CE_SEQUENCE: Final = "ce_sequence"

RESERVED_HEADER_PREFIXES: Final = ("ce_", "fencepost-")
RESERVED_HEADERS: Final = frozenset({CONTENT_TYPE, TRACEPARENT, TRACESTATE})

# Together these stay under Kafka's default limit of 1,048,588 bytes a record batch.
MAX_PAYLOAD_BYTES: Final = 1_000_000
MAX_HEADERS_BYTES: Final = 32_768
MAX_KEY_BYTES: Final = 4_096
MAX_ATTRIBUTE_BYTES: Final = 256
MAX_TRACESTATE_BYTES: Final = 512
MAX_HEADERS: Final = 64
MAX_HEADER_NAME_BYTES: Final = 256
MAX_TOPIC_CHARACTERS: Final = 249
MAX_EVENTS_PER_CALL: Final = 10_000
