# `make demo` and `make test` set up what they need on a machine with Python 3.11 to 3.13, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CUDA build of TensorFlow where a GPU answers, the CPU build elsewhere.
BUILD := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
# Tests wait for servers as often as they compute, so one process more than there are processors.
PROCESSES := $(shell processors=$$(getconf _NPROCESSORS_ONLN); echo $$((processors < 4 ? processors + 1 : 4)))
STUBS := proto/xlaserve_proto

# Tests start hundreds of processes, and each would compile the whole project where bytecode may not be written.
export PYTHONDONTWRITEBYTECODE :=

# Each file to one process, in the order in which they are collected.
BY_FILE := --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup stubs reference pictures docs demo test test-fronts test-slow test-pages test-clients test-fleet image attack prove-loadtest prove-sockets check sbom hashes format bench bench-fronts bench-gpu bench-gpu-fronts bench-overload bench-peers bench-start bench-xla clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed ## Make .venv with pinned dependencies

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(BUILD),dev,docs]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps keras-hub nncf openvino tf_keras
	touch $@

stubs: setup ## Generate the Python stubs from proto/
	$(BIN)/python scripts/generate_stubs.py

reference: setup ## Generate docs/reference from the code, and Prometheus's rules and Grafana's dashboards
	$(BIN)/python -m scripts.generate_docs
	$(BIN)/python -m scripts.monitoring

pictures: setup ## Draw the dashboards and the page into docs/, from servers and a load test that run for it
	scripts/install_chromium.sh
	scripts/install_package.sh prometheus prometheus promtool
	$(BIN)/python -m scripts.monitoring.pictures
	$(BIN)/python -m tests.page_picture

docs: setup ## Build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

demo: setup ## Serve, ask about real images, compare XLA with graph mode
	$(BIN)/python scripts/demo.py

test: setup ## Run the test suite
	scripts/install_chromium.sh
	scripts/install_package.sh prometheus prometheus promtool
	scripts/install_helm.sh
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) $(BY_FILE) -m "not slow and not fleet"

test-fronts: setup ## Run integration tests against servers of two fronts
	FRONTS=2 $(BIN)/python -m pytest --numprocesses $(PROCESSES) $(BY_FILE) -m "not slow and not fleet" \
		$(patsubst %,tests/integration/test_%.py,limits overload access versions open_inference vision http shutdown slow_clients)

test-slow: setup ## Run what `make test` leaves out: pods, every dashboard's queries, more pages and ends of servers
	scripts/install_chromium.sh
	scripts/install_package.sh prometheus prometheus promtool
	$(BIN)/python -m pytest -m slow --ignore tests/deploy/test_image.py

test-pages: setup ## Look at every kind of report in a browser, at several widths, light and dark
	scripts/install_chromium.sh
	$(BIN)/python -m pytest tests/loadtest/reports/pages

test-clients: setup ## Run clients of KServe, Triton and TensorFlow Serving unmodified, and write what works into docs/clients.md
	$(BIN)/python -m tests.clients

test-fleet: setup ## Run fleets on a real Ray cluster of several nodes on this machine, and kill every part of them
	scripts/install_package.sh haproxy haproxy
	$(BIN)/python -m tests.fleet.cluster

image: setup ## Build the images of deploy/ with buildah, as root, and try them out
	scripts/build_image.sh $(BUILD)
	$(BIN)/python -m pytest tests/deploy/test_image.py

attack: setup ## Attack real servers for ten minutes; SEED=1 repeats a run, FRONTS=2 has them several processes
	$(BIN)/python -m tests.attack $(if $(SEED),--seed $(SEED)) $(if $(FRONTS),--fronts $(FRONTS))

prove-loadtest: setup ## Simulate load tests: what loadtest claims, and what is true
	$(BIN)/python -m tests.prove $(if $(SEED),--seed $(SEED))

prove-sockets: setup ## Run loadtest against a server of known times, for thirteen minutes on a quiet machine
	$(BIN)/python -m tests.prove.sockets

check: setup ## Lint, types, layers, fresh stubs and reference
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy bench scripts tests
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/python -m scripts.generate_docs --check
	$(BIN)/python -m scripts.monitoring --check

sbom: setup ## Write what is installed in ENVIRONMENT (.venv) into build/sbom.json, as CycloneDX
	$(PYTHON) -m venv $(VENV)-sbom
	$(VENV)-sbom/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement scripts/sbom.txt
	mkdir -p build
	$(VENV)-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json $(or $(ENVIRONMENT),$(VENV))

hashes: setup ## Write build/requirements-hashed.txt: what a server is installed from here, with hashes
	$(BIN)/python scripts/pin_hashes.py $(BUILD),jwt,otel

format: setup ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup ## Measure serving efficiency, overhead and memory
	$(BIN)/python -m bench

bench-fronts: setup ## Compare one process with several: requests/s, and processor time by role
	$(BIN)/python -m bench.fronts

bench-overload: setup ## Measure what is answered in time at up to five times the capacity
	$(BIN)/python -m bench --only overload --json build/bench-overload.json

bench-start: setup ## Measure what the compile cache saves a second start
	$(BIN)/python -m bench.start

bench-gpu: setup ## Measure every mode on a GPU and write docs/gpu.md
	$(BIN)/python -m bench.gpu

bench-gpu-fronts: setup ## Measure what fronts bring a GPU, as single images, and write docs/gpu.md
	$(BIN)/python -m bench.gpu_fronts

bench-peers: setup ## Serve the same network as others do, each installed into build/peers, and compare images/s
	$(BIN)/python -m bench.peers

bench-xla: setup ## Compare XLA with graph mode on this CPU, model by model
	$(BIN)/python -m bench.xla

clean: ## Remove what setup and the tools made
	rm -rf $(VENV) .venv-* build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
