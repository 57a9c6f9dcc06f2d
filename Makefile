# make dev      a first look: builds rsc, runs a coordinator with a demo stream and three consumers
# make test     the tests, and what they need
# make verify   what CI runs: format, lints, documentation, tests; changes no file of the tree
# make simulate a long run of the simulation, SEEDS=FROM..TO, WORLD=group or stream
# make chaos    kills, pauses and failovers of real processes: CHAOS_KILLS, CHAOS_FAILOVERS, CHAOS_SECONDS, CHAOS_SEED
# make fix      formats, and applies what clippy can mend by itself

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := dev
.PHONY: dev test test-needs verify check fix simulate chaos

CARGO ?= cargo
# Arguments of `rsc dev`, e.g. make dev ARGS='--listen 127.0.0.1:9000'
ARGS ?=

dev:
	@$(CARGO) build --locked --bin rsc
	@exec $(CARGO) run --locked --quiet --bin rsc -- dev $(ARGS)

# The runner's summary is the last thing on the screen.
test: test-needs
	$(CARGO) test --locked --workspace --doc --quiet
	@if $(CARGO) nextest --version >/dev/null 2>&1; then \
	  set -x; $(CARGO) nextest run --locked --workspace --no-fail-fast; \
	else \
	  set -x; $(CARGO) test --locked --workspace --no-fail-fast --lib --bins --tests; \
	fi

test-needs:
	@scripts/need-test-tools

verify:
	@scripts/unchanged-tree $(MAKE) --no-print-directory check

check:
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps
	$(MAKE) --no-print-directory test

fix:
	$(CARGO) clippy --workspace --all-targets --fix --allow-dirty --allow-staged
	$(CARGO) fmt --all

# Seeds of a long run of the simulation, FROM..TO; it goes on where it was interrupted.
SEEDS ?= 0..10000
WORLD ?= group
PROGRESS = target/simulation-$(if $(filter-out group,$(WORLD)),$(WORLD)-)$(SEEDS).json
simulate:
	$(CARGO) run --locked --release -p rsc-simulation -- run --world $(WORLD) --seeds $(SEEDS) --resume $(PROGRESS)

# Two coordinators, a master with replicas and sentinels, ten clients, and somebody who kills at random. Writes target/chaos-report.md.
# At least CHAOS_KILLS processes killed (100) and CHAOS_FAILOVERS failovers (50), in at most CHAOS_SECONDS (2400).
chaos: test-needs
	$(CARGO) test --locked --test chaos -- --ignored --nocapture a_long_run
