# make lifecycle   set up, then take the rehearsal recipe through its whole life on this machine
# make image       set up, then bake the image `local` behind an emulated EC2 (root; see docs/images.md)
# make test        set up, then check everything as CI does
# make ui          Prefect's server with every flow deployed and a worker, on http://127.0.0.1:4200
# make clean       forget all results and state of this folder; make distclean also removes what was installed

RECIPE ?= recipes/rehearsal.yaml
PY := .venv/bin/python

.PHONY: setup lifecycle image test lint ui clean distclean

setup:
	@sh bin/setup

lifecycle: setup
	@$(PY) -m flows.lifecycle $(RECIPE)

image: setup
	@$(PY) -m flows.build_image --flavour local

ui: setup
	@$(PY) -m deployments.up

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

test: lint
	@.venv/bin/pytest -n 2 --ignore=tests/flows --ignore=tests/deployments
	@.venv/bin/pytest tests/flows tests/deployments  # whole runs, one after another: two at once starve each other

clean:
	rm -rf .castra

distclean: clean
	rm -rf .venv .tools
