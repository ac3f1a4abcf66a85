import os, sys, collections
sys.path.insert(0, "/work/main")
import pytest
from hypothesis import settings, Phase
import tests.integration.test_runs_model as t
counts = collections.Counter()
old = t.Machine.both
def both(self, verb, *a, **k):
    r = old(self, verb, *a, **k)
    tag = r
    if verb in ("renew","complete","release"): tag = len(r)
    if verb == "fail": tag = tuple(sorted(set(map(str,r.values()))))
    if verb in("accept","cancel","replay"): tag = r[0]
    if verb=="append": tag = r is not None
    counts[verb, str(tag)[:60]] += 1
    return r
t.Machine.both = both
from tests.integration.test_runs_model import open_bench
import pytest
@pytest.mark.timeout(900)
def test_long(open_bench):
    try:
        t.drive(open_bench(), settings(t.SETTINGS, max_examples=int(os.environ.get("N","1000")), stateful_step_count=int(os.environ.get("S","40"))))
    finally:
        for k, v in sorted(counts.items()): print(k, v, file=sys.stderr)
