# gpupool. `make` alone says what there is.
SHELL := /bin/bash
CARGO ?= cargo
CC ?= gcc
PREFIX ?= /usr/local
DESTDIR ?=

# The paths below are cargo's usual ones, whatever the environment says.
export CARGO_TARGET_DIR := $(CURDIR)/target
RELEASE := target/release
SIM := target/simcuda
CBIN := target/c
CFLAGS_C := -std=c11 -O2 -g -Wall -Wextra -Werror
SIM_INC := -Itests/simcuda/include
RUN_SIM := LD_LIBRARY_PATH=$(CURDIR)/$(SIM):$(CURDIR)/$(RELEASE)
PROGRAMS := driver_facts cnmem_contract pool_contract process stress quickstart caffe_train torch_swap
# A real runtime to compile the demo against: CUDA_HOME, else where nvcc is, on the path or in its usual place.
CUDA_HOME ?= $(shell n=$$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) && dirname $$(dirname $$(readlink -f $$n)))

.PHONY: help build demo test check headers install gpu-check gpu-bench gpu-bundle bench bench-libraries clean c-programs simcuda
help:
	@echo "make demo        build everything, then train on bare cudaMalloc and on the pool; on a GPU if there is one"
	@echo "make test        all tests, on simcuda: no GPU is needed"
	@echo "make check       format, lints, header drift, all tests and examples: what must pass before a commit"
	@echo "make bench       the library's figures on simcuda, one a line; BENCH_ARGS=--no-preload"
	@echo "make build       libgpupool, the gpupool command, simcuda and the C programs"
	@echo "make headers     write include/*.h anew"
	@echo "make install     PREFIX=$(PREFIX) DESTDIR="
	@echo "make gpu-bundle  what a GPU machine without Rust needs, in target/gpu-bundle"
	@echo "make gpu-check   run the bundle here: needs a GPU, CUDA's toolkit and gcc"
	@echo "make gpu-bench   the bundle's figures here; PEERS=<folder of the peers' benchmark> adds theirs"
	@echo "make clean"

build: $(RELEASE)/libgpupool.so.0 simcuda c-programs

# `sudo make install` often has no cargo, and a GPU machine no Rust: what was built before serves there.
$(RELEASE)/libgpupool.so.0: FORCE
	@if command -v $(CARGO) >/dev/null; then echo $(CARGO) build --release -p gpupool; $(CARGO) build --release -p gpupool; \
	elif [ -e $(RELEASE)/libgpupool.so ]; then echo "no $(CARGO) here: $(RELEASE)/libgpupool.so is taken as it stands"; \
	else echo "no $(CARGO) here: building needs Rust" >&2; exit 1; fi
	@cd $(RELEASE) && ln -sf libgpupool.so libgpupool.so.0 && ln -sf libgpupool.so libcnmem.so.1
FORCE:

simcuda:
	$(CARGO) build -p simcuda-driver -p simcuda-runtime
	@mkdir -p $(SIM) && cp -u target/debug/libsimcuda_driver.so $(SIM)/libcuda.so.1 \
	  && cp -u target/debug/libsimcuda_runtime.so $(SIM)/libcudart.so.13 && cp -u target/debug/libsimcuda_runtime.a $(SIM)/libcudart_static.a \
	  && cd $(SIM) && ln -sf libcudart.so.13 libcudart.so.12 && ln -sf libcudart.so.13 libcudart.so

PRELOAD_PROGRAMS := $(patsubst tests/c/preload/%.c,%,$(wildcard tests/c/preload/*.c)) preload_static
PRELOAD_LIBS := liba libb libproxy libctor
c-programs: $(PROGRAMS:%=$(CBIN)/%) $(CBIN)/static_runtime $(PRELOAD_PROGRAMS:%=$(CBIN)/preload/%)
$(CBIN)/%: tests/c/%.c tests/c/check.h include/cnmem.h include/gpupool.h | simcuda $(RELEASE)/libgpupool.so.0
	@mkdir -p $(CBIN)
	$(CC) $(CFLAGS_C) $(SIM_INC) -Iinclude $< -o $@ -L$(SIM) -L$(RELEASE) -lcudart -lgpupool -ldl -lpthread
$(CBIN)/%: c_examples/%.c include/cnmem.h include/gpupool.h | simcuda $(RELEASE)/libgpupool.so.0
	@mkdir -p $(CBIN)
	$(CC) $(CFLAGS_C) $(SIM_INC) -Iinclude $< -o $@ -L$(SIM) -L$(RELEASE) -lcudart -lgpupool -ldl -lpthread
# The static runtime: the same program, without libcudart.so.
$(CBIN)/static_runtime: c_examples/quickstart.c include/cnmem.h | simcuda $(RELEASE)/libgpupool.so.0
	@mkdir -p $(CBIN)
	$(CC) $(CFLAGS_C) $(SIM_INC) -Iinclude $< -o $@ -L$(RELEASE) -lgpupool $(SIM)/libcudart_static.a -ldl -lpthread -lm

# The preload door's: they know nothing of gpupool. resolve comes with two libraries that stand one behind the other, life
# with one that uses CUDA in its constructor.
PRELOAD_LINK = -L$(SIM) -L$(CBIN)/preload -lcudart -l:libcuda.so.1 -ldl -lpthread -Wl,-rpath,'$$ORIGIN'
$(CBIN)/preload/resolve: PRELOAD_LINK := -Wl,--no-as-needed -L$(CBIN)/preload -la -lb $(PRELOAD_LINK)
$(CBIN)/preload/dlopen_only: PRELOAD_LINK := -ldl
$(CBIN)/preload/lib%.so: tests/c/preload/lib/lib%.c | simcuda
	@mkdir -p $(CBIN)/preload
	$(CC) $(CFLAGS_C) $(SIM_INC) -shared -fPIC $< -o $@ -L$(SIM) $(if $(filter ctor,$*),-lcudart) -ldl
$(CBIN)/preload/preload_static: tests/c/preload/static/plain.c tests/c/check.h | simcuda
	@mkdir -p $(CBIN)/preload
	$(CC) $(CFLAGS_C) $(SIM_INC) $< -o $@ $(SIM)/libcudart_static.a -ldl -lpthread -lm
$(filter-out %/preload_static,$(PRELOAD_PROGRAMS:%=$(CBIN)/preload/%)): $(CBIN)/preload/%: tests/c/preload/%.c tests/c/check.h tests/c/preload/driver.h | simcuda $(PRELOAD_LIBS:%=$(CBIN)/preload/%.so)
	@mkdir -p $(CBIN)/preload
	$(CC) $(CFLAGS_C) $(SIM_INC) $< -o $@ $(PRELOAD_LINK)

# On a GPU when the driver sees one and there is a toolkit to compile against; else on simcuda.
demo: build
	@if nvidia-smi -L >/dev/null 2>&1 && [ -n "$(CUDA_HOME)" ] && [ -e "$(CUDA_HOME)/include/cuda_runtime_api.h" ]; then \
	  echo "demo: on the GPU ($$(nvidia-smi -L | head -1))"; \
	  $(CC) $(CFLAGS_C) -I$(CUDA_HOME)/include -Iinclude c_examples/caffe_train.c -o $(CBIN)/caffe_train_gpu -L$(CUDA_HOME)/lib64 -L$(RELEASE) -lcudart -lgpupool \
	  && LD_LIBRARY_PATH=$(CURDIR)/$(RELEASE):$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH $(CBIN)/caffe_train_gpu 128 --iterations 200; \
	else \
	  echo "demo: no GPU with a CUDA toolkit here; on simcuda, whose costs are not a GPU's"; \
	  $(RUN_SIM) $(CBIN)/caffe_train 4 --iterations 20; \
	fi

test: build
	$(RUN_SIM) $(CARGO) test -p simcuda-driver -p gpupool
	$(CARGO) test --release -p gpupool-model

check: build
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(MAKE) test

# Standard output is the figures and nothing else.
bench:
	@$(MAKE) --no-print-directory bench-libraries >&2
	@$(CARGO) bench -q --bench figures -- $(BENCH_ARGS)

# simcuda, optimised: its own cost must not drown the library's.
SIM_FAST := target/simcuda-release
bench-libraries: $(RELEASE)/libgpupool.so.0
	$(CARGO) build --release -p simcuda-driver -p simcuda-runtime
	@mkdir -p $(SIM_FAST) && cp -u $(RELEASE)/libsimcuda_driver.so $(SIM_FAST)/libcuda.so.1 \
	  && cp -u $(RELEASE)/libsimcuda_runtime.so $(SIM_FAST)/libcudart.so.13 && ln -sf libcudart.so.13 $(SIM_FAST)/libcudart.so

headers:
	$(CARGO) build --release -p gpupool
	@mkdir -p include && for h in cnmem gpupool; do cp "$$(ls -t $(RELEASE)/build/gpupool-*/out/$$h.h | head -1)" include/$$h.h; done

install: $(RELEASE)/libgpupool.so.0
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include
	install -m 755 $(RELEASE)/gpupool $(DESTDIR)$(PREFIX)/bin/gpupool
	install -m 755 $(RELEASE)/libgpupool.so $(DESTDIR)$(PREFIX)/lib/libgpupool.so.0
	ln -sf libgpupool.so.0 $(DESTDIR)$(PREFIX)/lib/libgpupool.so
	ln -sf libgpupool.so.0 $(DESTDIR)$(PREFIX)/lib/libcnmem.so.1
	install -m 644 include/cnmem.h include/gpupool.h $(DESTDIR)$(PREFIX)/include/
	printf 'prefix=%s\nlibdir=$${prefix}/lib\nincludedir=$${prefix}/include\n\nName: gpupool\nDescription: caching allocator for CUDA memory\nVersion: 0.1.0\nLibs: -L$${libdir} -lgpupool\nCflags: -I$${includedir}\n' '$(PREFIX)' \
	  > $(DESTDIR)$(PREFIX)/lib/pkgconfig/gpupool.pc

gpu-bundle: $(RELEASE)/libgpupool.so.0
	@rm -rf target/gpu-bundle && mkdir -p target/gpu-bundle
	@cp -r include tests/c c_examples tests/gpu target/gpu-bundle/ && mv target/gpu-bundle/gpu/run.sh target/gpu-bundle/ \
	  && cp -r benches/gpu target/gpu-bundle/bench
	@cp $(RELEASE)/libgpupool.so target/gpu-bundle/libgpupool.so.0 && strip --strip-debug target/gpu-bundle/libgpupool.so.0 \
	  && cd target/gpu-bundle && ln -sf libgpupool.so.0 libgpupool.so && ln -sf libgpupool.so.0 libcnmem.so.1
	@cp $(RELEASE)/gpupool target/gpu-bundle/gpupool && strip target/gpu-bundle/gpupool
	@du -sh target/gpu-bundle; [ $$(du -sm target/gpu-bundle | cut -f1) -lt 40 ] || { echo "the bundle must stay under 40 MiB" >&2; exit 1; }

gpu-check: gpu-bundle
	target/gpu-bundle/run.sh

gpu-bench: gpu-bundle
	@target/gpu-bundle/bench/bench.sh

clean:
	$(CARGO) clean
