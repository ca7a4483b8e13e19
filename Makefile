# Two commands: `make demo` and `make test`. Both set up a virtual environment first.
# Python 3.11 or later. PIP_ARGS passes options to pip, e.g. an index with CPU builds of torch.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo

# Many tests, and the demo, start programs. Without compiled files each program would compile all its modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-fleet test check format bench soak policy-table literature chart protos manifests images cluster-test vllm-test gpu-test emulated-test gpu-bench gpu-tune compile-test compile-versions cpu-test pictures kind-up clean

help: ## this text
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(DEMO_STAMP) ## compare routing policies on four real engines on this machine; writes out/demo
	@exec $(BIN)/warmroute-loadgen demo --out out/demo $(DEMO_ARGS)

demo-fleet: $(DEMO_STAMP) ## the same on eight emulated H100 pods, in three minutes; writes out/demo-fleet
	@exec $(BIN)/warmroute-loadgen demo-fleet --out out/demo-fleet $(DEMO_ARGS)

test: check ## everything: format, lint, types, import contracts, shape of the code, tests
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=worksteal $(PYTEST_ARGS)

check: $(STAMP) ## all but the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict -p engine -p router -p loadgen -p tests -p charts -p manifests
	$(BIN)/lint-imports --no-logo
	$(BIN)/python .ci/shape.py

format: $(STAMP) ## format and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## the benchmarks of tests/bench, one after another
	@for bench in tests/bench/*/bench_*.py; do \
		name=$$(echo $${bench%.py} | tr / .); echo "== $$name"; $(BIN)/python -m $$name || exit 1; \
	done

soak: $(STAMP) ## five minutes of load while engines die, Redis restarts and gateways are rolled; fails if a request is lost
	$(BIN)/python -m tests.bench.fleet.soak $(SOAK_ARGS)

policy-table: $(STAMP) ## every router on every workload in virtual time; checks the bounds, writes out/sim (an hour)
	$(BIN)/python -m tests.bench.policy_table $(if $(TRACES),--traces $(TRACES)) $(STUDY_ARGS)

literature: $(STAMP) ## published evaluations' tables measured on the simulated fleet, writes out/literature (half an hour)
	$(BIN)/python -m tests.bench.literature $(LITERATURE_ARGS)

chart: $(STAMP) ## write the chart's README and schema from its values and the programs' settings
	$(BIN)/python -m charts.generate

protos: $(STAMP) ## generate the messages of the endpoint picker from router/picker/wire/picker.proto
	$(PIP) install --quiet --target build/protos grpcio-tools==1.76.0
	PYTHONPATH=build/protos $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. router/picker/wire/picker.proto

manifests: chart ## render the chart into manifests/; HELM names another helm
	$(BIN)/python -m manifests.render $(HELM)

images: $(STAMP) ## build the images without Docker, as OCI archives in build/images; needs root
	PYTHON=$(BIN)/python .ci/images.sh build/images

cluster-test: $(STAMP) ## the chart, the images and the programs on a real Kubernetes cluster; see tests/cluster/run.sh
	@tests/cluster/run.sh $(PYTEST_ARGS)

vllm-test: $(STAMP) ## the gateway in front of real vLLM servers on this machine's CPU; installs them into build/vllm (2.3 GB)
	$(BIN)/python -m tests.vllm.environment
	$(BIN)/python -m pytest -m vllm tests/vllm $(PYTEST_ARGS)

gpu-test: ## the CUDA backend on this machine's card; GPU_PYTHON names a Python with torch, Triton and pytest
	@"$(GPU_PYTHON)" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "make gpu-test needs a CUDA device; the torch of $(GPU_PYTHON) sees none")'
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$(GPU_PYTHON)" -m pytest -c tests/engine/cuda/gpu.ini --rootdir=. tests/engine/cuda $(PYTEST_ARGS)

emulated-test: $(STAMP) ## the same on an emulated card, in minutes (tests/MACHINES.md); EMULATED_CARD=lazy, eager or random:SEED
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(BIN)/python -m pytest -c tests/engine/cuda/gpu.ini --rootdir=. -p tests.emulated_card.plugin \
		-k "not bfloat16 and not llama_8b and not runs_beside_computing" tests/engine/cuda $(PYTEST_ARGS)

gpu-bench: ## the CUDA engine against this card's roofline and against transformers; writes out/gpu-bench
	"$(GPU_PYTHON)" -m tests.bench.gpu $(GPU_BENCH_ARGS)

gpu-tune: ## time alternative settings for the GPU kernels on this card; writes out/gpu-tune
	"$(GPU_PYTHON)" -m tests.bench.gpu.tune $(GPU_TUNE_ARGS)

compile-test: $(STAMP) ## every variant of the GPU kernels down to machine code for sm_80 and sm_90, without a card (minutes)
	$(BIN)/python -m pytest -m compile --timeout=600 tests/engine/cuda $(PYTEST_ARGS)

compile-versions: $(STAMP) ## the same with each Triton that a supported release of torch pins (TRITONS), and what each needs
	@for version in $(TRITONS); do \
		echo "== Triton $$version"; \
		[ -d build/triton/$$version ] || $(PIP) install --quiet --no-deps --target build/triton/$$version triton==$$version || exit 1; \
		PYTHONPATH=build/triton/$$version $(BIN)/python -m pytest -m "compile or not compile" --timeout=900 \
			tests/engine/cuda/kernels/test_kernels_compile.py tests/engine/cuda/kernels/test_decoder_compiles.py $(PYTEST_ARGS) || exit 1; \
	done

cpu-test: $(STAMP) ## the tests that compute, as other processors would: PROCESSORS="zen haswell nehalem skylake-avx512"
	$(BIN)/python -m tests.processors $(PROCESSORS) -- -n auto --maxprocesses=4 --dist=worksteal $(PYTEST_ARGS)

pictures: $(STAMP) ## take the README's pictures anew while the demo runs (five minutes); needs chromium
	$(BIN)/python -m tests.pictures

kind-up: ## with Docker and kind: a cluster, the images, the chart with the demo's values
	@.ci/kind-up.sh

clean: ## remove the environment and every output
	rm -rf $(VENV) out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "warmroute needs Python 3.11 or later; name one with: make PYTHON=python3.11")'
	"$(PYTHON)" -m venv $(VENV)

$(STAMP): pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(PIP) install $(PIP_ARGS) -c .ci/constraints.txt -e '.[test]'
	@touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(PIP) install $(PIP_ARGS) -c .ci/constraints.txt -e '.[demo]'
	@touch $(DEMO_STAMP)
