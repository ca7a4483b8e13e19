#!/usr/bin/env bash
# Builds the images without Docker and without a registry: .ci/images.sh OUT [NAME ...]
#
#   NAME  gateway, engine-cpu, loadgen, redis; all of them by default
#   OUT   gets NAME.tar, an OCI archive of docker.io/warmroute/NAME:VERSION, and NAME.bytes, its unpacked size
#
# The base image is made of Debian's packages by mmdebstrap and named as the Dockerfiles name theirs; wheels are downloaded
# with this machine's own pip settings, so that the builds need no network. Needs root. PIP_ARGS passes options to pip.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
SUITE=bookworm # its Python is 3.11, as in the Dockerfiles' base
BASE=docker.io/library/python:3.11-slim
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

out=$(mkdir -p "${1:?usage: .ci/images.sh OUT [NAME ...]}" && cd "$1" && pwd)
shift
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(gateway engine-cpu loadgen redis)
work=$out/work
mkdir -p "$work/wheels"

say() { echo "images: $*" >&2; }
die() {
    say "$*"
    exit 1
}
storage() { buildah --root "$work/storage" --runroot "$work/run" "$@"; }

# Whether OUT/NAME.tar is newer than everything that goes into the images.
is_current() {
    [ -s "$out/$1.tar" ] && [ -s "$out/$1.bytes" ] && [ -z "$(find pyproject.toml README.md .dockerignore .ci router engine \
        loadgen -name __pycache__ -prune -o -newer "$out/$1.tar" -print -quit)" ]
}

need_tools() {
    [ "$(id -u)" = 0 ] || die "needs root, to make the base image; with Docker, the head of each Dockerfile has the command"
    local missing=()
    for tool in buildah mmdebstrap; do command -v "$tool" >/dev/null || missing+=("$tool"); done
    [ ${#missing[@]} -eq 0 ] && return
    say "installing ${missing[*]}"
    { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$work/apt.log" 2>&1 ||
        die "apt-get install ${missing[*]} failed; see $work/apt.log"
}

# from_debian PACKAGES: prints a new container with these packages of Debian, of which the commands are on the PATH.
from_debian() {
    mmdebstrap --quiet --variant=essential --include="$1" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' "$SUITE" "$work/base.tar" 2>"$work/mmdebstrap.log" ||
        die "mmdebstrap failed; see $work/mmdebstrap.log"
    local container
    container=$(storage from scratch)
    storage add --quiet "$container" "$work/base.tar" / >/dev/null
    storage config --env PATH=/usr/local/bin:/usr/bin:/bin --cmd /bin/sh "$container"
    rm "$work/base.tar"
    echo "$container"
}

# libstdc++6 is in the real base image too.
make_base() {
    storage inspect --type image "$BASE" >/dev/null 2>&1 && return
    local container
    container=$(from_debian python3,python3-venv,ca-certificates,libstdc++6)
    storage commit --quiet --rm "$container" "$BASE" >/dev/null
}

# For clusters that cannot fetch an image. The rights of the engines' user need Redis 7; other tests use an older one.
make_redis() {
    local container
    container=$(from_debian redis-server)
    storage config --user 999:999 --cmd '["redis-server"]' "$container"
    storage commit --quiet --rm "$container" "$1" >/dev/null
}

# What the Dockerfiles install, for the Python of the base image: Debian's 3.11.2, for which redis wants async-timeout.
# No source is built: every dependency has a wheel.
download_wheels() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
        die "$PYTHON is not Python 3.11, as the images are; name one with PYTHON=python3.11"
    "$PYTHON" .ci/requirements.py engine loadgen otel-grpc >"$work/requirements.txt"
    # shellcheck disable=SC2086  # PIP_ARGS is a list of options
    "$PYTHON" -m pip --disable-pip-version-check download --quiet ${PIP_ARGS:-} --only-binary=:all: \
        --dest "$work/wheels" -c .ci/constraints.txt -r "$work/requirements.txt" 'setuptools>=77' dumb-init async-timeout \
        2>"$work/pip.log" || die "pip download failed; see $work/pip.log"
    printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$work/pip.conf"
}

# build TAG DOCKERFILE
build() {
    storage bud --pull-never --isolation chroot --network host \
        --volume "$work/wheels:/wheels:ro" --volume "$work/pip.conf:/etc/pip.conf:ro" --build-arg BASE="$BASE" \
        --file "$2" --tag "$1" . >"$work/build.log" 2>&1 || {
        tail -20 "$work/build.log" >&2
        die "building $2 failed; see $work/build.log"
    }
}

# archive TAG NAME: the image as OUT/NAME.tar, and its size.
archive() {
    rm -f "$out/$2.tar"
    storage push --quiet "$1" "oci-archive:$out/$2.tar:$1" >/dev/null
    local container
    container=$(storage from --pull-never "$1")
    du -s --apparent-size --block-size=1 "$(storage mount "$container")" | cut -f1 >"$out/$2.bytes"
    storage rm "$container" >/dev/null
}

need_tools
if [ -z "${IN_OWN_MOUNTS:-}" ]; then # a namespace, so that no mount of buildah stays, however this ends
    IN_OWN_MOUNTS=1 exec unshare --mount .ci/images.sh "$out" "${names[@]}"
fi
storage rm --all >/dev/null # what a failed build has left
have_wheels=''
for name in "${names[@]}"; do
    if is_current "$name"; then
        say "$name: is current"
        continue
    fi
    started=$SECONDS
    tag=docker.io/warmroute/$name:$VERSION
    case $name in
    gateway) dockerfile=router/Dockerfile ;;
    engine-cpu) dockerfile=engine/Dockerfile.cpu ;;
    loadgen) dockerfile=loadgen/Dockerfile ;;
    redis) tag=localhost/redis:dev ;;
    *) die "no image is called $name; there are gateway, engine-cpu, loadgen, redis" ;;
    esac
    if [ "$name" = redis ]; then
        make_redis "$tag"
    else
        make_base
        [ -n "$have_wheels" ] || download_wheels
        have_wheels=1
        build "$tag" "$dockerfile"
    fi
    archive "$tag" "$name"
    say "$name: $(($(cat "$out/$name.bytes") / 1000000)) MB, $((SECONDS - started)) s"
done
