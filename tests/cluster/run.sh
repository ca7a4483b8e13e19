#!/usr/bin/env bash
# Builds the images, gets a cluster, runs the tests in it, and always gives the cluster back. `make cluster-test` runs this.
#
#   $KUBECONFIG    a cluster to use. $CLUSTER_LOAD, a command that takes an archive (kind load image-archive), loads
#                  the images; without it the nodes must have them.
#   $CLUSTER_UP    otherwise a script `up DIR IMAGE.tar...` that makes a cluster and prints KUBECONFIG and PATH to eval;
#   $CLUSTER_DOWN  `down DIR`, which ends it. Its API server can be restarted if DIR has pids/apiserver and apiserver.sh.
#
# Arguments go to pytest. Logs are left in build/cluster.
set -euo pipefail
cd "$(dirname "$0")/../.."
images=$PWD/build/images
export CLUSTER_LOGS=$PWD/build/cluster
python=$PWD/.venv/bin/python
names=(gateway engine-cpu loadgen redis)
archives=("${names[@]/#/$images/}")
archives=("${archives[@]/%/.tar}")
node=''

clean_up() {
    local status=$?
    trap '' INT TERM # a second Ctrl-C must not leave half a cluster
    trap - EXIT
    if [ -n "$node" ]; then
        mkdir -p "$CLUSTER_LOGS/node"
        cp "$node"/logs/* "$CLUSTER_LOGS/node/" 2>/dev/null || true
        "$CLUSTER_DOWN" "$node"
        umount "$scratch" 2>/dev/null || true
        rm -rf --one-file-system "$scratch"
    fi
    exit $status
}

if [ -z "${KUBECONFIG:-}" ] && [ -z "${CLUSTER_UP:-}" ]; then
    echo "cluster-test: set KUBECONFIG, or CLUSTER_UP and CLUSTER_DOWN; the head of $0 says to what" >&2
    exit 2
fi
rm -rf "$CLUSTER_LOGS"
PYTHON=$python .ci/images.sh "$images" "${names[@]}"
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ -n "${KUBECONFIG:-}" ]; then
    if [ -n "${CLUSTER_LOAD:-}" ]; then
        for archive in "${archives[@]}"; do $CLUSTER_LOAD "$archive"; done
    fi
else
    : "${CLUSTER_DOWN:?cluster-test: CLUSTER_UP needs CLUSTER_DOWN, or the cluster would stay}"
    # Not in the checkout, because paths of the sockets in it may have at most 107 characters.
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/warmroute.XXXXXX")
    # In memory if there is enough: unpacked images are a hundred thousand files, slow to write and to remove.
    if [ "$(awk '/^MemAvailable/ {print int($2 / 2^20)}' /proc/meminfo)" -ge 12 ]; then
        mount -t tmpfs -o mode=0755 warmroute "$scratch" 2>/dev/null || true
    fi
    node=$scratch/node
    mkdir "$node"
    settings=$("$CLUSTER_UP" "$node" "${archives[@]}")
    eval "$settings"
    [ ! -x "$node/apiserver.sh" ] || export CLUSTER_DIR=$node
fi
"$python" -m pytest -m cluster tests/cluster -v -s "$@"
