#!/bin/sh
# The counters of every EFA, as Prometheus reads them, under the names that AWS's EFA exporter gives them.
#   efa-metrics [FOLDER]      (/sys/class/infiniband unless it is told)
set -eu
for counter in "${1:-/sys/class/infiniband}"/*/ports/*/hw_counters/*; do
  [ -r "$counter" ] || continue
  value=$(cat "$counter" 2>/dev/null) || continue
  name=${counter##*/} port=${counter%/hw_counters/*} device=${counter%/ports/*}
  [ "$name" != lifespan ] || continue # how old a value may be, in ms: a setting of the driver's
  printf 'node_amazonefa_%s{device="%s",port="%s"} %s\n' "$name" "${device##*/}" "${port##*/}" "$value"
done
