//! simcuda's driver: a `libcuda.so.1` for machines without a GPU. A software GPU in ordinary memory.
//!
//! It is a test double. It answers with the result codes that a real driver was seen to give, runs streams asynchronously so
//! that late writes really come late, and backs device memory with shared files so that mapping, unmapping, double mapping and
//! sharing between processes behave. A device pointer is an ordinary host address.
//!
//! # Modules
//! The first group knows nothing of the API's functions; the second holds them, by topic; all exported names are there.
//!
//! - `codes`: result codes and the C structures.
//! - `config`: the environment variables below, read once.
//! - `trace`, `fault`: one line a call; failures on demand.
//! - `call`: the one wrapper of every exported function: liveness, faults, panic guard, trace.
//! - `engine`: streams as queues with a worker thread each, and dependencies between them.
//! - `backing`: host memory: the file of each device, the address range that plain allocations live in.
//! - `state`: everything that lives under the one lock: devices, contexts, streams, events, memory.
//!
//! - `device`, `context`, `stream`, `event`, `capture`, `graph`: the API of work.
//! - `memory`, `host`, `pools`, `copy`, `pointer`, `vmm`, `ipc`: the API of memory.
//! - `absent`: functions that exist and are not modelled; calling one aborts with its name.
//! - `proc_address`: `cuGetProcAddress`, and what an older driver lacks.
//! - `quirks`: oddities of drivers, on demand.
//! - `control`: the `simcuda...` functions that tests steer it with.
//!
//! # Settings
//! | variable | default | meaning |
//! |---|---|---|
//! | `SIMCUDA_DEVICES` | 2 | number of devices |
//! | `SIMCUDA_MEM` | 8g | memory of each device (512, 64k, 1m, 12g); host memory is used only as it is touched |
//! | `SIMCUDA_VMM` | 1 | 0: no virtual memory management; its calls answer 801 |
//! | `SIMCUDA_DRIVER` | 13000 | version; what came later is neither exported nor found |
//! | `SIMCUDA_FAIL` | | `name:nth[:code]` or `name:every:n[:code]`, comma separated; code 2 unless given |
//! | `SIMCUDA_DELAY_US` | 0 | before each memset and copy the stream sleeps a random time up to this |
//! | `SIMCUDA_LACKS` | | exported functions, comma separated, that this driver lacks |
//! | `SIMCUDA_SELF_LOOKUP` | 0 | 1: `cuInit` looks own symbols up with `dlsym`, and fails with 999 if it gets others |
//! | `SIMCUDA_INIT_THREAD` | 0 | 1: `cuInit` starts a thread that calls `cuInit` through `dlsym`, and joins it |
//! | `SIMCUDA_TRACE` | | file to which a line is appended for each call: name, result |
//!
//! # Locks, in order
//! 1. the state's lock (`state::state`); 2. a stream's queue lock. Fault and trace locks are leaves. Nobody waits for a stream
//!    while holding the state's lock: a worker may need it.
//!
//! # What is not modelled
//! Kernels, modules, arrays, textures. Peer access is recorded but never refused: all memory is one host's. A host thread in
//! `cuMemFree` does not hold other threads' submissions back, as the real one does. Destroying or resetting a context first
//! lets its work end.
// The names, the raw pointers and the long argument lists are CUDA's.
#![allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

mod absent;
mod backing;
mod call;
mod capture;
mod codes;
mod config;
mod context;
mod control;
mod copy;
mod device;
mod engine;
mod event;
mod fault;
mod graph;
mod host;
mod ipc;
mod memory;
mod pointer;
mod pools;
mod proc_address;
mod quirks;
mod state;
mod stream;
#[cfg(test)]
mod tests;
mod trace;
mod vmm;
