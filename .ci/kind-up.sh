#!/usr/bin/env bash
# Makes a kind cluster with the images, and installs the chart with the demo's values: `make kind-up`. Needs docker, kind,
# helm, kubectl. KIND_CLUSTER names the cluster (warmroute); an existing one is used. To remove it:
# kind delete cluster --name warmroute
set -euo pipefail
cd "$(dirname "$0")/.."
cluster=${KIND_CLUSTER:-warmroute}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
redis=docker.io/valkey/valkey:8.1

for tool in docker kind helm kubectl; do
    command -v "$tool" >/dev/null || { echo "kind-up: $tool is not installed" >&2; exit 1; }
done
docker info >/dev/null || { echo "kind-up: docker does not answer; is it running?" >&2; exit 1; }

build() { # NAME DOCKERFILE
    docker build --file "$2" --tag "docker.io/warmroute/$1:$version" .
}
build gateway router/Dockerfile
build engine-cpu engine/Dockerfile.cpu
build loadgen loadgen/Dockerfile
docker pull "$redis"

kind get clusters | grep -qx "$cluster" || kind create cluster --name "$cluster" --wait 120s
for name in gateway engine-cpu loadgen; do
    kind load docker-image --name "$cluster" "docker.io/warmroute/$name:$version"
done
kind load docker-image --name "$cluster" "$redis"
helm upgrade --install warmroute charts/warmroute --kube-context "kind-$cluster" \
    --namespace warmroute --create-namespace --values charts/warmroute/values-demo.yaml --wait --timeout 10m

cat <<TEXT

The gateway is installed. To reach it at http://127.0.0.1:8080:
  kubectl --context kind-$cluster --namespace warmroute port-forward service/warmroute-gateway 8080:80
To compare policies in the cluster:
  helm upgrade warmroute charts/warmroute --kube-context kind-$cluster --namespace warmroute --reuse-values --set loadgen.enabled=true
TEXT
