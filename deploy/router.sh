#!/bin/sh
# Several replicas behind one address, by SGLang's router: prompts that begin alike go to the same
# replica, so that what it has computed of them is used again.
#
#   python3 -m venv ROUTER && ROUTER/bin/pip install sglang-router==0.3.2     # no torch, 150 MB
#   PATH=ROUTER/bin:$PATH deploy/router.sh 8080 http://127.0.0.1:8001 http://127.0.0.1:8002
#
# First the address's port, then the replicas, which are to be ready: the router asks each for the
# model's name only once, when it meets it. ROUTER_FLAGS holds further flags of the router's.
#
# --health-…         a replica that has gone, loads or drains (/ready says 503) gets nothing new
#                    after two seconds, and is back one second after it is ready
# --retry-…          what it refused until then, or lost before its first byte, is tried again for
#                    five seconds: that is longer, so another replica answers. An answer that has
#                    begun is lost with its own
# --disable-circuit-breaker   which would close replicas to all because one client errs (4xx)
# --balance-…        a replica with 16 requests more than another, and twice as many, is not given
#                    prompts for what it has cached
# Of several routers on one machine each needs a --prometheus-port of its own.
set -eu
[ $# -ge 2 ] || { echo "usage: router.sh PORT REPLICA_URL..." >&2; exit 2; }
port=$1
shift
exec sglang-router launch --host "${ROUTER_HOST:-127.0.0.1}" --port "$port" \
    --worker-urls "$@" \
    --policy cache_aware --cache-threshold 0.3 \
    --balance-abs-threshold 16 --balance-rel-threshold 2 \
    --health-check-endpoint /ready --health-check-interval-secs 1 --health-check-timeout-secs 5 \
    --health-failure-threshold 2 --health-success-threshold 1 \
    --retry-max-retries 15 --retry-initial-backoff-ms 50 --retry-max-backoff-ms 500 \
    --disable-circuit-breaker \
    --worker-startup-check-interval 1 --log-level warn --prometheus-host 127.0.0.1 ${ROUTER_FLAGS:-}
