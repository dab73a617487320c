# The commands of CONTRIBUTING.md.

CARGO ?= cargo
# Seconds for each fuzz target.
FUZZ_SECONDS ?= 60

.PHONY: pair test lint docs fuzz bench full

# A prefill and a decode engine on this machine.
pair:
	$(CARGO) run --release --package kvferry-examples --bin pd-pair -- $(ARGS)

test:
	$(CARGO) test --workspace

lint:
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) deny check bans licenses sources

docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

# The targets live in a workspace of their own, built with the nightly toolchain.
fuzz:
	set -e; targets=$$($(CARGO) +nightly fuzz list); \
	for target in $$targets; do \
		$(CARGO) +nightly fuzz run $$target -- -max_total_time=$(FUZZ_SECONDS); \
	done

bench:
	$(CARGO) run --release --package kvferry-bench --bin kvferry -- bench $(ARGS)

# Everything, the tests also as optimised code and those marked too slow for every day.
full: lint docs test fuzz
	$(CARGO) test --workspace --release -- --include-ignored
