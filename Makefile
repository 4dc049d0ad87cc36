# PYTHON=... takes another interpreter; make aot wants one with jax[cuda13],
# make aot-tpu one with jax[tpu], make docs the extra docs.
PYTHON ?= $(firstword $(wildcard .venv/bin/python) python3)
RESULTS = benchmarks/results
NOTEBOOKS = $(sort $(wildcard notebooks/*.py))

.PHONY: quick test slow exhaustive versions lint types figures docs notebooks wheel aot aot-loops aot-tpu bench-decode bench-kernels device

quick: ; $(PYTHON) -m pytest -m quick
test: ; $(PYTHON) -m pytest
slow: ; $(PYTHON) -m pytest -m slow
exhaustive: ; $(PYTHON) -m pytest -m exhaustive
# The fast tests on every pair of Python and JAX; PYTHONS=... and JAX=... choose some of them.
versions: ; bash tests/on_versions.sh
lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
# Type checkers do not know that models/ is installed as kvjax.models: they get a copy where it is.
types:
	rm -rf build/types && mkdir -p build/types
	cp -R pyproject.toml kvjax pallas_kernels benchmarks examples tests build/types
	cp -R models build/types/kvjax
	$(PYTHON) -m basedpyright --pythonpath $$(command -v $(PYTHON)) --project build/types
# Compares tables and figures of the pages with the files of results.
figures: ; $(PYTHON) benchmarks/results_page.py --check
docs: ; $(PYTHON) -m mkdocs build --strict
wheel: ; $(PYTHON) -m build
# Compiles every kernel and the loop of decode steps for GPUs that are not there.
aot: ; $(PYTHON) -m tests.gpu.compile_for_gpus
# Counts what the loops of attention's kernels do in the machine code of those GPUs, in two minutes.
aot-loops: ; $(PYTHON) -m tests.gpu.compiled_loops --out $(RESULTS)/gpu_loops.json
# Compiles decode steps and prompts for TPUs that are not there, in a quarter of an hour.
aot-tpu: ; $(PYTHON) -m tests.tpu.compile_for_tpus --out $(RESULTS)/aot_tpu.json
# Decode steps of one layer on a CPU, in some minutes.
bench-decode: ; $(PYTHON) benchmarks/decode_step.py --out $(RESULTS)/decode_step_cpu.json
# The kernels on a GPU, in under ten minutes.
bench-kernels: ; $(PYTHON) benchmarks/kernels.py --out $(RESULTS)/kernels.json
# All that takes a GPU, the most valuable first, for a quarter of an hour; ARGS=... are options.
device: ; $(PYTHON) benchmarks/device.py $(ARGS)
# Writes the notebooks from their .py files, runs them and notes what ran, in half an hour; NOTEBOOKS=... names some.
notebooks:
	$(PYTHON) -m jupytext --to ipynb --update $(NOTEBOOKS)
	env -u MPLBACKEND -u XLA_FLAGS JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 \
	  $(PYTHON) -m nbconvert --to notebook --inplace --execute \
	  --ExecutePreprocessor.record_timing=False \
	  --NotebookExporter.preprocessors=nbconvert.preprocessors.CoalesceStreamsPreprocessor \
	  --ClearMetadataPreprocessor.enabled=True --ClearMetadataPreprocessor.clear_cell_metadata=False \
	  --ClearMetadataPreprocessor.preserve_nb_metadata_mask=jupytext \
	  --ClearMetadataPreprocessor.preserve_nb_metadata_mask=kernelspec $(NOTEBOOKS:.py=.ipynb)
	$(PYTHON) -m tests.notebooks.checksums $(NOTEBOOKS:.py=.ipynb)
