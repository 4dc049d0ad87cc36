# See README.md. PYTHON=... takes another interpreter; make aot wants one with jax[cuda13].
PYTHON ?= $(firstword $(wildcard .venv/bin/python) python3)

.PHONY: test aot bench-kernels notebooks
test: ; $(PYTHON) -m pytest
aot: ; $(PYTHON) -m tests.gpu.compile_for_gpus
bench-kernels: ; $(PYTHON) benchmarks/kernels.py --out benchmarks/results/kernels.json
# Writes the notebooks from their .py files, without outputs.
notebooks: ; $(PYTHON) -m jupytext --to ipynb --update notebooks/*.py
