# Short names for the scripts in ci/.

.PHONY: pair test check full fuzz bench

pair:
	ci/pair $(ARGS)

test:
	ci/test $(ARGS)

check:
	.ci/run

full:
	ci/full

fuzz:
	ci/fuzz $(SECONDS_EACH)

bench:
	cargo run --release --package kvferry-bench --bin kvferry -- bench $(ARGS)
